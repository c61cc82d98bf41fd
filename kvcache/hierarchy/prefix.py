"""How far a prefix reaches: the longest one for which every group has every block that its rule needs."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block.layout import KVLayout, needed


def usable(layout: KVLayout, present: Sequence[Sequence[int]]) -> int:
    """Blocks from the front. `present[group][block]` is true where the block is there with all its shards."""
    blocks = min(map(len, present))
    for group, here in zip(layout.groups, present, strict=True):
        if group.rule == "all":
            blocks = next((i for i in range(blocks) if not here[i]), blocks)
    while blocks and not all(
        all(here[blocks - needed(group, blocks, layout.block_tokens) : blocks])
        for group, here in zip(layout.groups, present, strict=True)
    ):
        blocks -= 1
    return blocks


def wanted(layout: KVLayout, blocks: int) -> list[range]:
    """By group, the blocks that a prefix of so many blocks needs."""
    return [range(blocks - needed(group, blocks, layout.block_tokens), blocks) for group in layout.groups]

"""How far a prefix reaches: the longest one for which every group has every block that its rule needs."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block.layout import KVLayout, needed

ALL = 1 << 32
"""As a need: however many blocks there are."""


def needs(layout: KVLayout) -> list[int]:
    """By group, how many of the last blocks of a prefix its rule needs."""
    return [needed(group, ALL, layout.block_tokens) for group in layout.groups]


def usable(needs: Sequence[int], present: Sequence[Sequence[int]]) -> int:
    """Blocks from the front. `present[group][block]` is true where the block is there with all its shards."""
    blocks = min(map(len, present))
    for need, here in zip(needs, present, strict=True):
        if need >= ALL:
            blocks = next((i for i in range(blocks) if not here[i]), blocks)
    while blocks and not all(all(here[max(0, blocks - n) : blocks]) for n, here in zip(needs, present, strict=True)):
        blocks -= 1
    return blocks


def wanted(layout: KVLayout, blocks: int) -> list[range]:
    """By group, the blocks that a prefix of so many blocks needs."""
    return [range(max(0, blocks - need), blocks) for need in needs(layout)]

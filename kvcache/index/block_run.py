"""What the index is asked about: consecutive blocks of one chain, at one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import KVLayout, Shard, blocks_needed
from kvcache.block.record import Address

PackedSignatures = bytes | bytearray | memoryview
"""Signatures one behind the other, 32 bytes each."""


PLACE_BYTES = 42


def place_of(namespace: bytes, group: int, shard: Shard) -> bytes:
    """42 bytes: all that an address says but which block it is."""
    return namespace + group.to_bytes(2, "little") + shard.pack()


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard of one group: its payload size, and what the index knows it by."""

    group: int
    shard: Shard
    payload_bytes: int
    name: bytes


class BlockRun(NamedTuple):
    place: bytes
    signatures: PackedSignatures

    @classmethod
    def of(cls, address: Address) -> BlockRun:
        """The run of one block."""
        return cls(place_of_address(address), address.signature)

    @property
    def blocks(self) -> int:
        return len(self.signatures) // SIGNATURE_BYTES

    def part(self, first: int, end: int) -> BlockRun:
        """Blocks `first` to `end` (excluded)."""
        return BlockRun(self.place, memoryview(self.signatures)[first * SIGNATURE_BYTES : end * SIGNATURE_BYTES])


def place_of_address(address: Address) -> bytes:
    return place_of(address.namespace, address.group, address.shard)


def as_run(addresses: Sequence[Address]) -> BlockRun:
    """As one run, for calls that look at each block alone; all at one place."""
    return BlockRun(place_of_address(addresses[0]), b"".join(address.signature for address in addresses))


def chained_runs(addresses: Sequence[Address]) -> Iterator[tuple[BlockRun, bytes]]:
    """As runs of blocks of which each is the parent of the next, and the parent of the first of each."""
    first = 0
    for i in range(1, len(addresses) + 1):
        before = addresses[i - 1]
        if (
            i == len(addresses)
            or addresses[i].parent != before.signature
            or (place_of_address(addresses[i]) != place_of_address(before))
        ):
            yield as_run(addresses[first:i]), addresses[first].parent
            first = i


@dataclass(frozen=True, slots=True)
class ChainView:
    """The records of one chain at one place, as it was when this was made: each address made when it is asked for, so
    that a long prompt costs nothing but the blocks that move."""

    namespace: bytes
    packed: bytes
    group: int
    shard: Shard
    payload_bytes: int
    head: bytes  # parent of the first: the namespace, a signature, or empty where that is not known

    def __len__(self) -> int:
        return len(self.packed) // SIGNATURE_BYTES

    def __getitem__(self, block: int) -> Address:
        at = block * SIGNATURE_BYTES
        return Address(
            self.namespace, self.packed[at : at + SIGNATURE_BYTES], self.parent(block), self.group, self.shard
        )

    def addresses(self, blocks: Sequence[int]) -> list[Address]:
        """Those of these blocks, in ascending order; a signature that is also a parent is kept once."""
        made: list[Address] = []
        last, signature = -1, self.head
        for block in blocks:
            parent = signature if block == last + 1 else self.parent(block)
            last, at = block, block * SIGNATURE_BYTES
            signature = self.packed[at : at + SIGNATURE_BYTES]
            made.append(Address(self.namespace, signature, parent, self.group, self.shard))
        return made

    def parent(self, block: int) -> bytes:
        """The signature before it, or the head."""
        at = block * SIGNATURE_BYTES
        return self.packed[at - SIGNATURE_BYTES : at] if block else self.head

    def run(self, first: int, end: int) -> BlockRun:
        """Blocks `first` to `end` (excluded), as the index is asked about them."""
        return BlockRun(place_of(self.namespace, self.group, self.shard), self.packed).part(first, end)


def contiguous_ranges(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending numbers as (first, end excluded) of each stretch without a gap."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[first], blocks[i - 1] + 1
            first = i


# How far a prefix reaches: the longest one for which every group has every block that its rule needs.

ALL_BLOCKS = 1 << 32
"""As a need: however many blocks there are."""


def needs(layout: KVLayout) -> list[int]:
    """By group, how many of the last blocks of a prefix its rule needs."""
    return [blocks_needed(group, ALL_BLOCKS, layout.block_tokens) for group in layout.groups]


def usable_prefix(needs: Sequence[int], present: Sequence[Sequence[int]]) -> int:
    """Blocks from the front. `present[group][block]` is true where the block is there with all its shards."""
    blocks = min(map(len, present))
    for need, here in zip(needs, present, strict=True):
        if need >= ALL_BLOCKS:
            blocks = next((i for i in range(blocks) if not here[i]), blocks)
    while blocks and not all(all(here[max(0, blocks - n) : blocks]) for n, here in zip(needs, present, strict=True)):
        blocks -= 1
    return blocks


def wanted(layout: KVLayout, blocks: int) -> list[range]:
    """By group, the blocks that a prefix of so many blocks needs."""
    return [range(max(0, blocks - need), blocks) for need in needs(layout)]

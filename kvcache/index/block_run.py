"""Consecutive blocks of one chain and shard, as the index takes them, and the usable length of a prefix."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import KVLayout, Shard, blocks_needed
from kvcache.block.record import Address

PackedSignatures = bytes | bytearray | memoryview
"""Concatenated signatures, 32 bytes each."""


SHARD_KEY_BYTES = 42


def pack_shard_key(namespace: bytes, group: int, shard: Shard) -> bytes:
    """42 bytes: all of an address except the block."""
    return namespace + group.to_bytes(2, "little") + shard.pack()


@dataclass(frozen=True, slots=True)
class ShardRef:
    """One shard of one group: its payload size, and its key in the index."""

    group: int
    shard: Shard
    payload_bytes: int
    key: bytes


class BlockRun(NamedTuple):
    shard_key: bytes
    signatures: PackedSignatures

    @classmethod
    def of(cls, address: Address) -> BlockRun:
        """The run of one block."""
        return cls(shard_key_of(address), address.signature)

    @property
    def blocks(self) -> int:
        return len(self.signatures) // SIGNATURE_BYTES

    def part(self, first: int, end: int) -> BlockRun:
        """Blocks `first` to `end` (excluded)."""
        return BlockRun(self.shard_key, memoryview(self.signatures)[first * SIGNATURE_BYTES : end * SIGNATURE_BYTES])


def shard_key_of(address: Address) -> bytes:
    return pack_shard_key(address.namespace, address.group, address.shard)


def as_run(addresses: Sequence[Address]) -> BlockRun:
    """One run of records of one shard, for calls that treat each block alone."""
    return BlockRun(shard_key_of(addresses[0]), b"".join(address.signature for address in addresses))


def chained_runs(addresses: Sequence[Address]) -> Iterator[tuple[BlockRun, bytes]]:
    """Split addresses into runs in which each block is the parent of the next; each with its first block's parent."""
    first = 0
    for i in range(1, len(addresses) + 1):
        before = addresses[i - 1]
        if (
            i == len(addresses)
            or addresses[i].parent != before.signature
            or (shard_key_of(addresses[i]) != shard_key_of(before))
        ):
            yield as_run(addresses[first:i]), addresses[first].parent
            first = i


@dataclass(frozen=True, slots=True)
class ChainView:
    """An immutable view of one chain in one shard.

    Addresses are built on request, so that a long prompt costs only for the blocks that move.
    """

    namespace: bytes
    packed: bytes
    group: int
    shard: Shard
    payload_bytes: int
    head: bytes  # parent of the first block: the namespace, a signature, or empty if unknown

    def __len__(self) -> int:
        return len(self.packed) // SIGNATURE_BYTES

    def __getitem__(self, block: int) -> Address:
        at = block * SIGNATURE_BYTES
        return Address(
            self.namespace, self.packed[at : at + SIGNATURE_BYTES], self.parent(block), self.group, self.shard
        )

    def addresses(self, blocks: Sequence[int]) -> list[Address]:
        """Addresses of these blocks, in ascending order. A signature that is also a parent is stored once."""
        made: list[Address] = []
        last, signature = -1, self.head
        for block in blocks:
            parent = signature if block == last + 1 else self.parent(block)
            last, at = block, block * SIGNATURE_BYTES
            signature = self.packed[at : at + SIGNATURE_BYTES]
            made.append(Address(self.namespace, signature, parent, self.group, self.shard))
        return made

    def parent(self, block: int) -> bytes:
        """The signature of the block before it, or the head."""
        at = block * SIGNATURE_BYTES
        return self.packed[at - SIGNATURE_BYTES : at] if block else self.head

    def run(self, first: int, end: int) -> BlockRun:
        """Blocks `first` to `end` (excluded), for the index."""
        return BlockRun(pack_shard_key(self.namespace, self.group, self.shard), self.packed).part(first, end)


def contiguous_ranges(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Each gapless range of ascending numbers, as (first, end excluded)."""
    first = 0
    for i in range(1, len(blocks) + 1):
        if i == len(blocks) or blocks[i] != blocks[i - 1] + 1:
            yield blocks[first], blocks[i - 1] + 1
            first = i


# The usable prefix: the longest one for which every group has every block that its rule needs.

ALL_BLOCKS = 1 << 32
"""As a need: all blocks of the prefix."""


def needs(layout: KVLayout) -> list[int]:
    """By group, how many of the last blocks of a prefix its rule needs."""
    return [blocks_needed(group, ALL_BLOCKS, layout.block_tokens) for group in layout.groups]


def usable_prefix(needs: Sequence[int], present: Sequence[Sequence[int]]) -> int:
    """Usable leading blocks. `present[group][block]` is true if the block is there with all its shards."""
    blocks = min(map(len, present))
    for need, here in zip(needs, present, strict=True):
        if need >= ALL_BLOCKS:
            blocks = next((i for i in range(blocks) if not here[i]), blocks)
    while blocks and not all(all(here[max(0, blocks - n) : blocks]) for n, here in zip(needs, present, strict=True)):
        blocks -= 1
    return blocks


def wanted(layout: KVLayout, blocks: int) -> list[range]:
    """By group, the blocks that a prefix of this many blocks needs."""
    return [range(max(0, blocks - need), blocks) for need in needs(layout)]

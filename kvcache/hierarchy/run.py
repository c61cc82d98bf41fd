"""What the index is asked about: consecutive blocks of one chain, at one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcache.block.address import Address
from kvcache.block.key import SIGNATURE_BYTES
from kvcache.block.layout import Shard

Packed = bytes | bytearray | memoryview
"""Signatures one behind the other, 32 bytes each."""


def place_of(namespace: bytes, group: int, shard: Shard) -> bytes:
    """42 bytes: all that an address says but which block it is."""
    return namespace + group.to_bytes(2, "little") + shard.pack()


class Run(NamedTuple):
    place: bytes
    signatures: Packed

    @classmethod
    def of(cls, address: Address) -> Run:
        """The run of one block."""
        return cls(place_of(address.namespace, address.group, address.shard), address.signature)

    @property
    def blocks(self) -> int:
        return len(self.signatures) // SIGNATURE_BYTES

    def part(self, first: int, end: int) -> Run:
        """Blocks `first` to `end` (excluded)."""
        return Run(self.place, memoryview(self.signatures)[first * SIGNATURE_BYTES : end * SIGNATURE_BYTES])


@dataclass(frozen=True, slots=True)
class Chained:
    """The records of one chain at one place, as it was when this was made: each address made when it is asked for, so
    that a long prompt costs nothing but the blocks that move."""

    namespace: bytes
    packed: bytes
    group: int
    shard: Shard
    payload_bytes: int

    def __len__(self) -> int:
        return len(self.packed) // SIGNATURE_BYTES

    def __getitem__(self, block: int) -> Address:
        at = block * SIGNATURE_BYTES
        parent = self.packed[at - SIGNATURE_BYTES : at] if block else self.namespace
        return Address(self.namespace, self.packed[at : at + SIGNATURE_BYTES], parent, self.group, self.shard)

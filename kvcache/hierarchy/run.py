"""What the index is asked about: consecutive blocks of one chain, at one place."""

from __future__ import annotations

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

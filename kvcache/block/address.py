"""What a tier stores a record under, and what a reader holds against it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.block.layout import Shard

KEY_BYTES = 16
NAME_BYTES = KEY_BYTES + 2 + 8


@dataclass(frozen=True, slots=True)
class Address:
    """One record: key, group and shard find it; namespace, signature and parent tell whether it is the right one.

    `parent` is the signature of the block before, the namespace id for the first one, empty where this side does not
    know it. All are raw bytes, 32 long.
    """

    namespace: bytes
    signature: bytes
    parent: bytes
    group: int
    shard: Shard

    @property
    def key(self) -> bytes:
        """16 bytes, the head of the signature."""
        return self.signature[:KEY_BYTES]

    @property
    def name(self) -> bytes:
        """26 bytes: key, group as little-endian uint16, shard. What tiers index by."""
        return self.key + self.group.to_bytes(2, "little") + self.shard.pack()

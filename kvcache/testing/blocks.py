"""Blocks for tests of tiers: addresses in chains, sealed records, buffers to read into."""

from __future__ import annotations

import hashlib
import mmap

from kvcache.block.layout import Shard
from kvcache.block.record import Address, header_area, record_bytes, seal

PAYLOAD_BYTES = 12_000
RECORD_BYTES = record_bytes(PAYLOAD_BYTES)
SHARD = Shard(0, 2, 0, 4)


def namespace(n: int = 0) -> bytes:
    return hashlib.sha256(b"namespace %d" % n).digest()


def chain(length: int, *, of: int = 0, seed: int = 0, group: int = 0, shard: Shard = SHARD) -> list[Address]:
    """The addresses of a prefix, head first; other seeds share nothing."""
    parent, addresses = namespace(of), []
    for i in range(length):
        signature = hashlib.sha256(parent + b"%d %d" % (seed, i)).digest()
        addresses.append(Address(namespace(of), signature, parent, group, shard))
        parent = signature
    return addresses


def payload(address: Address, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """What belongs under an address, and nowhere else."""
    seed = hashlib.sha256(address.namespace + address.name + address.signature).digest()
    return (seed * (size_bytes // 32 + 1))[:size_bytes]


def buffer(payload_bytes: int = PAYLOAD_BYTES, *, offset: int = 0) -> list[memoryview]:
    """Segments to read into, on page boundaries but for `offset` bytes, full of what must not survive."""
    total, area = record_bytes(payload_bytes), header_area(payload_bytes)
    memory = memoryview(mmap.mmap(-1, total + offset))[offset:]
    memory[:] = b"\xee" * total
    return [memory[:area], memory[area:]]


def record(
    address: Address, size_bytes: int = PAYLOAD_BYTES, *, offset: int = 0, data: bytes | None = None
) -> list[memoryview]:
    """A sealed record, as a tier takes it."""
    segments = buffer(size_bytes, offset=offset)
    segments[1][:size_bytes] = payload(address, size_bytes) if data is None else data
    segments[1][size_bytes:] = bytes(len(segments[1]) - size_bytes)
    seal(segments[0], segments[1], address, stored_bytes=size_bytes)
    return segments


def holds(segments: list[memoryview], address: Address, size_bytes: int = PAYLOAD_BYTES) -> bool:
    return b"".join(segments[1:])[:size_bytes] == payload(address, size_bytes)

"""One entry of the journal: 104 bytes that say one thing about one slot, segment or namespace.

In memory the put entry of a record is also what the index knows of it, so that a checkpoint is a copy and a restart
is a parse. Byte by byte in `docs/spec/journal.md`.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.block.record import EXPIRY, KEY_BYTES, Header

PUT, REMOVE, QUARANTINE, SEGMENT, RETIRE, NAMESPACE, SYNCED = range(1, 8)
ENDS = 1
"""Of a put entry, among its flags: the record says when it ends."""
FREE = 0
"""Of a row in memory, never in a file: the slot holds nothing."""

FORM = Struct("<BBH8sI32s32sIIQQ")
ENTRY_BYTES = FORM.size
COLUMNS = np.dtype(
    [
        ("kind", "u1"),
        ("flags", "u1"),
        ("group", "<u2"),
        ("shard", "u1", 8),
        ("namespace", "<u4"),
        ("signature", "u1", 32),
        ("parent", "u1", 32),
        ("segment", "<u4"),
        ("slot", "<u4"),
        ("record_bytes", "<u8"),
        ("write_id", "<u8"),
    ]
)
"""The same bytes for numpy: many entries are parsed at once."""

UNKNOWN = bytes(32)
"""A parent that the writer did not know."""


class Entry(NamedTuple):
    """What does not matter to a kind is zero; `namespace` is the number under which the journal knows it."""

    kind: int
    flags: int = 0
    group: int = 0
    shard: bytes = bytes(8)
    namespace: int = 0
    signature: bytes = bytes(32)
    parent: bytes = UNKNOWN
    segment: int = 0
    slot: int = 0
    record_bytes: int = 0
    write_id: int = 0

    def pack(self) -> bytes:
        return FORM.pack(*self)

    @classmethod
    def unpack(cls, rows: bytes | bytearray, i: int = 0) -> Entry:
        return cls._make(FORM.unpack_from(rows, i * ENTRY_BYTES))


def put_entry(header: Header) -> Entry:
    """Of a record's header what is to be known of it before it has a place."""
    return Entry(PUT, ENDS if EXPIRY in header.fields else 0, write_id=header.write_id)


def names(entries: NDArray[np.void]) -> list[bytes]:
    """The 26-byte name of each entry: key, group, shard."""
    bytes_of = entries.view(np.uint8).reshape(-1, ENTRY_BYTES)
    at, end = KEY_BYTES, KEY_BYTES + 10
    packed = np.empty((len(bytes_of), end), np.uint8)
    packed[:, :at] = bytes_of[:, 16 : 16 + KEY_BYTES]
    packed[:, at:] = bytes_of[:, 2:12]
    joined = packed.tobytes()
    return [joined[i : i + end] for i in range(0, len(joined), end)]

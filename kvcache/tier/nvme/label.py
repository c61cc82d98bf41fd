"""The last page of a segment's file: what its slots are, for when no journal is left that says so.

Byte by byte in `docs/spec/journal.md`.
"""

from __future__ import annotations

from struct import Struct
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

MAGIC = b"KVCSGMT\n"
VERSION = 1
LABEL_BYTES = 4096

_FORM = Struct("<8sIIQQ")
_SUM = Struct("<Q")


class Label(NamedTuple):
    slots: int
    number: int
    slot_bytes: int

    def pack(self) -> bytes:
        fixed = _FORM.pack(MAGIC, VERSION, self.slots, self.number, self.slot_bytes)
        return (fixed + _SUM.pack(xxh3_64_intdigest(fixed))).ljust(LABEL_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes | bytearray | memoryview) -> Label | None:
        """What a page says; None where it is no sound label of this version."""
        if len(page) < LABEL_BYTES:
            return None
        magic, version, slots, number, slot_bytes = _FORM.unpack_from(page)
        sound = _SUM.unpack_from(page, _FORM.size)[0] == xxh3_64_intdigest(bytes(page[: _FORM.size]))
        return cls(slots, number, slot_bytes) if sound and (magic, version) == (MAGIC, VERSION) else None

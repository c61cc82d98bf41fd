"""The bytes of a journal file: a header, then frames of entries, each whole or not there.

A frame has a checksum over its entries and the sequence number of the first one, so that a reader knows where what it
can trust ends. Knows nothing of files. Byte by byte in `docs/spec/journal.md`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct
from typing import Literal

from xxhash import xxh3_64, xxh3_64_intdigest

from kvcache.tier.nvme.entry import ENTRY_BYTES

MAGIC = b"KVCJRNL\n"
VERSION = 1
JOURNAL, CHECKPOINT = 0, 1
FRAME_MAGIC = b"KVJF"

_HEADER = Struct("<8sHHHHQQQ")
_FRAME = Struct("<4sIQ")
_SUM = Struct("<Q")
HEADER_BYTES = _HEADER.size + _SUM.size
FRAME_BYTES = _FRAME.size + _SUM.size

End = Literal["whole", "torn", "damaged"]
"""How a file ends: with its last frame; in a frame that was never finished; or sound frames follow a bad one."""


class HeaderError(ValueError):
    """A file header that cannot be used; the text says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """`number` stands in the file's name too. `sequence`: of a journal, that of its first entry; of a checkpoint, that
    of the first entry it does not contain. `count`: of a checkpoint, its entries."""

    kind: int
    number: int
    sequence: int
    count: int = 0

    def pack(self) -> bytes:
        fixed = _HEADER.pack(MAGIC, VERSION, self.kind, ENTRY_BYTES, 0, self.number, self.sequence, self.count)
        return fixed + _SUM.pack(xxh3_64_intdigest(fixed))

    @classmethod
    def unpack(cls, data: bytes | bytearray, kind: int, number: int) -> FileHeader:
        """The header at the start of a file; HeaderError for any but a sound one of this kind and number."""
        if len(data) < HEADER_BYTES:
            raise HeaderError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
        magic, version, found, entry_bytes, _, named, sequence, count = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise HeaderError(f"a header that begins with {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise HeaderError(f"version {version}, expected {VERSION}")
        if _SUM.unpack_from(data, _HEADER.size)[0] != xxh3_64_intdigest(memoryview(data)[: _HEADER.size]):
            raise HeaderError("a header whose checksum does not match its bytes")
        if (found, named, entry_bytes) != (kind, number, ENTRY_BYTES):
            raise HeaderError(
                f"kind {found}, number {named}, entry size {entry_bytes}, expected {kind}, {number}, {ENTRY_BYTES}"
            )
        return cls(kind, number, sequence, count)


@dataclass(frozen=True, slots=True)
class Frames:
    """The trusted entries of a file, where they end, and the sequence number that comes next."""

    entries: Sequence[memoryview]
    end_bytes: int
    sequence: int
    end: End


def pack_frame(entries: bytes, sequence: int, number: int) -> bytes:
    """One frame. `number` is the file's: it seeds the checksum, so that a frame of another file is no frame of this."""
    head = _FRAME.pack(FRAME_MAGIC, len(entries) // ENTRY_BYTES, sequence)
    return head + _SUM.pack(_frame_sum(head, entries, number)) + entries


def read_frames(data: bytearray, sequence: int, number: int) -> Frames:
    """The frames of a whole file, up to the first that is not sound or does not follow the one before."""
    view = memoryview(data)
    entries: list[memoryview] = []
    at = HEADER_BYTES
    while at < len(data):
        frame = _read_frame(view, at, number)
        if frame is None or frame[0] != sequence:
            end: End = "damaged" if _sound_after(data, at, sequence, number) else "torn"
            return Frames(entries, at, sequence, end)
        body = frame[1]
        entries.append(body)
        sequence += len(body) // ENTRY_BYTES
        at += FRAME_BYTES + len(body)
    return Frames(entries, at, sequence, "whole")


def _read_frame(view: memoryview, at: int, number: int) -> tuple[int, memoryview] | None:
    """Sequence and entries of the frame at an offset, where there is a sound one."""
    if at + FRAME_BYTES > len(view):
        return None
    head = view[at : at + _FRAME.size]
    magic, count, sequence = _FRAME.unpack(head)
    start = at + FRAME_BYTES
    if magic != FRAME_MAGIC or not 0 < count * ENTRY_BYTES <= len(view) - start:
        return None
    body = view[start : start + count * ENTRY_BYTES]
    if _SUM.unpack_from(view, at + _FRAME.size)[0] != _frame_sum(head, body, number):
        return None
    return sequence, body


def _sound_after(data: bytearray, at: int, sequence: int, number: int) -> bool:
    """Whether a later frame is sound: then the bad one was not the end of the file when it was written."""
    view = memoryview(data)
    at = data.find(FRAME_MAGIC, at)
    while at >= 0:
        frame = _read_frame(view, at, number)
        if frame is not None and frame[0] >= sequence:
            return True
        at = data.find(FRAME_MAGIC, at + 1)
    return False


def _frame_sum(head: bytes | memoryview, entries: bytes | memoryview, number: int) -> int:
    state = xxh3_64(head, seed=number)
    state.update(entries)
    return state.intdigest()

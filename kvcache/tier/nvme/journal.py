"""The journal: an append-only log of entries that says which slot of a store holds which record.

`checkpoint-N` holds the state in which `journal-N` begins; the first journal begins empty. Compaction first starts the
next journal and then writes the checkpoint of the same number. So at every instant the newest checkpoint and the
journals from its number on hold the complete state. Entries after a damaged frame are not trusted.

The file has three sections: entries, frames (the byte format), and `Journal` (the files). `docs/spec/journal.md`
specifies the bytes.

Thread safety: none. `Catalog` lets one thread append at a time; `DurabilityBarrier` never rotates during a sync.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from struct import Struct
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64, xxh3_64_intdigest

from kvcache.block.record import EXPIRY, KEY_BYTES, Header
from kvcache.errors import StoreError
from kvcache.os_env import File
from kvcache.tier.nvme.directory import Directory

# Entries: 104 bytes that record one fact about one slot, segment or namespace. In memory, a record's put entry is also
# its row in the index, so a checkpoint is a copy and a restart is a parse.

PUT, REMOVE, QUARANTINE, SEGMENT, RETIRE, NAMESPACE, SYNCED = range(1, 8)
FLAG_EXPIRES = 1
"""Flag of a put entry: the record has an expiry."""
FREE = 0
"""Kind of a row in memory, never in a file: the slot is free."""

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
"""The layout of an entry for numpy, which parses many at once."""

UNKNOWN = bytes(32)
"""The parent of a record whose writer did not know it."""


class Entry(NamedTuple):
    """A decoded entry. Fields that its kind does not use are zero. `namespace` is the number of a NAMESPACE entry."""

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
    """Return a put entry with the fields that a header fixes before the record has a slot."""
    return Entry(PUT, FLAG_EXPIRES if EXPIRY in header.fields else 0, write_id=header.write_id)


def names(entries: NDArray[np.void]) -> list[bytes]:
    """Return the 26-byte name of each entry: key, group, shard."""
    bytes_of = entries.view(np.uint8).reshape(-1, ENTRY_BYTES)
    at, end = KEY_BYTES, KEY_BYTES + 10
    packed = np.empty((len(bytes_of), end), np.uint8)
    packed[:, :at] = bytes_of[:, 16 : 16 + KEY_BYTES]
    packed[:, at:] = bytes_of[:, 2:12]
    joined = packed.tobytes()
    return [joined[i : i + end] for i in range(0, len(joined), end)]


# Frames: the bytes of a journal file. A header precedes frames of entries, and each frame is valid as a whole or not at
# all. A frame has a checksum over its entries and the sequence number of the first one, so a reader knows where the
# trusted part ends. This section opens no file.

MAGIC = b"KVCJRNL\n"
VERSION = 1
JOURNAL, CHECKPOINT = 0, 1
FRAME_MAGIC = b"KVJF"

_HEADER = Struct("<8sHHHHQQQ")
_FRAME = Struct("<4sIQ")
_SUM = Struct("<Q")
HEADER_BYTES = _HEADER.size + _SUM.size
FRAME_BYTES = _FRAME.size + _SUM.size

FileEnd = Literal["whole", "torn", "damaged"]
"""The end of a file: after its last frame; within an unfinished frame; or sound frames follow a bad one."""


class HeaderError(ValueError):
    """A file header cannot be used; the text says what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class FileHeader:
    """The header of a journal or checkpoint file.

    `number` is also in the file's name. `sequence` is that of a journal's first entry, or of the first entry that a
    checkpoint does not contain. `count` is the number of a checkpoint's entries.
    """

    kind: int
    number: int
    sequence: int
    count: int = 0

    def pack(self) -> bytes:
        fixed = _HEADER.pack(MAGIC, VERSION, self.kind, ENTRY_BYTES, 0, self.number, self.sequence, self.count)
        return fixed + _SUM.pack(xxh3_64_intdigest(fixed))

    @classmethod
    def unpack(cls, data: bytes | bytearray, kind: int, number: int) -> FileHeader:
        """Decode the header at the start of a file.

        Raises:
            HeaderError: it is damaged, or of another kind, number or version.
        """
        if len(data) < HEADER_BYTES:
            raise HeaderError(f"a header of {len(data)} bytes, expected {HEADER_BYTES}")
        magic, version, contents, entry_bytes, _, named, sequence, count = _HEADER.unpack_from(data)
        if magic != MAGIC:
            raise HeaderError(f"a header that begins with {magic!r}, expected {MAGIC!r}")
        if version != VERSION:
            raise HeaderError(f"version {version}, expected {VERSION}")
        if _SUM.unpack_from(data, _HEADER.size)[0] != xxh3_64_intdigest(memoryview(data)[: _HEADER.size]):
            raise HeaderError("a header whose checksum does not match its bytes")
        if (contents, named, entry_bytes) != (kind, number, ENTRY_BYTES):
            raise HeaderError(
                f"kind {contents}, number {named}, entry size {entry_bytes}, expected {kind}, {number}, {ENTRY_BYTES}"
            )
        return cls(kind, number, sequence, count)


@dataclass(frozen=True, slots=True)
class Frames:
    """The trusted entries of a file, the offset where they end, and the next sequence number."""

    entries: Sequence[memoryview]
    valid_bytes: int
    sequence: int
    end: FileEnd


def pack_frame(entries: bytes, sequence: int, number: int) -> bytes:
    """Return one frame. The file's `number` seeds the checksum, so that a frame of another file does not verify."""
    head = _FRAME.pack(FRAME_MAGIC, len(entries) // ENTRY_BYTES, sequence)
    return head + _SUM.pack(_frame_sum(head, entries, number)) + entries


def read_frames(data: bytearray, sequence: int, number: int) -> Frames:
    """Decode the frames of a whole file, up to the first that is damaged or out of sequence."""
    view = memoryview(data)
    entries: list[memoryview] = []
    at = HEADER_BYTES
    while at < len(data):
        frame = _read_frame(view, at, number)
        if frame is None or frame[0] != sequence:
            end: FileEnd = "damaged" if _sound_after(data, at, sequence, number) else "torn"
            return Frames(entries, at, sequence, end)
        body = frame[1]
        entries.append(body)
        sequence += len(body) // ENTRY_BYTES
        at += FRAME_BYTES + len(body)
    return Frames(entries, at, sequence, "whole")


def _read_frame(view: memoryview, at: int, number: int) -> tuple[int, memoryview] | None:
    """Return sequence number and entries of the frame at an offset; None where it is not sound."""
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
    """Return whether a later frame is sound: then the bad frame was not the end of the file when it was written."""
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


_FRAME_BYTES = 8192 * ENTRY_BYTES


@dataclass(slots=True)
class JournalContents:
    """The trusted contents of a store's checkpoint and journals.

    `safe` counts the leading entries that a sync has covered, together with the records they name. `journals` maps each
    journal that was read to the length of its sound part. `torn` counts the bytes after the sound part of the last
    journal. `damaged` names the file in which trust ends.
    """

    entries: bytes = b""
    safe: int = 0
    checkpoint: int = 0  # 0: none
    journals: dict[int, int] = field(default_factory=dict)
    sequence: int = 0  # of the next entry
    base: int = 0  # of the first entry after the checkpoint
    torn: int = 0
    damaged: str = ""


class Journal:
    def __init__(self, directory: Directory) -> None:
        """Open the journal, or begin one in an empty directory.

        Raises:
            StoreError: files that must not be overwritten.
        """
        self.directory = directory
        for name in directory.unfinished():
            directory.disk.remove(directory.join(name))
        if max(directory.file_numbers("journal"), default=0) < max(directory.file_numbers("checkpoint"), default=1):
            self._begin()
        self.contents = contents = self.read()
        self.sequence, self._base = contents.sequence, contents.base
        self.number = max(directory.file_numbers("journal") + directory.file_numbers("checkpoint"))
        self._end = contents.journals.get(self.number, 0)
        self.in_doubt = bool(contents.damaged)
        """A sync failed, or trust ended before the last entry: only a checkpoint makes the state durable again."""
        self._inherited = dict(contents.journals)
        """Journals of an earlier process, by length. Its last sync may have failed, so a sync alone proves nothing."""
        self._file: File | None = None
        if not contents.damaged:  # otherwise the file stays unchanged until a checkpoint replaces it
            self._file = self._open(self.number)
            self._file.truncate(self._end)
            self._remove_before(contents.checkpoint)

    @classmethod
    def inspect(cls, directory: Directory) -> JournalContents:
        """Read the contents of a directory that has a journal or a checkpoint; changes nothing."""
        journal = cls.__new__(cls)
        journal.directory = directory
        return journal.read()

    @property
    def entries_behind(self) -> int:
        """Number of entries since the last checkpoint."""
        return self.sequence - self._base

    def _begin(self) -> None:
        checkpoints = self.directory.file_numbers("checkpoint")
        if checkpoints:  # an operator moved a bad journal away; the checkpoint is still valid
            number = checkpoints[-1]
            header = self._header(self.directory.read(f"checkpoint-{number}"), "checkpoint", number)
            self._create(number, header.sequence)
        elif self.directory.file_numbers("segment"):
            raise StoreError(
                f"nvme directory {self.directory.path}: segments, but no journal that says what is in them; put the "
                "journal back, run `kvcache nvme rebuild`, or delete the directory to begin with nothing"
            )
        else:
            self._create(1, 0)

    def read(self) -> JournalContents:
        """Read and decode the files."""
        contents = JournalContents()
        numbers = self.directory.file_numbers("journal")
        checkpoints = self.directory.file_numbers("checkpoint")
        parts: list[memoryview] = []
        if checkpoints:
            contents.checkpoint = checkpoints[-1]
            data = self.directory.read(f"checkpoint-{contents.checkpoint}")
            header = self._header(data, "checkpoint", contents.checkpoint)
            frames = read_frames(data, 0, contents.checkpoint)
            parts += frames.entries
            contents.sequence = contents.base = header.sequence
            if frames.end != "whole" or frames.sequence != header.count:
                contents.damaged = f"checkpoint-{contents.checkpoint}"
        elif self._header(self.directory.read(f"journal-{numbers[0]}"), "journal", numbers[0]).sequence:
            raise StoreError(
                f"nvme directory {self.directory.path}: journal-{numbers[0]} needs checkpoint-{numbers[0]}, which is "
                "not there; put it back, run `kvcache nvme rebuild`, or delete the directory to begin with nothing"
            )
        for number in numbers:
            if number >= contents.checkpoint:
                self._follow(number, contents, parts)
        contents.entries = b"".join(parts)
        in_checkpoint = len(contents.entries) // ENTRY_BYTES - (contents.sequence - contents.base)
        contents.safe = _safe(contents.entries, in_checkpoint, contents.base)
        return contents

    def _follow(self, number: int, contents: JournalContents, parts: list[memoryview]) -> None:
        """Read one more journal, unless trust ended before it."""
        data = self.directory.read(f"journal-{number}")
        header = self._header(data, "journal", number)
        if contents.damaged.startswith("journal"):
            return
        if header.sequence != contents.sequence:
            contents.damaged = f"journal-{max(contents.journals, default=number)}"
            return
        frames: Frames = read_frames(data, header.sequence, number)
        parts += frames.entries
        contents.journals[number], contents.sequence = frames.valid_bytes, frames.sequence
        contents.torn = len(data) - frames.valid_bytes
        if frames.end == "damaged":
            contents.damaged = f"journal-{number}"

    def append(self, entries: bytes) -> None:
        """Append entries in one frame: after a crash all of them are valid or none is.

        Raises:
            OSError: no entry was added; the next call overwrites the partial frame.
        """
        frame = pack_frame(entries, self.sequence, self.number)
        assert self._file is not None
        self._file.write(self._end, [memoryview(frame)])
        self._end += len(frame)
        self.sequence += len(entries) // ENTRY_BYTES

    def sync(self) -> None:
        """Return when every entry is on the medium.

        Raises:
            OSError: durability is unknown.
        """
        if self.in_doubt or self._file is None:
            raise OSError(errno.EIO, "an earlier sync of the journal failed and no checkpoint followed")
        try:
            self._write_again()
            self._file.sync()
        except OSError:
            self.in_doubt = True  # a second sync may report success without having written anything
            raise

    def _write_again(self) -> None:
        """Rewrite the bytes of an earlier process, so that the operating system has dirty pages to sync."""
        for number, end in list(self._inherited.items()):
            file = self._open(number)
            try:
                data = memoryview(bytearray(end))
                if file.read(0, [data]) != end:
                    raise OSError(errno.EIO, f"journal-{number} could not be read to its end")
                file.write(0, [data])
                file.sync()
            finally:
                file.close()
            del self._inherited[number]

    def rotate(self) -> FileHeader:
        """Begin the next journal; return the header for `checkpoint`, to be called with the state of this moment."""
        if self._file is not None:
            try:
                self._write_again()
                self._file.sync()  # later entries must not become durable before these
            except OSError:
                self.in_doubt = True
        number = self.number + 1
        header = FileHeader(JOURNAL, number, self.sequence).pack()
        file = self.directory.create(f"journal-{number}", [header])
        self.close()  # the new file has its name: it is the journal even if a later step fails
        self._file, self.number, self._end = file, number, len(header)
        try:
            self.directory.sync()
        except OSError:
            self.in_doubt = True
            raise
        return FileHeader(CHECKPOINT, number, self.sequence)

    def checkpoint(self, header: FileHeader, state: Iterator[bytes], count: int) -> None:
        """Write the state, and remove the files that it replaces. May run in parallel with `append`."""
        header = FileHeader(CHECKPOINT, header.number, header.sequence, count)
        self.directory.write(f"checkpoint-{header.number}", chain([header.pack()], frames(state, header.number)))
        self._base = header.sequence
        self.in_doubt = False
        self._inherited.clear()
        with suppress(OSError):  # the next checkpoint tries again
            self._remove_before(header.number)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _create(self, number: int, sequence: int) -> None:
        self.directory.write(f"journal-{number}", [FileHeader(JOURNAL, number, sequence).pack()])

    def _open(self, number: int) -> File:
        return self.directory.disk.open(self.directory.join(f"journal-{number}"))

    def _header(self, data: bytearray, noun: str, number: int) -> FileHeader:
        try:
            return FileHeader.unpack(data, CHECKPOINT if noun == "checkpoint" else JOURNAL, number)
        except HeaderError as error:
            raise StoreError(
                f"nvme directory {self.directory.path}: {noun}-{number} has {error}; nothing was changed: put back a "
                "good copy, open it with the version that wrote it, run `kvcache nvme rebuild` to keep what its "
                "records prove, or delete the directory to begin with nothing"
            ) from None

    def _remove_before(self, number: int) -> None:
        for noun in ("journal", "checkpoint"):
            for old in self.directory.file_numbers(noun):
                if old < number:
                    self.directory.disk.remove(self.directory.join(f"{noun}-{old}"))


def _safe(entries: bytes, in_checkpoint: int, base: int) -> int:
    """Return how many entries the last SYNCED mark covers.

    Args:
        entries: those of the checkpoint and of the journals from sequence number `base` on.
    """
    rows = np.frombuffer(entries, COLUMNS)
    marks = np.flatnonzero(rows["kind"] == SYNCED)
    safe = [int(rows["write_id"][i]) for i in marks[marks < in_checkpoint][-1:]]
    safe += [in_checkpoint + int(rows["write_id"][i]) - base for i in marks[marks >= in_checkpoint][-1:]]
    return max(safe, default=0)


def frames(state: Iterator[bytes], number: int) -> Iterator[bytes]:
    """Yield the entries of pieces of any size as frames of bounded size."""
    sequence = 0
    for piece in state:
        for at in range(0, len(piece), _FRAME_BYTES):
            entries = piece[at : at + _FRAME_BYTES]
            yield pack_frame(entries, sequence, number)
            sequence += len(entries) // ENTRY_BYTES

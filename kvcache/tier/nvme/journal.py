"""What is in a store, as it came to be: numbered files of entries, appended in order.

`checkpoint-N` holds the state in which `journal-N` begins; the first journal begins with nothing. Compaction first
turns to a new journal and then writes the checkpoint with its number, so that at any instant the newest checkpoint and
the journals from its number on are the whole truth. What follows a damaged frame is not trusted.

`Store` sees to it that no two threads append, and that none turns while another syncs."""

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

# One entry of the journal: 104 bytes that say one thing about one slot, segment or namespace. In memory the put entry
# of a record is also what the index knows of it, so that a checkpoint is a copy and a restart is a parse. Byte by
# byte in `docs/spec/journal.md`.

PUT, REMOVE, QUARANTINE, SEGMENT, RETIRE, NAMESPACE, SYNCED = range(1, 8)
FLAG_EXPIRES = 1
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
    return Entry(PUT, FLAG_EXPIRES if EXPIRY in header.fields else 0, write_id=header.write_id)


def names(entries: NDArray[np.void]) -> list[bytes]:
    """The 26-byte name of each entry: key, group, shard."""
    bytes_of = entries.view(np.uint8).reshape(-1, ENTRY_BYTES)
    at, end = KEY_BYTES, KEY_BYTES + 10
    packed = np.empty((len(bytes_of), end), np.uint8)
    packed[:, :at] = bytes_of[:, 16 : 16 + KEY_BYTES]
    packed[:, at:] = bytes_of[:, 2:12]
    joined = packed.tobytes()
    return [joined[i : i + end] for i in range(0, len(joined), end)]


# The bytes of a journal file: a header, then frames of entries, each whole or not there. A frame has a checksum over
# its entries and the sequence number of the first one, so that a reader knows where what it can trust ends. Knows
# nothing of files. Byte by byte in `docs/spec/journal.md`.

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
    """The trusted entries of a file, where they end, and the sequence number that comes next."""

    entries: Sequence[memoryview]
    valid_bytes: int
    sequence: int
    end: FileEnd


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
            end: FileEnd = "damaged" if _sound_after(data, at, sequence, number) else "torn"
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


_FRAME_BYTES = 8192 * ENTRY_BYTES


@dataclass(slots=True)
class JournalContents:
    """What a store's files say. `safe`: how many of the entries, from the first, a sync has covered, and all that they
    say. `journals`: those that were read, and how far each is sound. `torn`: bytes cut from the end of the last.
    `damaged`: the name of the file in which trust ends."""

    entries: bytes = b""
    safe: int = 0
    checkpoint: int = 0  # 0: none
    journals: dict[int, int] = field(default_factory=dict)
    sequence: int = 0  # of the entry to come
    base: int = 0  # of the first entry behind the checkpoint
    torn: int = 0
    damaged: str = ""


class Journal:
    def __init__(self, directory: Directory) -> None:
        """Open what is there, or begin. StoreError for files that must not be written over."""
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
        """A sync failed, or trust ended before the last entry: only a checkpoint makes what is known durable again."""
        self._inherited = dict(contents.journals)
        """Of another process, whose last sync may have failed, so that a sync of ours alone would say nothing."""
        self._file: File | None = None
        if not contents.damaged:  # else the file stays as it is until a checkpoint replaces it
            self._file = self._open(self.number)
            self._file.truncate(self._end)
            self._remove_before(contents.checkpoint)

    @classmethod
    def inspect(cls, directory: Directory) -> JournalContents:
        """What a directory's files say, at least one journal or checkpoint among them; changes nothing."""
        journal = cls.__new__(cls)
        journal.directory = directory
        return journal.read()

    @property
    def entries_behind(self) -> int:
        """Entries since the last checkpoint."""
        return self.sequence - self._base

    def _begin(self) -> None:
        checkpoints = self.directory.file_numbers("checkpoint")
        if checkpoints:  # an operator moved a bad journal away: what the checkpoint says is still there
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
        """What the files say now."""
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
        """Read one more journal, unless trust has ended before it."""
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
        """Add entries that are true together: after a crash all of them are there or none is. OSError: none was added,
        and the next call writes over what this one may have left."""
        frame = pack_frame(entries, self.sequence, self.number)
        assert self._file is not None
        self._file.write(self._end, [memoryview(frame)])
        self._end += len(frame)
        self.sequence += len(entries) // ENTRY_BYTES

    def sync(self) -> None:
        """Return when every entry is on the medium; OSError where that cannot be said."""
        if self.in_doubt or self._file is None:
            raise OSError(errno.EIO, "an earlier sync of the journal failed and no checkpoint was written since")
        try:
            self._write_again()
            self._file.sync()
        except OSError:
            self.in_doubt = True  # a second sync may say yes without having written anything
            raise

    def _write_again(self) -> None:
        """Write the same bytes over what an earlier process wrote: then the system has something to sync."""
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
        """Begin the next journal; what is to be told to `checkpoint`, beside the state of this very moment."""
        if self._file is not None:
            try:
                self._write_again()
                self._file.sync()  # what is appended from now on must not become durable before what stands here
            except OSError:
                self.in_doubt = True
        number = self.number + 1
        header = FileHeader(JOURNAL, number, self.sequence).pack()
        file = self.directory.create(f"journal-{number}", [header])
        self.close()  # the new one has its name: from here on it is the journal, whatever happens
        self._file, self.number, self._end = file, number, len(header)
        try:
            self.directory.sync()
        except OSError:
            self.in_doubt = True
            raise
        return FileHeader(CHECKPOINT, number, self.sequence)

    def checkpoint(self, header: FileHeader, state: Iterator[bytes], count: int) -> None:
        """Write the state, then forget the files that it replaces. May run beside `append`."""
        header = FileHeader(CHECKPOINT, header.number, header.sequence, count)
        self.directory.write(f"checkpoint-{header.number}", chain([header.pack()], frames(state, header.number)))
        self._base = header.sequence
        self.in_doubt = False
        self._inherited.clear()
        with suppress(OSError):  # the next time does it
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
    """How many entries of a checkpoint, and of the journals from sequence number `base` on, the last mark covers."""
    rows = np.frombuffer(entries, COLUMNS)
    marks = np.flatnonzero(rows["kind"] == SYNCED)
    safe = [int(rows["write_id"][i]) for i in marks[marks < in_checkpoint][-1:]]
    safe += [in_checkpoint + int(rows["write_id"][i]) - base for i in marks[marks >= in_checkpoint][-1:]]
    return max(safe, default=0)


def frames(state: Iterator[bytes], number: int) -> Iterator[bytes]:
    """Entries, given in pieces of any number, as frames of a bounded size."""
    sequence = 0
    for piece in state:
        for at in range(0, len(piece), _FRAME_BYTES):
            entries = piece[at : at + _FRAME_BYTES]
            yield pack_frame(entries, sequence, number)
            sequence += len(entries) // ENTRY_BYTES

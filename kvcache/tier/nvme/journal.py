"""What is in a store, as it came to be: numbered files of entries, appended in order.

`checkpoint-N` holds the state in which `journal-N` begins; the first journal begins with nothing. Compaction first
turns to a new journal and then writes the checkpoint with its number, so that at any instant the newest checkpoint and
the journals from its number on are the whole truth. What follows a damaged frame is not trusted.

`Store` sees to it that no two threads append, and that none turns while another syncs.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from kvcache.errors import StoreError
from kvcache.os_env import File
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.entry import COLUMNS, ENTRY_BYTES, SYNCED
from kvcache.tier.nvme.frame import CHECKPOINT, JOURNAL, FileHeader, Frames, HeaderError, pack_frame, read_frames

_FRAME_BYTES = 8192 * ENTRY_BYTES


@dataclass(slots=True)
class Found:
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
        if max(directory.numbered("journal"), default=0) < max(directory.numbered("checkpoint"), default=1):
            self._begin()
        self.found = found = self.read()
        self.sequence, self._base = found.sequence, found.base
        self.number = max(directory.numbered("journal") + directory.numbered("checkpoint"))
        self._end = found.journals.get(self.number, 0)
        self.in_doubt = bool(found.damaged)
        """A sync failed, or trust ended before the last entry: only a checkpoint makes what is known durable again."""
        self._inherited = dict(found.journals)
        """Of another process, whose last sync may have failed, so that a sync of ours alone would say nothing."""
        self._file: File | None = None
        if not found.damaged:  # else the file stays as it is until a checkpoint replaces it
            self._file = self._open(self.number)
            self._file.truncate(self._end)
            self._remove_before(found.checkpoint)

    @classmethod
    def look(cls, directory: Directory) -> Found:
        """What a directory's files say, at least one journal or checkpoint among them; changes nothing."""
        journal = cls.__new__(cls)
        journal.directory = directory
        return journal.read()

    @property
    def behind(self) -> int:
        """Entries since the last checkpoint."""
        return self.sequence - self._base

    def _begin(self) -> None:
        checkpoints = self.directory.numbered("checkpoint")
        if checkpoints:  # an operator moved a bad journal away: what the checkpoint says is still there
            number = checkpoints[-1]
            header = self._header(self.directory.read(f"checkpoint-{number}"), "checkpoint", number)
            self._create(number, header.sequence)
        elif self.directory.numbered("segment"):
            raise StoreError(
                f"nvme directory {self.directory.path}: segments, but no journal that says what is in them; put the "
                "journal back, run `kvcache nvme rebuild`, or delete the directory to begin with nothing"
            )
        else:
            self._create(1, 0)

    def read(self) -> Found:
        """What the files say now."""
        found = Found()
        numbers = self.directory.numbered("journal")
        checkpoints = self.directory.numbered("checkpoint")
        parts: list[memoryview] = []
        if checkpoints:
            found.checkpoint = checkpoints[-1]
            data = self.directory.read(f"checkpoint-{found.checkpoint}")
            header = self._header(data, "checkpoint", found.checkpoint)
            frames = read_frames(data, 0, found.checkpoint)
            parts += frames.entries
            found.sequence = found.base = header.sequence
            if frames.end != "whole" or frames.sequence != header.count:
                found.damaged = f"checkpoint-{found.checkpoint}"
        elif self._header(self.directory.read(f"journal-{numbers[0]}"), "journal", numbers[0]).sequence:
            raise StoreError(
                f"nvme directory {self.directory.path}: journal-{numbers[0]} needs checkpoint-{numbers[0]}, which is "
                "not there; put it back, run `kvcache nvme rebuild`, or delete the directory to begin with nothing"
            )
        for number in numbers:
            if number >= found.checkpoint:
                self._follow(number, found, parts)
        found.entries = b"".join(parts)
        in_checkpoint = len(found.entries) // ENTRY_BYTES - (found.sequence - found.base)
        found.safe = _safe(found.entries, in_checkpoint, found.base)
        return found

    def _follow(self, number: int, found: Found, parts: list[memoryview]) -> None:
        """Read one more journal, unless trust has ended before it."""
        data = self.directory.read(f"journal-{number}")
        header = self._header(data, "journal", number)
        if found.damaged.startswith("journal"):
            return
        if header.sequence != found.sequence:
            found.damaged = f"journal-{max(found.journals, default=number)}"
            return
        frames: Frames = read_frames(data, header.sequence, number)
        parts += frames.entries
        found.journals[number], found.sequence = frames.end_bytes, frames.sequence
        found.torn = len(data) - frames.end_bytes
        if frames.end == "damaged":
            found.damaged = f"journal-{number}"

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

    def turn(self) -> FileHeader:
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
            for old in self.directory.numbered(noun):
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

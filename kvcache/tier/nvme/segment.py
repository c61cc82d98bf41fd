"""A segment: one preallocated file of slots of one size, and a row in memory for each slot.

A row holds the put entry of the slot's record. The file is opened on first use. A retired segment closes its file after
its last user has finished, so that no read meets the reused descriptor of another file.

This module also has the aligned buffers for direct I/O, the segment footer, and the coalescing of neighbouring slots.

Thread safety: rows and counts have none; `Catalog` changes them under its `memory` lock. `open`, `read` and `write`
may be called from any thread.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from kvcache.block.record import ALIGNMENT, Address
from kvcache.os_env import Disk, File
from kvcache.tier.nvme.journal import COLUMNS, ENTRY_BYTES, FREE, PUT, QUARANTINE, SEGMENT, Entry
from kvcache.tier.tier import Segments

# Aligned buffers. A direct file needs buffers on page boundaries; other buffers are copied through an aligned one.

_thread_local = threading.local()


def aligned(pieces: Sequence[memoryview]) -> bool:
    return all(not len(piece) % ALIGNMENT and not _address(piece) % ALIGNMENT for piece in pieces)


def _address(piece: memoryview) -> int:
    if not len(piece) or piece.readonly:
        return int(np.frombuffer(piece, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))  # six times as fast as numpy


def thread_buffer(size_bytes: int) -> memoryview:
    """Return this thread's aligned buffer, valid until the thread's next call."""
    memory: mmap.mmap | None = getattr(_thread_local, "memory", None)
    if memory is None or len(memory) < size_bytes:
        memory = _thread_local.memory = mmap.mmap(-1, size_bytes)
    return memoryview(memory)[:size_bytes]


def gather(pieces: Sequence[memoryview], into: memoryview) -> None:
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)


def scatter(source: memoryview, pieces: Sequence[memoryview]) -> None:
    at = 0
    for piece in pieces:
        piece[:] = source[at : at + len(piece)]
        at += len(piece)


# The segment footer: the last page of a segment's file. It describes the slots, so that records can be found without a
# journal. `docs/spec/journal.md` specifies the bytes.

MAGIC = b"KVCSGMT\n"
VERSION = 1
FOOTER_BYTES = 4096

_FOOTER = Struct("<8sIIQQ")
_SUM = Struct("<Q")


class SegmentFooter(NamedTuple):
    slots: int
    number: int
    slot_bytes: int

    def pack(self) -> bytes:
        fixed = _FOOTER.pack(MAGIC, VERSION, self.slots, self.number, self.slot_bytes)
        return (fixed + _SUM.pack(xxh3_64_intdigest(fixed))).ljust(FOOTER_BYTES, b"\0")

    @classmethod
    def unpack(cls, page: bytes | bytearray | memoryview) -> SegmentFooter | None:
        """Decode a page; None where it is not a sound footer of this version."""
        if len(page) < FOOTER_BYTES:
            return None
        magic, version, slots, number, slot_bytes = _FOOTER.unpack_from(page)
        sound = _SUM.unpack_from(page, _FOOTER.size)[0] == xxh3_64_intdigest(bytes(page[: _FOOTER.size]))
        return cls(slots, number, slot_bytes) if sound and (magic, version) == (MAGIC, VERSION) else None


class Segment:
    def __init__(self, number: int, slot_bytes: int, slots: int) -> None:
        self.number, self.slot_bytes, self.slots = number, slot_bytes, slots
        self.rows = bytearray(slots * ENTRY_BYTES)
        self.free = list(range(slots))  # ascending, except that released slots are at the end
        self.live = 0
        self.quarantined = 0
        self.users = 0
        self.retired = False
        self.unsynced_slots: set[int] = set()  # slots with records written since the last sync
        self.rewrite_slots: set[int] = (
            set()
        )  # slots to be rewritten before the next sync, since an earlier sync failed or may have
        self.never_synced_slots = False  # no sync has covered any slot, and none was tried
        self.failures = 0  # number of failed syncs
        self._file: File | None = None
        self._opening = threading.Lock()

    @property
    def slots_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return self.slots_bytes + FOOTER_BYTES

    @property
    def empty(self) -> bool:
        """Whether no slot holds a record or is allocated for one; quarantined slots do not count."""
        return len(self.free) + self.quarantined == self.slots

    @property
    def entry(self) -> Entry:
        """The entry that created the segment: `slot` is the number of slots, `record_bytes` their size."""
        return Entry(SEGMENT, segment=self.number, slot=self.slots, record_bytes=self.slot_bytes)

    def columns(self) -> NDArray[np.void]:
        """The rows as a numpy view; the memory belongs to the segment."""
        return np.frombuffer(self.rows, COLUMNS)

    def row(self, slot: int) -> Entry:
        return Entry.unpack(self.rows, slot)

    def fill(self, slot: int, entry: bytes) -> None:
        """Enter the put entry of the record in an allocated slot."""
        self.rows[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = entry
        self.live += 1

    def clear(self, slot: int, *, quarantine: bool = False) -> None:
        """Remove the record from a slot. A quarantined slot is not reused while the segment exists."""
        row = Entry(QUARANTINE, segment=self.number, slot=slot).pack() if quarantine else bytes(ENTRY_BYTES)
        self.rows[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = row
        self.live -= 1
        self.unsynced_slots.discard(slot)
        self.rewrite_slots.discard(slot)
        if quarantine:
            self.quarantined += 1
        else:
            insort(self.free, slot)

    def load(self, rows: NDArray[np.void], synced: NDArray[np.bool_], *, rewrite_slots: bool) -> None:
        """Fill the rows after a restart.

        Args:
            rows: the put and quarantine entries of this segment, at most one a slot.
            synced: for each row whether a sync has covered it.
            rewrite_slots: the other records must be rewritten before they are synced.
        """
        self.columns()[rows["slot"]] = rows
        kinds = self.columns()["kind"]
        self.free = np.flatnonzero(kinds == FREE).tolist()
        self.live = int(np.count_nonzero(kinds == PUT))
        self.quarantined = int(np.count_nonzero(kinds == QUARANTINE))
        unsynced_slots = rows["slot"][~synced & (rows["kind"] == PUT)]
        if rewrite_slots:
            self.rewrite_slots = set(unsynced_slots.tolist())
        else:
            self.never_synced_slots = bool(len(unsynced_slots))

    def is_durable(self, slot: int) -> bool:
        """Return whether a sound drive must still have the data of this slot.

        False where a failed sync, or a power cut before this start, may have lost it.
        """
        return not self.never_synced_slots and slot not in self.rewrite_slots

    def state(self) -> tuple[bytes, bytes]:
        """Return the entries of the slots in use for a checkpoint: those that a sync has covered, and the others."""
        columns = self.columns()
        held = columns["kind"] != FREE
        later = np.zeros_like(held)
        later[[*self.unsynced_slots, *self.rewrite_slots]] = True
        if self.never_synced_slots:
            later = held
        return bytes(columns[held & ~later].data), bytes(columns[held & later].data)

    # The file.

    def create(self, disk: Disk, path: str) -> None:
        """Create the file, preallocate all slots, and write the footer.

        Raises:
            OSError: the disk has no space or failed; the file may exist all the same.
        """
        self._file = disk.open(path, create=True, direct=True)
        self._file.allocate(self.file_bytes)
        page = thread_buffer(FOOTER_BYTES)
        page[:] = SegmentFooter(self.slots, self.number, self.slot_bytes).pack()
        self._file.write(self.slots_bytes, [page])

    def open(self, disk: Disk, path: str) -> File:
        """Return the open file, for a caller counted in `users`."""
        file = self._file
        if file is None:
            opened = disk.open(path, direct=True)
            with self._opening:
                file = self._file = self._file or opened
            if file is not opened:  # another thread opened it first
                opened.close()
        return file

    def close(self) -> None:
        with self._opening:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def read(self, file: File, slot: int, pieces: Sequence[memoryview]) -> int:
        """Read consecutive slots into the pieces.

        Returns:
            The number of bytes read; fewer than the pieces hold where the file is short.
        """
        if not file.direct or aligned(pieces):
            return file.read(slot * self.slot_bytes, pieces)
        bounce_buffer = thread_buffer(sum(map(len, pieces)))
        got = file.read(slot * self.slot_bytes, [bounce_buffer])
        scatter(bounce_buffer, pieces)
        return got

    def write(self, file: File, slot: int, pieces: Sequence[memoryview]) -> None:
        """Write the pieces to consecutive slots."""
        if file.direct and not aligned(pieces):
            bounce_buffer = thread_buffer(sum(map(len, pieces)))
            gather(pieces, bounce_buffer)
            pieces = [bounce_buffer]
        file.write(slot * self.slot_bytes, pieces)


# Coalesced I/O: one call reads or writes records in neighbouring slots.

MAX_IO_BYTES = 9 << 20
"""The largest size of one call: four records of 2 MiB with their headers, or more records of a smaller size."""


@dataclass(slots=True, eq=False)
class SlotIO:
    """A block of a batch, its slot, and its journal entry as it is or will be."""

    i: int  # the block's number in its ticket
    address: Address
    pieces: Sequence[memoryview]
    segment: Segment
    slot: int
    record_bytes: int
    entry: Entry
    failures: int = 0  # the segment's count when the slot was allocated
    name: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.address.name


def coalesce(slot_ios: Iterable[SlotIO]) -> Iterator[list[SlotIO]]:
    """Group the blocks into runs without a gap on the drive, of at most `MAX_IO_BYTES`."""
    run: list[SlotIO] = []
    size = 0
    for slot_io in sorted(slot_ios, key=lambda p: (p.segment.number, p.slot)):
        if run:
            last = run[-1]
            adjacent = last.segment is slot_io.segment and last.slot + 1 == slot_io.slot
            full = last.record_bytes == last.segment.slot_bytes
            if not (adjacent and full and size + slot_io.record_bytes <= MAX_IO_BYTES):
                yield run
                run, size = [], 0
        run.append(slot_io)
        size += slot_io.record_bytes
    if run:
        yield run


def flatten(segments: Segments, size_bytes: int) -> list[memoryview]:
    """Return the first `size_bytes` of a block's segments as views of plain bytes, without copying."""
    pieces: list[memoryview] = []
    for segment in segments:
        piece = segment if segment.format == "B" and segment.ndim == 1 else segment.cast("B")
        pieces.append(piece if len(piece) <= size_bytes else piece[:size_bytes])
        size_bytes -= len(pieces[-1])
        if size_bytes <= 0:
            break
    return pieces

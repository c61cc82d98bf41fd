"""A segment: one preallocated file of slots of one size, and what the journal knows of each.

A row a slot holds the put entry of the record that is there. The file is opened when it is first used; that of a
retired segment is closed once its last user has left, so that no read meets another file's descriptor.

Rows and counts are not thread-safe: `Ledger` touches them under its lock. `open`, `read` and `write` are."""

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

# Buffers as a direct file wants them: on page boundaries. Those that are not take a detour through one that is.

_thread_local = threading.local()


def aligned(pieces: Sequence[memoryview]) -> bool:
    return all(not len(piece) % ALIGNMENT and not _address(piece) % ALIGNMENT for piece in pieces)


def _address(piece: memoryview) -> int:
    if not len(piece) or piece.readonly:
        return int(np.frombuffer(piece, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))  # six times as quick


def thread_buffer(size_bytes: int) -> memoryview:
    """This thread's own aligned buffer, good until its next call."""
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


# The last page of a segment's file: what its slots are, for when no journal is left that says so. Byte by byte in
# `docs/spec/journal.md`.

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
        """What a page says; None where it is no sound label of this version."""
        if len(page) < FOOTER_BYTES:
            return None
        magic, version, slots, number, slot_bytes = _FOOTER.unpack_from(page)
        sound = _SUM.unpack_from(page, _FOOTER.size)[0] == xxh3_64_intdigest(bytes(page[: _FOOTER.size]))
        return cls(slots, number, slot_bytes) if sound and (magic, version) == (MAGIC, VERSION) else None


class Segment:
    def __init__(self, number: int, slot_bytes: int, slots: int) -> None:
        self.number, self.slot_bytes, self.slots = number, slot_bytes, slots
        self.rows = bytearray(slots * ENTRY_BYTES)
        self.free = list(range(slots))  # ascending, but for slots that were given back: those come last
        self.live = 0
        self.quarantined = 0
        self.users = 0
        self.retired = False
        self.unsynced_slots: set[int] = set()  # slots with records written since the last sync
        self.rewrite_slots: set[int] = (
            set()
        )  # those to be written again before one, since an earlier one failed or may have
        self.never_synced_slots = False  # no sync has covered any, nor was one tried
        self.failures = 0  # syncs that failed
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
        """Nothing is there or on its way there; a quarantined slot is nothing."""
        return len(self.free) + self.quarantined == self.slots

    @property
    def entry(self) -> Entry:
        """The entry that made the segment: `slot` counts its slots, `record_bytes` is their size."""
        return Entry(SEGMENT, segment=self.number, slot=self.slots, record_bytes=self.slot_bytes)

    def columns(self) -> NDArray[np.void]:
        """The rows for numpy, shared with this segment."""
        return np.frombuffer(self.rows, COLUMNS)

    def row(self, slot: int) -> Entry:
        return Entry.unpack(self.rows, slot)

    def fill(self, slot: int, entry: bytes) -> None:
        """The record of this put entry stands in a slot that was taken."""
        self.rows[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = entry
        self.live += 1

    def clear(self, slot: int, *, quarantine: bool = False) -> None:
        """The record leaves. A quarantined slot is not given out again while the segment is there."""
        left = Entry(QUARANTINE, segment=self.number, slot=slot).pack() if quarantine else bytes(ENTRY_BYTES)
        self.rows[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = left
        self.live -= 1
        self.unsynced_slots.discard(slot)
        self.rewrite_slots.discard(slot)
        if quarantine:
            self.quarantined += 1
        else:
            insort(self.free, slot)

    def load(self, rows: NDArray[np.void], synced: NDArray[np.bool_], *, rewrite_slots: bool) -> None:
        """After a restart: the put and quarantine entries of this segment, at most one a slot, and which of them a sync
        has covered. `again`: the others are to be written again before they are synced."""
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
        """Whether a drive that is well has what was written to a slot."""
        return not self.never_synced_slots and slot not in self.rewrite_slots

    def state(self) -> tuple[bytes, bytes]:
        """The entries of the slots that are not free, as a checkpoint holds them: those that a sync has covered, and
        the others."""
        columns = self.columns()
        held = columns["kind"] != FREE
        later = np.zeros_like(held)
        later[[*self.unsynced_slots, *self.rewrite_slots]] = True
        if self.never_synced_slots:
            later = held
        return bytes(columns[held & ~later].data), bytes(columns[held & later].data)

    # the file

    def create(self, disk: Disk, path: str) -> None:
        """Make the file, with room for all slots, and label it. OSError where there is none; the file may be there all
        the same."""
        self._file = disk.open(path, create=True, direct=True)
        self._file.allocate(self.file_bytes)
        page = thread_buffer(FOOTER_BYTES)
        page[:] = SegmentFooter(self.slots, self.number, self.slot_bytes).pack()
        self._file.write(self.slots_bytes, [page])

    def open(self, disk: Disk, path: str) -> File:
        """The file, for a user counted in `users`."""
        file = self._file
        if file is None:
            opened = disk.open(path, direct=True)
            with self._opening:
                file = self._file = self._file or opened
            if file is not opened:  # another user was quicker
                opened.close()
        return file

    def close(self) -> None:
        with self._opening:
            file, self._file = self._file, None
        if file is not None:
            file.close()

    def read(self, file: File, slot: int, pieces: Sequence[memoryview]) -> int:
        """Fill the pieces from a slot and those behind it; the bytes that were there, fewer where the file is short."""
        if not file.direct or aligned(pieces):
            return file.read(slot * self.slot_bytes, pieces)
        bounce_buffer = thread_buffer(sum(map(len, pieces)))
        got = file.read(slot * self.slot_bytes, [bounce_buffer])
        scatter(bounce_buffer, pieces)
        return got

    def write(self, file: File, slot: int, pieces: Sequence[memoryview]) -> None:
        """Write the pieces to a slot and those behind it."""
        if file.direct and not aligned(pieces):
            bounce_buffer = thread_buffer(sum(map(len, pieces)))
            gather(pieces, bounce_buffer)
            pieces = [bounce_buffer]
        file.write(slot * self.slot_bytes, pieces)


# Records in neighbouring slots: one call reads or writes them all.

MAX_IO_BYTES = 9 << 20
"""What one call moves: four records of 2 MiB with their headers, or more of less."""


@dataclass(slots=True, eq=False)
class SlotIO:
    """Where a block of a batch stands, or is going to: `entry` is what the journal says of it, or will."""

    i: int  # the block's number in its ticket
    address: Address
    pieces: Sequence[memoryview]
    segment: Segment
    slot: int
    record_bytes: int
    entry: Entry
    failures: int = 0  # the segment's, when the slot was taken
    name: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.address.name


def coalesce(places: Iterable[SlotIO]) -> Iterator[list[SlotIO]]:
    """Groups that follow each other on the drive without a gap."""
    stretch: list[SlotIO] = []
    size = 0
    for place in sorted(places, key=lambda p: (p.segment.number, p.slot)):
        if stretch:
            last = stretch[-1]
            adjacent = last.segment is place.segment and last.slot + 1 == place.slot
            full = last.record_bytes == last.segment.slot_bytes
            if not (adjacent and full and size + place.record_bytes <= MAX_IO_BYTES):
                yield stretch
                stretch, size = [], 0
        stretch.append(place)
        size += place.record_bytes
    if stretch:
        yield stretch


def flatten(segments: Segments, size_bytes: int) -> list[memoryview]:
    """The first `size_bytes` of a block's segments, as plain bytes."""
    pieces: list[memoryview] = []
    for segment in segments:
        piece = segment if segment.format == "B" and segment.ndim == 1 else segment.cast("B")
        pieces.append(piece if len(piece) <= size_bytes else piece[:size_bytes])
        size_bytes -= len(pieces[-1])
        if size_bytes <= 0:
            break
    return pieces

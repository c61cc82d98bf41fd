"""A segment: one preallocated file of slots of one size, and what the journal knows of each.

A row a slot holds the put entry of the record that is there. The file is opened when it is first used; that of a
retired segment is closed once its last user has left, so that no read meets another file's descriptor.

Rows and counts are not thread-safe: `Ledger` touches them under its lock. `open`, `read` and `write` are.
"""

from __future__ import annotations

import threading
from bisect import insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kvcache.os_env import Disk, File
from kvcache.tier.nvme import bounce
from kvcache.tier.nvme.entry import COLUMNS, ENTRY_BYTES, FREE, PUT, QUARANTINE, SEGMENT, Entry
from kvcache.tier.nvme.label import LABEL_BYTES, Label


class Segment:
    def __init__(self, number: int, slot_bytes: int, slots: int) -> None:
        self.number, self.slot_bytes, self.slots = number, slot_bytes, slots
        self.rows = bytearray(slots * ENTRY_BYTES)
        self.free = list(range(slots))  # ascending, but for slots that were given back: those come last
        self.live = 0
        self.quarantined = 0
        self.users = 0
        self.retired = False
        self.unsynced: set[int] = set()  # slots with records written since the last sync
        self.again: set[int] = set()  # those to be written again before one, since an earlier one failed or may have
        self.never_synced = False  # no sync has covered any, nor was one tried
        self.failures = 0  # syncs that failed
        self._file: File | None = None
        self._opening = threading.Lock()

    @property
    def slots_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def file_bytes(self) -> int:
        return self.slots_bytes + LABEL_BYTES

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
        self.unsynced.discard(slot)
        self.again.discard(slot)
        if quarantine:
            self.quarantined += 1
        else:
            insort(self.free, slot)

    def load(self, rows: NDArray[np.void], synced: NDArray[np.bool_], *, again: bool) -> None:
        """After a restart: the put and quarantine entries of this segment, at most one a slot, and which of them a sync
        has covered. `again`: the others are to be written again before they are synced."""
        self.columns()[rows["slot"]] = rows
        kinds = self.columns()["kind"]
        self.free = np.flatnonzero(kinds == FREE).tolist()
        self.live = int(np.count_nonzero(kinds == PUT))
        self.quarantined = int(np.count_nonzero(kinds == QUARANTINE))
        unsynced = rows["slot"][~synced & (rows["kind"] == PUT)]
        if again:
            self.again = set(unsynced.tolist())
        else:
            self.never_synced = bool(len(unsynced))

    def promised(self, slot: int) -> bool:
        """Whether a drive that is well has what was written to a slot."""
        return not self.never_synced and slot not in self.again

    def state(self) -> tuple[bytes, bytes]:
        """The entries of the slots that are not free, as a checkpoint holds them: those that a sync has covered, and
        the others."""
        columns = self.columns()
        held = columns["kind"] != FREE
        later = np.zeros_like(held)
        later[[*self.unsynced, *self.again]] = True
        if self.never_synced:
            later = held
        return bytes(columns[held & ~later].data), bytes(columns[held & later].data)

    # the file

    def create(self, disk: Disk, path: str) -> None:
        """Make the file, with room for all slots, and label it. OSError where there is none; the file may be there all
        the same."""
        self._file = disk.open(path, create=True, direct=True)
        self._file.allocate(self.file_bytes)
        page = bounce.buffer(LABEL_BYTES)
        page[:] = Label(self.slots, self.number, self.slot_bytes).pack()
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
        if not file.direct or bounce.aligned(pieces):
            return file.read(slot * self.slot_bytes, pieces)
        detour = bounce.buffer(sum(map(len, pieces)))
        got = file.read(slot * self.slot_bytes, [detour])
        bounce.scatter(detour, pieces)
        return got

    def write(self, file: File, slot: int, pieces: Sequence[memoryview]) -> None:
        """Write the pieces to a slot and those behind it."""
        if file.direct and not bounce.aligned(pieces):
            detour = bounce.buffer(sum(map(len, pieces)))
            bounce.gather(pieces, detour)
            pieces = [detour]
        file.write(slot * self.slot_bytes, pieces)

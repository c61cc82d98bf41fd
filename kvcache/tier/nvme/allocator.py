"""The room of a store: its segments, who may have a slot, and what the whole may take of the disk.

Counted are segment files and the journal at its largest, so that what `du` says never exceeds the capacity. A record
goes into slots of its own size or at most an eighth larger; where none is free a new segment is made. Nothing here
takes longer because a store holds more records.

Not thread-safe: `Ledger` calls it under its lock."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from kvcache.os_env import Clock, Disk, File
from kvcache.tier.breaker import Counters
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.journal import FREE, PUT
from kvcache.tier.nvme.segment import FOOTER_BYTES, Segment

OVERHEAD_BYTES = 128 << 10
"""LOCK, FORMAT and the directory itself."""

JOURNAL_BYTES_PER_ENTRY = 256
"""What an entry may need in the journals of a store with few slots: a frame of its own, before and behind a turn."""

JOURNAL_BYTES_PER_SLOT = 768
"""What the journals may need for a slot: two checkpoints that name it, and what is between them."""

MIN_JOURNAL_ENTRIES, MAX_IDLE_JOURNAL_ENTRIES = 1 << 10, 1 << 16
"""A journal of fewer entries is not compacted: few in a small store, many in a large one."""

SLOTS_PER_JOURNAL_ENTRY = 8
"""The journal is compacted when it has an entry for each so many slots: what a restart reads one by one."""

MAX_SEGMENTS = 512
"""Segments grow with the capacity beyond this many, since each is an open file."""

SEGMENTS_PER_SPARE = 8
"""Of so many segments of one size one may be empty and stay; the first always may."""


class SizeClass:
    """The segments of one slot size."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.segments: dict[int, Segment] = {}
        self.free = 0
        self._current: Segment | None = None

    def allocate(self, count: int) -> tuple[Segment, list[int]] | None:
        """Free slots of one segment, at most `count`, the lowest first. Segments are filled one after the other, the
        fullest first, so that the others can become empty."""
        segment = self._current
        if segment is None or not segment.free or segment.retired:
            segment = min((s for s in self.segments.values() if s.free), key=lambda s: len(s.free), default=None)
            if segment is None:
                return None
        self._current = segment
        slots = segment.free[:count]
        del segment.free[:count]
        self.free -= len(slots)
        return segment, slots


class Allocator:
    def __init__(self, capacity_bytes: int, segment_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.segment_bytes = max(segment_bytes, capacity_bytes // MAX_SEGMENTS)
        self._few = min(max(MIN_JOURNAL_ENTRIES, capacity_bytes >> 16), MAX_IDLE_JOURNAL_ENTRIES)
        self.segments: dict[int, Segment] = {}
        self.size_classes: dict[int, SizeClass] = {}
        self.files_bytes = 0  # segments that are there, retired ones too until their file is removed
        self.slots = 0
        self.next_number = 1

    def unclaimed_bytes(self) -> int:
        """Bytes of the capacity that no segment and no journal has claimed."""
        fixed_bytes = OVERHEAD_BYTES + self._few * JOURNAL_BYTES_PER_ENTRY
        return self.capacity_bytes - fixed_bytes - self.files_bytes - self.slots * JOURNAL_BYTES_PER_SLOT

    def compact_at_entries(self) -> int:
        """How long the journal may grow before it is compacted."""
        return max(self._few, self.slots // SLOTS_PER_JOURNAL_ENTRY)

    def max_entries(self) -> int:
        """How long the journal may grow where compaction fails."""
        return 2 * max(self._few, self.slots)

    # slots

    def _fitting(self, record_bytes: int) -> list[SizeClass]:
        """Those with a free slot for a record, the smallest slots first."""
        found = [s for s in self.size_classes.values() if s.free and fits_slot(record_bytes, s.slot_bytes)]
        return sorted(found, key=lambda size_class: size_class.slot_bytes) if len(found) > 1 else found

    def allocate(self, record_bytes: int, count: int) -> tuple[Segment, list[int]] | None:
        """Slots of one segment for records of one size, at most `count`; the caller's until filled or given back."""
        for size_class in self._fitting(record_bytes):
            taken = size_class.allocate(count)
            if taken is not None:
                return taken
        return None

    def release(self, segment: Segment, slot: int) -> None:
        """A taken slot that was not filled. Behind all others: whatever went wrong there need not go wrong next."""
        segment.free.append(slot)
        if not segment.retired:
            self.size_classes[segment.slot_bytes].free += 1

    def clear(self, segment: Segment, slot: int, *, quarantine: bool = False) -> None:
        """The record in a slot leaves."""
        segment.clear(slot, quarantine=quarantine)
        if not quarantine and not segment.retired:
            self.size_classes[segment.slot_bytes].free += 1

    # segments

    def plan(self, record_bytes: int, disk_bytes: int) -> Segment | None:
        """A segment to make for records of this size, or None where capacity or disk have no room for one slot."""
        left, disk_bytes = self.unclaimed_bytes() - FOOTER_BYTES, disk_bytes - FOOTER_BYTES
        slots = min(
            self._most(record_bytes), left // (record_bytes + JOURNAL_BYTES_PER_SLOT), disk_bytes // record_bytes
        )
        if slots < 1:
            return None
        segment = Segment(self.next_number, record_bytes, slots)
        self.next_number += 1
        return segment

    def claim(self, segment: Segment) -> None:
        """Its file is about to be there, or is there. Its bytes count until `forget`."""
        self.files_bytes += segment.file_bytes
        self.slots += segment.slots

    def add(self, segment: Segment) -> None:
        """Give out its slots."""
        self.segments[segment.number] = segment
        size_class = self.size_classes.setdefault(segment.slot_bytes, SizeClass(segment.slot_bytes))
        size_class.segments[segment.number] = segment
        size_class.free += len(segment.free)
        self.next_number = max(self.next_number, segment.number + 1)

    def retire(self, segment: Segment) -> None:
        """Give out no more of it, where it was given out at all."""
        segment.retired = True
        if self.segments.pop(segment.number, None) is None:
            return
        size_class = self.size_classes[segment.slot_bytes]
        del size_class.segments[segment.number]
        size_class.free -= len(segment.free)
        if not size_class.segments:
            del self.size_classes[segment.slot_bytes]

    def forget(self, segment: Segment) -> None:
        """The file of a retired segment is gone: its bytes are free."""
        self.files_bytes -= segment.file_bytes
        self.slots -= segment.slots

    def surplus(self, slot_bytes: int) -> list[Segment]:
        """Empty segments of a size beyond those that are kept for what comes next."""
        size_class = self.size_classes.get(slot_bytes)
        if size_class is None:
            return []
        useless = [s for s in size_class.segments.values() if s.quarantined == s.slots]
        empty_segments = [s for s in size_class.segments.values() if s.empty and s.free]
        most = max(1, (len(size_class.segments) - len(useless)) // SEGMENTS_PER_SPARE)
        return useless + empty_segments[: max(0, len(empty_segments) - most)]

    def empty_segments(self, record_bytes: int) -> list[Segment]:
        """Empty segments that are of no use for records of this size."""
        others = (
            size_class
            for size_class in self.size_classes.values()
            if not fits_slot(record_bytes, size_class.slot_bytes)
        )
        return [segment for size_class in others for segment in size_class.segments.values() if segment.empty]

    def room(self, record_bytes: int, disk_bytes: int) -> int:
        """How many more records of this size fit, where the disk has so many bytes left to take."""
        free = sum(size_class.free for size_class in self._fitting(record_bytes))
        empty_segments = self.empty_segments(record_bytes)
        files_bytes = sum(s.file_bytes for s in empty_segments)
        left = self.unclaimed_bytes() + files_bytes + sum(s.slots for s in empty_segments) * JOURNAL_BYTES_PER_SLOT
        most = self._most(record_bytes)
        new = min(
            _slots_that_fit(left, record_bytes + JOURNAL_BYTES_PER_SLOT, most),
            _slots_that_fit(disk_bytes + files_bytes, record_bytes, most),
        )
        return free + new

    def _most(self, record_bytes: int) -> int:
        """Slots of a segment for records of this size."""
        return max(1, self.segment_bytes // record_bytes)

    def used_bytes(self) -> int:
        return sum(s.live * s.slot_bytes for s in self.segments.values())

    def check(self, live: Iterable[int]) -> list[str]:
        """Faults in the slots, given the places that the index knows (segment << 32 | slot)."""
        places: dict[int, set[int]] = {}
        for place in live:
            places.setdefault(place >> 32, set()).add(place & 0xFFFFFFFF)
        faults = []
        for s in self.segments.values():
            kinds = s.columns()["kind"].tolist()
            named = places.get(s.number, set())
            filled = {i for i, kind in enumerate(kinds) if kind == PUT}
            held = {i for i, kind in enumerate(kinds) if kind != FREE}
            if filled != named:
                faults.append(
                    f"nvme: segment {s.number}: the index and the slots differ on {sorted(filled ^ named)[:8]}"
                )
            if len(set(s.free)) != len(s.free) or held & set(s.free):
                faults.append(f"nvme: segment {s.number}: a slot is free twice, or free and in use")
            if (s.live, s.quarantined) != (len(filled), len(held) - len(filled)):
                faults.append(f"nvme: segment {s.number}: counts {s.live} records, {len(filled)} are there")
        unknown = places.keys() - self.segments.keys()
        faults += [f"nvme: records in segment {number}, which is not there" for number in sorted(unknown)]
        for size_class in self.size_classes.values():
            free = sum(len(s.free) for s in size_class.segments.values())
            if free != size_class.free:
                faults.append(
                    f"nvme: {size_class.free} slots of {size_class.slot_bytes} bytes are said to be free, {free} are"
                )
        if self.unclaimed_bytes() < 0:
            faults.append(
                f"nvme: {-self.unclaimed_bytes()} bytes more are claimed than the capacity of {self.capacity_bytes}"
            )
        return faults


def _slots_that_fit(left: int, each: int, most: int) -> int:
    """How many slots fit in so many bytes, in segments of at most `most` slots with a label each."""
    segments, rest = divmod(max(0, left), most * each + FOOTER_BYTES)
    return segments * most + max(0, rest - FOOTER_BYTES) // each


def fits_slot(record_bytes: int, slot_bytes: int) -> bool:
    return record_bytes <= slot_bytes <= record_bytes + record_bytes // 8


# The segment files of a store: made, opened while somebody uses them, removed, and what the disk has left for more.

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
DISK_FULL_PAUSE_S = 1.0
"""Before the next segment is tried on a disk that said it is full."""

FREE_BYTES_MAX_AGE_S = 1.0
"""How old an answer about free room may be where it only decides whether to ask for more."""


class SegmentFiles:
    """`memory` is the lock of index and space; nothing here holds it during I/O."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        directory: Directory,
        allocator: Allocator,
        memory: threading.Lock,
        floor_bytes: int,
        counters: Counters,
    ) -> None:
        self._disk, self._clock, self._directory, self._allocator = disk, clock, directory, allocator
        self._memory, self._floor_bytes, self._counters = memory, floor_bytes, counters
        self.orphan_files: dict[int, Segment] = {}  # retired, with files that could not be removed yet
        self._disk_full_until = 0.0
        self._left: tuple[float, int] | None = None  # until when it holds, and the answer

    def path(self, number: int) -> str:
        return self._directory.join(f"segment-{number:06d}")

    def existing_numbers(self) -> set[int]:
        return set(self._directory.file_numbers("segment"))

    @contextmanager
    def open_file(self, segment: Segment, users: int = 1) -> Iterator[File]:
        """The segment's file, open while this lasts, for callers who are counted among its users and leave then."""
        try:
            yield segment.open(self._disk, self.path(segment.number))
        finally:
            self.close_file(segment, users)

    def close_file(self, segment: Segment, users: int = 1) -> None:
        with self._memory:
            segment.users -= users
            over = segment.retired and not segment.users
        if over:
            segment.close()

    def create(self, segment: Segment) -> bool:
        """Make the file of a segment that is claimed; False where the disk is full. The file may be there all the
        same, and after an OSError too."""
        self._left = None
        try:
            segment.create(self._disk, self.path(segment.number))
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            self.mark_full()
            return False
        return True

    def mark_full(self) -> None:
        """The disk said so."""
        self._counters.add("disk_full")
        self._disk_full_until = self._clock.now() + DISK_FULL_PAUSE_S

    def clear(self, segment: Segment) -> None:
        """Remove the file of a retired segment. Who still uses it has it open, and goes on until he leaves."""
        self._left = None
        try:
            self._disk.remove(self.path(segment.number))
        except FileNotFoundError:
            pass
        except OSError:
            self._counters.add("write_errors")
            self.orphan_files[segment.number] = segment  # its bytes stay counted until it can be removed
            return
        self.orphan_files.pop(segment.number, None)
        with self._memory:
            self._allocator.forget(segment)
            unused = not segment.users
        if unused:
            segment.close()

    def free_bytes(self, *, fresh: bool = True) -> int:
        """What the disk has left for segments; negative for a while after it said that it is full."""
        now = self._clock.now()
        if now < self._disk_full_until:
            return -(1 << 62)
        left = self._left
        if fresh or left is None or left[0] < now:
            found = max(0, self._disk.free_bytes(self._directory.path) - self._floor_bytes)
            self._left = left = now + FREE_BYTES_MAX_AGE_S, found
        return left[1]

"""The space of a store: its segments, their free slots, and the disk space that all files may take.

The capacity covers the segment files and the journal at its largest, so `du` never reports more than the capacity. A
record takes a slot of its own size or at most an eighth larger; where none is free, a new segment is created. No
operation takes longer because a store holds more records.

`SegmentFiles`, at the end, creates, opens and removes the segment files.

Thread safety: `Allocator` has none; `Catalog` calls it under its `memory` lock.
"""

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
"""Journal bytes reserved for an entry in a store with few slots: each in its own frame, before and after a rotation."""

JOURNAL_BYTES_PER_SLOT = 768
"""Journal bytes reserved for a slot: two checkpoints that name it, and the entries between them."""

MIN_JOURNAL_ENTRIES, MAX_IDLE_JOURNAL_ENTRIES = 1 << 10, 1 << 16
"""A journal with fewer entries is not compacted; the limit grows with the capacity, from the first to the second."""

SLOTS_PER_JOURNAL_ENTRY = 8
"""The journal is compacted when it has one entry for this many slots; a restart reads those entries one by one."""

MAX_SEGMENTS = 512
"""Segments grow with the capacity to keep their number at this or less, since each is an open file."""

SEGMENTS_PER_SPARE = 8
"""One in this many segments of a size may stay as an empty spare; one spare is always allowed."""


class SizeClass:
    """All segments of one slot size."""

    def __init__(self, slot_bytes: int) -> None:
        self.slot_bytes = slot_bytes
        self.segments: dict[int, Segment] = {}
        self.free = 0
        self._current: Segment | None = None

    def allocate(self, count: int) -> tuple[Segment, list[int]] | None:
        """Allocate at most `count` free slots of one segment, the lowest first.

        Segments are filled one after the other, the fullest first, so that the others can become empty.
        """
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
        self.files_bytes = 0  # of existing segment files, retired ones included until their file is removed
        self.slots = 0
        self.next_number = 1

    def unclaimed_bytes(self) -> int:
        """Bytes of the capacity that no segment and no journal has claimed."""
        fixed_bytes = OVERHEAD_BYTES + self._few * JOURNAL_BYTES_PER_ENTRY
        return self.capacity_bytes - fixed_bytes - self.files_bytes - self.slots * JOURNAL_BYTES_PER_SLOT

    def compact_at_entries(self) -> int:
        """The journal's length, in entries, from which it is compacted."""
        return max(self._few, self.slots // SLOTS_PER_JOURNAL_ENTRY)

    def max_entries(self) -> int:
        """The journal's largest length, in entries, where compaction fails."""
        return 2 * max(self._few, self.slots)

    # slots

    def _fitting(self, record_bytes: int) -> list[SizeClass]:
        """Return the size classes with a free slot for a record, the smallest slots first."""
        found = [s for s in self.size_classes.values() if s.free and fits_slot(record_bytes, s.slot_bytes)]
        return sorted(found, key=lambda size_class: size_class.slot_bytes) if len(found) > 1 else found

    def allocate(self, record_bytes: int, count: int) -> tuple[Segment, list[int]] | None:
        """Allocate at most `count` slots of one segment, for records of one size.

        The caller owns them until filled or released.
        """
        for size_class in self._fitting(record_bytes):
            taken = size_class.allocate(count)
            if taken is not None:
                return taken
        return None

    def release(self, segment: Segment, slot: int) -> None:
        """Release a slot that was allocated and not filled.

        It is reused last, since it may be the cause of the failure.
        """
        segment.free.append(slot)
        if not segment.retired:
            self.size_classes[segment.slot_bytes].free += 1

    def clear(self, segment: Segment, slot: int, *, quarantine: bool = False) -> None:
        """Remove the record in a slot; a quarantined slot is not reused."""
        segment.clear(slot, quarantine=quarantine)
        if not quarantine and not segment.retired:
            self.size_classes[segment.slot_bytes].free += 1

    # segments

    def plan(self, record_bytes: int, disk_bytes: int) -> Segment | None:
        """Plan a new segment for records of this size; None where capacity or disk cannot hold one slot."""
        unclaimed_bytes, disk_bytes = self.unclaimed_bytes() - FOOTER_BYTES, disk_bytes - FOOTER_BYTES
        slots = min(
            self._most(record_bytes),
            unclaimed_bytes // (record_bytes + JOURNAL_BYTES_PER_SLOT),
            disk_bytes // record_bytes,
        )
        if slots < 1:
            return None
        segment = Segment(self.next_number, record_bytes, slots)
        self.next_number += 1
        return segment

    def claim(self, segment: Segment) -> None:
        """Count the bytes of a segment's file, from before its creation until `forget`."""
        self.files_bytes += segment.file_bytes
        self.slots += segment.slots

    def add(self, segment: Segment) -> None:
        """Make the segment's slots available."""
        self.segments[segment.number] = segment
        size_class = self.size_classes.setdefault(segment.slot_bytes, SizeClass(segment.slot_bytes))
        size_class.segments[segment.number] = segment
        size_class.free += len(segment.free)
        self.next_number = max(self.next_number, segment.number + 1)

    def retire(self, segment: Segment) -> None:
        """Allocate no more slots of this segment."""
        segment.retired = True
        if self.segments.pop(segment.number, None) is None:
            return
        size_class = self.size_classes[segment.slot_bytes]
        del size_class.segments[segment.number]
        size_class.free -= len(segment.free)
        if not size_class.segments:
            del self.size_classes[segment.slot_bytes]

    def forget(self, segment: Segment) -> None:
        """Stop counting the bytes of a retired segment whose file is removed."""
        self.files_bytes -= segment.file_bytes
        self.slots -= segment.slots

    def surplus(self, slot_bytes: int) -> list[Segment]:
        """Return the empty segments of a size beyond the spares, and those with every slot quarantined."""
        size_class = self.size_classes.get(slot_bytes)
        if size_class is None:
            return []
        useless = [s for s in size_class.segments.values() if s.quarantined == s.slots]
        empty_segments = [s for s in size_class.segments.values() if s.empty and s.free]
        most = max(1, (len(size_class.segments) - len(useless)) // SEGMENTS_PER_SPARE)
        return useless + empty_segments[: max(0, len(empty_segments) - most)]

    def empty_segments(self, record_bytes: int) -> list[Segment]:
        """Return the empty segments whose slots do not fit records of this size."""
        others = (
            size_class
            for size_class in self.size_classes.values()
            if not fits_slot(record_bytes, size_class.slot_bytes)
        )
        return [segment for size_class in others for segment in size_class.segments.values() if segment.empty]

    def free_slots(self, record_bytes: int, disk_bytes: int) -> int:
        """Return how many more records of this size fit, given the free bytes of the disk."""
        free = sum(size_class.free for size_class in self._fitting(record_bytes))
        empty_segments = self.empty_segments(record_bytes)
        files_bytes = sum(s.file_bytes for s in empty_segments)
        journal_bytes = sum(s.slots for s in empty_segments) * JOURNAL_BYTES_PER_SLOT
        free_bytes = self.unclaimed_bytes() + files_bytes + journal_bytes
        most = self._most(record_bytes)
        new = min(
            _slots_that_fit(free_bytes, record_bytes + JOURNAL_BYTES_PER_SLOT, most),
            _slots_that_fit(disk_bytes + files_bytes, record_bytes, most),
        )
        return free + new

    def _most(self, record_bytes: int) -> int:
        """Return the number of slots in a new segment for records of this size."""
        return max(1, self.segment_bytes // record_bytes)

    def used_bytes(self) -> int:
        return sum(s.live * s.slot_bytes for s in self.segments.values())

    def check(self, live: Iterable[int]) -> list[str]:
        """Return the inconsistencies of the slots.

        Args:
            live: the locations in the index, each `segment << 32 | slot`.
        """
        slots_by_segment: dict[int, set[int]] = {}
        for location in live:
            slots_by_segment.setdefault(location >> 32, set()).add(location & 0xFFFFFFFF)
        faults = []
        for s in self.segments.values():
            kinds = s.columns()["kind"].tolist()
            named = slots_by_segment.get(s.number, set())
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
        unknown = slots_by_segment.keys() - self.segments.keys()
        faults += [f"nvme: records in segment {number}, which does not exist" for number in sorted(unknown)]
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


def _slots_that_fit(free_bytes: int, each: int, most: int) -> int:
    """Return how many slots fit in `left` bytes, in segments of at most `most` slots with a footer each."""
    segments, rest = divmod(max(0, free_bytes), most * each + FOOTER_BYTES)
    return segments * most + max(0, rest - FOOTER_BYTES) // each


def fits_slot(record_bytes: int, slot_bytes: int) -> bool:
    return record_bytes <= slot_bytes <= record_bytes + record_bytes // 8


# Segment files: created, opened for their users, removed; and the free bytes of the disk.

DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}
DISK_FULL_PAUSE_S = 1.0
"""Pause before the next segment is tried on a full disk."""

FREE_BYTES_MAX_AGE_S = 1.0
"""Largest age of a cached count of free bytes, where the count only decides whether to try."""


class SegmentFiles:
    """The files of a store's segments.

    Thread safety: `memory` is the catalog's lock of index and allocator; no method holds it during I/O.
    """

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        directory: Directory,
        allocator: Allocator,
        memory: threading.Lock,
        min_free_bytes: int,
        counters: Counters,
    ) -> None:
        self._disk, self._clock, self._directory, self._allocator = disk, clock, directory, allocator
        self._memory, self._min_free_bytes, self._counters = memory, min_free_bytes, counters
        self.orphan_files: dict[int, Segment] = {}  # retired segments whose files could not be removed yet
        self._disk_full_until = 0.0
        self._free_bytes: tuple[float, int] | None = None  # expiry of the cached count, and the count

    def path(self, number: int) -> str:
        return self._directory.join(f"segment-{number:06d}")

    def existing_numbers(self) -> set[int]:
        return set(self._directory.file_numbers("segment"))

    @contextmanager
    def open_file(self, segment: Segment, users: int = 1) -> Iterator[File]:
        """Open the segment's file for callers that are counted among its users; on exit they are subtracted."""
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
        """Create the file of a claimed segment; False where the disk is full.

        The file may exist in that case, and after an OSError too.
        """
        self._free_bytes = None
        try:
            segment.create(self._disk, self.path(segment.number))
        except OSError as error:
            if error.errno not in DISK_FULL_ERRNOS:
                raise
            self.mark_full()
            return False
        return True

    def mark_full(self) -> None:
        """Note that the disk reported no space, and pause the creation of segments."""
        self._counters.add("disk_full")
        self._disk_full_until = self._clock.now() + DISK_FULL_PAUSE_S

    def clear(self, segment: Segment) -> None:
        """Remove the file of a retired segment. Its remaining users keep it open until they finish."""
        self._free_bytes = None
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
        """Return the free bytes of the disk for segments; negative during the pause after a full disk."""
        now = self._clock.now()
        if now < self._disk_full_until:
            return -(1 << 62)
        cached = self._free_bytes
        if fresh or cached is None or cached[0] < now:
            found = max(0, self._disk.free_bytes(self._directory.path) - self._min_free_bytes)
            self._free_bytes = cached = now + FREE_BYTES_MAX_AGE_S, found
        return cached[1]

"""Overwrites what lies in a store and is no record: the bytes of records that left.

A free slot is taken, like by a writer, for as long as zeros are written to it, so nobody's record is in it; a slot that
went bad is nobody's. Of a slot with a record what the record does not fill is overwritten while nothing can be
journaled, so that it is the same record's before and after. What then is on the medium is the business of the drive
and its file system: one that copies on write, or a drive that moves what is written, may keep what was there.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.tier.nvme.catalog import Catalog
from kvcache.tier.nvme.journal import PUT, QUARANTINE
from kvcache.tier.nvme.segment import Segment

STEP_BYTES = 16 << 20
"""Taken at a time: writers miss no more room than that."""


def wipe(catalog: Catalog) -> None:
    """OSError where not all could be overwritten."""
    with catalog.memory:
        segments = list(catalog.allocator.segments.values())
    for segment in segments:
        _wipe_free(catalog, segment)
        _wipe_rest(catalog, segment)
        with _used(catalog, segment), catalog.files.open_file(segment) as file:
            file.sync()


def _wipe_free(catalog: Catalog, segment: Segment) -> None:
    zeros = memoryview(mmap.mmap(-1, segment.slot_bytes))
    done: set[int] = set()
    while slots := _allocate_free(catalog, segment, done, max(1, STEP_BYTES // segment.slot_bytes)):
        try:
            with catalog.files.open_file(segment) as file:
                for slot in slots:
                    segment.write(file, slot, [zeros])
        finally:
            with catalog.memory:
                for slot in slots:
                    catalog.allocator.release(segment, slot)
        done.update(slots)


def _allocate_free(catalog: Catalog, segment: Segment, done: set[int], most: int) -> list[int]:
    """Free slots that were not done; the caller is among the segment's users where there are any."""
    with catalog.memory:
        if segment.retired:
            return []
        slots = [slot for slot in segment.free if slot not in done][:most]
        if slots:
            taken = set(slots)
            segment.free[:] = [slot for slot in segment.free if slot not in taken]
            catalog.allocator.size_classes[segment.slot_bytes].free -= len(slots)
            segment.users += 1
        return slots


def _wipe_rest(catalog: Catalog, segment: Segment) -> None:
    """Slots that went bad, and what records leave free in theirs."""
    for slot in range(segment.slots):
        with catalog.journal_lock:
            row = segment.row(slot)
            first = {PUT: row.record_bytes, QUARANTINE: 0}.get(row.kind, segment.slot_bytes)
            if segment.retired or first >= segment.slot_bytes:
                continue
            with _used(catalog, segment), catalog.files.open_file(segment) as file:
                file.write(slot * segment.slot_bytes + first, [memoryview(mmap.mmap(-1, segment.slot_bytes - first))])


@contextmanager
def _used(catalog: Catalog, segment: Segment) -> Iterator[None]:
    """`using` counts one user less."""
    with catalog.memory:
        segment.users += 1
    yield

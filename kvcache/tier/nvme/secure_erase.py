"""Overwrites all bytes of a store that belong to no record: the remains of removed records.

A free slot is allocated, as for a write, while zeros are written to it, so no record is in it. A quarantined slot has
no owner. The unused end of a slot with a record is overwritten under `journal_lock`, so the slot keeps its record.
The drive and its file system decide what then is on the medium. A file system that copies on write, or a drive that
remaps writes, may keep the old bytes.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.tier.nvme.catalog import Catalog
from kvcache.tier.nvme.journal import PUT, QUARANTINE
from kvcache.tier.nvme.segment import Segment

STEP_BYTES = 16 << 20
"""Size allocated at a time: writers lose no more capacity than this meanwhile."""


def wipe(catalog: Catalog) -> None:
    """Overwrite the free bytes of all segments, and sync them.

    Raises:
        OSError: not all bytes could be overwritten.
    """
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
    """Allocate free slots that are not in `done`. Where there are any, the segment counts the caller as a user."""
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
    """Overwrite quarantined slots, and the unused ends of slots with records."""
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
    """Count one user of the segment; `open_file` subtracts it."""
    with catalog.memory:
        segment.users += 1
    yield

"""Syncs, the data that they cover, and compaction of the journal.

A failed sync is final: the operating system may drop the data, and a second sync then reports success. So the data of a
failed sync is written again before the next one. An earlier process may have ended right after such a failure, so data
that no SYNCED mark in its journal covers is written again too.

Locks: `_syncing`, then `Catalog.journal_lock`, then `Catalog.memory`.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from kvcache.block.record import RecordError, header_area, read_header, verify
from kvcache.os_env import OsEnv
from kvcache.tier.nvme.catalog import Catalog, log
from kvcache.tier.nvme.journal import PUT, SYNCED, Entry
from kvcache.tier.nvme.segment import Segment


class DurabilityBarrier:
    def __init__(self, catalog: Catalog, os_env: OsEnv) -> None:
        self._catalog = catalog
        self._syncing = os_env.condition()  # one sync or compaction at a time; the journal is not rotated during a sync
        self._synced = 0  # the journal's entries before this one are on the medium, together with their records
        self._marked = 0  # a SYNCED mark in the journal covers the entries before this one
        self._compact_at = 0

    def sync(self) -> bool:
        """Sync; return whether everything published before is on the medium."""
        with self._syncing:
            return self._sync()

    def commit(self) -> bool:
        """As `sync`; free where another caller's sync began after the caller's records were published."""
        sequence = self._catalog.journal.sequence
        with self._syncing:
            return self._synced >= sequence or self._sync()

    def _sync(self) -> bool:
        catalog, journal = self._catalog, self._catalog.journal
        sequence = journal.sequence
        with catalog.memory:
            dirty, catalog.dirty = [s for s in catalog.dirty if not s.retired], {}
            new, catalog.new_names = catalog.new_names, False
            catalog.dirty_bytes = 0
        unsafe = [segment for segment in dirty if not self._sync_segment(segment)]
        try:
            if new:
                catalog.directory.sync()
            if journal.in_doubt:
                catalog.checkpoint()
            journal.sync()
        except OSError as error:
            self._failed(error)
            catalog.new_names |= new
            return False
        if unsafe:
            return False
        self._synced = sequence
        if sequence > self._marked:
            with catalog.journal_lock:
                alone = journal.sequence == sequence  # otherwise the next mark covers the entries appended meanwhile
                catalog.append_deferred([Entry(SYNCED, write_id=sequence)])
                catalog.flush_deferred()
                self._marked = journal.sequence if alone else sequence
        return True

    def sync_payloads(self, segment: Segment) -> bool:
        """Sync a segment; return whether the data written to it before is on the medium."""
        with self._catalog.memory:
            segment.users += 1
        try:
            with self._catalog.files.open_file(segment) as file:
                file.sync()
        except FileNotFoundError:
            self._catalog.drop_segment_records(segment)  # the file is missing with its records, so nothing was promised
        except OSError as error:
            self._failed(error)
            with self._catalog.memory:
                segment.failures += 1
                segment.rewrite_slots |= segment.unsynced_slots
                segment.unsynced_slots = set()
                self._catalog.dirty[segment] = None
            return False
        return True

    def _sync_segment(self, segment: Segment) -> bool:
        memory = self._catalog.memory
        with memory:
            rewrite_slots, segment.rewrite_slots = segment.rewrite_slots, set()
            never, segment.never_synced_slots = segment.never_synced_slots, False
            fresh, segment.unsynced_slots = segment.unsynced_slots, set()
        if self._write_again(segment, rewrite_slots) and self.sync_payloads(segment):
            return True
        with memory:
            segment.rewrite_slots |= {slot for slot in rewrite_slots | fresh if segment.row(slot).kind == PUT}
            segment.never_synced_slots |= never
            self._catalog.dirty[segment] = None
        return False

    def _write_again(self, segment: Segment, slots: Iterable[int]) -> bool:
        """Rewrite the same bytes of these records, and drop those that fail verification.

        Returns:
            False where the drive cannot do it now.
        """
        catalog = self._catalog
        for slot in sorted(slots):
            with catalog.journal_lock:  # no other thread gets the slot meanwhile
                with catalog.memory:
                    entry = segment.row(slot)
                    if segment.retired or entry.kind != PUT:
                        continue
                    segment.users += 1
                    address = catalog.index.address(entry)
                data = memoryview(mmap.mmap(-1, entry.record_bytes))
                try:
                    with catalog.files.open_file(segment) as file:
                        segment.read(file, slot, [data])
                        verify(data, data[header_area(read_header(data).decoded_bytes) :], address)
                        segment.write(file, slot, [data])
                except RecordError:
                    catalog.drop({address.name: entry}, quarantine=True, insist=True)
                    catalog.counters.add("unsafe_records")
                    catalog.on_loss(address)
                except OSError as error:
                    self._failed(error)
                    return False
        return True

    def _failed(self, error: OSError) -> None:
        self._catalog.counters.add("sync_errors")
        log.warning("nvme directory %s: sync: %s", self._catalog.directory.path, error)

    @property
    def should_compact(self) -> bool:
        """Whether the journal is long enough to compact."""
        return self._catalog.journal.entries_behind > max(
            self._catalog.allocator.compact_at_entries(), self._compact_at
        )

    @property
    def journal_full(self) -> bool:
        """Whether the journal has its largest allowed length."""
        return self._catalog.journal.entries_behind > self._catalog.allocator.max_entries()

    def compact(self, *, due: bool = True) -> bool:
        """Write a checkpoint and remove the journals before it.

        Args:
            due: do it only where the journal is long enough.

        Returns:
            False where the disk failed.
        """
        catalog = self._catalog
        with self._syncing:
            if (
                due and not catalog.journal.entries_behind > catalog.allocator.compact_at_entries()
            ):  # another thread compacted it
                return True
            try:
                catalog.checkpoint()
            except OSError as error:
                catalog.counters.add("compaction_errors")
                log.warning("nvme directory %s: compaction: %s", catalog.directory.path, error)
                self._compact_at = (
                    catalog.journal.entries_behind + catalog.allocator.compact_at_entries() // 4
                )  # wait before the next attempt
                return False
            self._compact_at = 0
        catalog.counters.add("compactions")
        return True

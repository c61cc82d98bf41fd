"""What is on the medium: syncs, what they cover, and compaction.

A sync that fails is final: the system may have dropped what it could not write, and a second sync then says yes. So
what a failed sync should have covered is written again before the next one. The process before may have ended right
after such a failure, so that the same goes for what no mark in its journal says is safe.
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
        self._syncing = os_env.condition()  # one at a time, and the journal is the same file meanwhile
        self._synced = 0  # the journal's entries before this one are on the medium, and all that they say
        self._marked = 0  # those before this one are covered by a mark in it
        self._compact_at = 0

    def sync(self) -> bool:
        """Whether everything that was published before is on the medium."""
        with self._syncing:
            return self._sync()

    def commit(self) -> bool:
        """The same, at no cost where another caller's sync began after what this one published."""
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
                alone = journal.sequence == sequence  # else what came meanwhile waits for the next mark
                catalog.append_deferred([Entry(SYNCED, write_id=sequence)])
                catalog.flush_deferred()
                self._marked = journal.sequence if alone else sequence
        return True

    def sync_payloads(self, segment: Segment) -> bool:
        """Whether what was written to a segment before is on the medium."""
        with self._catalog.memory:
            segment.users += 1
        try:
            with self._catalog.files.open_file(segment) as file:
                file.sync()
        except FileNotFoundError:
            self._catalog.drop_segment_records(segment)  # its records are gone, and nothing is promised
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
        """Write the same bytes over records; those that are not what they should be leave. False where that cannot be
        done now."""
        catalog = self._catalog
        for slot in sorted(slots):
            with catalog.journal_lock:  # nobody else gets the slot meanwhile
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

    # compaction

    @property
    def should_compact(self) -> bool:
        """Whether the journal is long enough to be compacted."""
        return self._catalog.journal.entries_behind > max(
            self._catalog.allocator.compact_at_entries(), self._compact_at
        )

    @property
    def journal_full(self) -> bool:
        """Whether the journal is as long as the capacity allows."""
        return self._catalog.journal.entries_behind > self._catalog.allocator.max_entries()

    def compact(self, *, due: bool = True) -> bool:
        """Write a checkpoint and drop the journals before it; False where the disk did not let it. `due`: only where
        the journal is long enough."""
        catalog = self._catalog
        with self._syncing:
            if (
                due and not catalog.journal.entries_behind > catalog.allocator.compact_at_entries()
            ):  # another thread has done it
                return True
            try:
                catalog.checkpoint()
            except OSError as error:
                catalog.counters.add("compaction_errors")
                log.warning("nvme directory %s: compaction: %s", catalog.directory.path, error)
                self._compact_at = (
                    catalog.journal.entries_behind + catalog.allocator.compact_at_entries() // 4
                )  # not at once again
                return False
            self._compact_at = 0
        catalog.counters.add("compactions")
        return True

"""What is on the medium: syncs, what they cover, and compaction.

A sync that fails is final: the system may have dropped what it could not write, and a second sync then says yes. So
what a failed sync should have covered is written again before the next one. The process before may have ended right
after such a failure, so that the same goes for what no mark in its journal says is safe.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable

from kvcache.block.record import RecordError, header_area, read_header, verify
from kvcache.os_env import Port
from kvcache.tier.nvme.catalog import Ledger, log
from kvcache.tier.nvme.journal import PUT, SYNCED, Entry
from kvcache.tier.nvme.segment import Segment


class Barrier:
    def __init__(self, ledger: Ledger, port: Port) -> None:
        self._ledger = ledger
        self._syncing = port.condition()  # one at a time, and the journal is the same file meanwhile
        self._synced = 0  # the journal's entries before this one are on the medium, and all that they say
        self._marked = 0  # those before this one are covered by a mark in it
        self._compact_at = 0

    def sync(self) -> bool:
        """Whether everything that was published before is on the medium."""
        with self._syncing:
            return self._sync()

    def commit(self) -> bool:
        """The same, at no cost where another caller's sync began after what this one published."""
        sequence = self._ledger.journal.sequence
        with self._syncing:
            return self._synced >= sequence or self._sync()

    def _sync(self) -> bool:
        ledger, journal = self._ledger, self._ledger.journal
        sequence = journal.sequence
        with ledger.memory:
            dirty, ledger.dirty = [s for s in ledger.dirty if not s.retired], {}
            new, ledger.new_names = ledger.new_names, False
            ledger.dirty_bytes = 0
        unsafe = [segment for segment in dirty if not self._sync_segment(segment)]
        try:
            if new:
                ledger.directory.sync()
            if journal.in_doubt:
                ledger.checkpoint()
            journal.sync()
        except OSError as error:
            self._failed(error)
            ledger.new_names |= new
            return False
        if unsafe:
            return False
        self._synced = sequence
        if sequence > self._marked:
            with ledger.journaling:
                alone = journal.sequence == sequence  # else what came meanwhile waits for the next mark
                ledger.append_later([Entry(SYNCED, write_id=sequence)])
                ledger.say()
                self._marked = journal.sequence if alone else sequence
        return True

    def sync_payloads(self, segment: Segment) -> bool:
        """Whether what was written to a segment before is on the medium."""
        with self._ledger.memory:
            segment.users += 1
        try:
            with self._ledger.files.using(segment) as file:
                file.sync()
        except FileNotFoundError:
            self._ledger.lose(segment)  # its records are gone, and nothing is promised
        except OSError as error:
            self._failed(error)
            with self._ledger.memory:
                segment.failures += 1
                segment.again |= segment.unsynced
                segment.unsynced = set()
                self._ledger.dirty[segment] = None
            return False
        return True

    def _sync_segment(self, segment: Segment) -> bool:
        memory = self._ledger.memory
        with memory:
            again, segment.again = segment.again, set()
            never, segment.never_synced = segment.never_synced, False
            fresh, segment.unsynced = segment.unsynced, set()
        if self._write_again(segment, again) and self.sync_payloads(segment):
            return True
        with memory:
            segment.again |= {slot for slot in again | fresh if segment.row(slot).kind == PUT}
            segment.never_synced |= never
            self._ledger.dirty[segment] = None
        return False

    def _write_again(self, segment: Segment, slots: Iterable[int]) -> bool:
        """Write the same bytes over records; those that are not what they should be leave. False where that cannot be
        done now."""
        ledger = self._ledger
        for slot in sorted(slots):
            with ledger.journaling:  # nobody else gets the slot meanwhile
                with ledger.memory:
                    entry = segment.row(slot)
                    if segment.retired or entry.kind != PUT:
                        continue
                    segment.users += 1
                    address = ledger.index.address(entry)
                data = memoryview(mmap.mmap(-1, entry.record_bytes))
                try:
                    with ledger.files.using(segment) as file:
                        segment.read(file, slot, [data])
                        verify(data, data[header_area(read_header(data).decoded_bytes) :], address)
                        segment.write(file, slot, [data])
                except RecordError:
                    ledger.drop({address.name: entry}, quarantine=True, insist=True)
                    ledger.counters.add("unsafe_records")
                    ledger.on_loss(address)
                except OSError as error:
                    self._failed(error)
                    return False
        return True

    def _failed(self, error: OSError) -> None:
        self._ledger.counters.add("sync_errors")
        log.warning("nvme directory %s: sync: %s", self._ledger.directory.path, error)

    # compaction

    @property
    def overdue(self) -> bool:
        """Whether the journal is long enough to be compacted."""
        return self._ledger.journal.behind > max(self._ledger.space.most_entries(), self._compact_at)

    @property
    def stuck(self) -> bool:
        """Whether the journal is as long as the capacity allows."""
        return self._ledger.journal.behind > self._ledger.space.stuck_entries()

    def compact(self, *, due: bool = True) -> bool:
        """Write a checkpoint and drop the journals before it; False where the disk did not let it. `due`: only where
        the journal is long enough."""
        ledger = self._ledger
        with self._syncing:
            if due and not ledger.journal.behind > ledger.space.most_entries():  # another thread has done it
                return True
            try:
                ledger.checkpoint()
            except OSError as error:
                ledger.counters.add("compaction_errors")
                log.warning("nvme directory %s: compaction: %s", ledger.directory.path, error)
                self._compact_at = ledger.journal.behind + ledger.space.most_entries() // 4  # not at once again
                return False
            self._compact_at = 0
        ledger.counters.add("compactions")
        return True

"""What a store holds, in memory and in its journal at once: every change is journaled, then true.

So a slot is free again only once the journal no longer gives it to a record, and a record can be found only once the
journal has it. A crash between two steps leaves a slot or a file that nobody refers to, never the opposite.

Three locks, taken in this order: `_syncing` (which file the journal is), `journaling` (one change at a time), `memory`
(index and space; never held during I/O).
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.block.address import Address
from kvcache.port import Clock, Disk, File
from kvcache.tier.nvme.counters import Counters
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.entry import QUARANTINE, REMOVE, RETIRE, Entry
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import Journal
from kvcache.tier.nvme.segment import Segment
from kvcache.tier.nvme.space import Space

log = logging.getLogger("kvcache.tier.nvme")

FULL = {errno.ENOSPC, errno.EDQUOT}
_FULL_PAUSE_S = 1.0  # before the next segment is tried on a disk that said it is full


class Ledger:
    def __init__(
        self, disk: Disk, clock: Clock, directory: Directory, space: Space, floor_bytes: int, counters: Counters
    ) -> None:
        """Open what is there or begin; StoreError or OSError where that cannot be."""
        self.directory, self.space, self.counters = directory, space, counters
        self._disk, self._clock, self._floor_bytes = disk, clock, floor_bytes
        self._syncing, self.journaling, self.memory = threading.Lock(), threading.Lock(), threading.Lock()
        self.index = Index(space)
        self._dirty: set[Segment] = set()  # written since the last sync
        self._new_files = False
        self.leftovers: dict[int, Segment] = {}  # retired, with files that could not be removed yet
        self.dirty_bytes = 0
        self.dirty_since = 0.0
        self._full_until = 0.0
        self._compact_at = 0
        self.journal = Journal(directory)
        self._take_stock()

    def _take_stock(self) -> None:
        """Make index, space and files agree with what the journal said."""
        found = self.journal.found
        self.index.load(found.entries)
        found.entries = b""
        there = set(self.directory.numbered("segment"))
        gone = [s for s in self.space.segments.values() if s.number not in there]
        for segment in gone:
            self.counters.add("lost_records", self.index.drop_segment(segment))
            self.space.forget(segment)
        while self.space.left() < 0 and self.space.segments:  # the capacity is smaller than last time
            gone.append(min(self.space.segments.values(), key=lambda s: s.live))
            self.counters.add("excess_records", self.index.drop_segment(gone[-1]))
            self.space.forget(gone[-1])
        if found.damaged:
            self.counters.add("journal_damaged")
            log.warning("nvme directory %s: %s is damaged; what follows is gone", self.directory.path, found.damaged)
            self._write_checkpoint()
        else:
            self.counters.add("journal_torn", int(found.torn > 0))
            if gone:
                self.journal.append(b"".join(Entry(RETIRE, segment=s.number).pack() for s in gone))
        for number in sorted(there - self.space.segments.keys()):
            self._disk.remove(self.segment_path(number))
        self.space.next_number = max([self.space.next_number, *(number + 1 for number in there)])

    def segment_path(self, number: int) -> str:
        return self.directory.join(f"segment-{number:06d}")

    # records

    def find(self, address: Address) -> tuple[Segment, int, Entry] | None:
        """Segment, slot and entry of the very record that the address means."""
        with self.memory:
            found = self.index.find(address.name)
            return found if found is not None and self.index.holds(found[2], address) else None

    def publish(
        self, address: Address, segment: Segment, slot: int, record_bytes: int, write_id: int, *, synced: bool
    ) -> bool:
        """The slot, taken by the caller, holds this record. False where another took its name meanwhile, or the
        segment was lost: then the slot is still the caller's. OSError: the same, and the journal did not take it.
        `synced`: the payload is on the medium already."""
        with self.journaling:
            with self.memory:
                if address.name in self.index.places or segment.retired:
                    return False
                entries = self.index.entries(address, segment, slot, record_bytes, write_id)
            self.journal.append(b"".join(entries))
            with self.memory:
                self.index.insert(address, segment, slot, entries[-1])
                if not self.dirty_bytes:
                    self.dirty_since = self._clock.now()
                self.dirty_bytes += record_bytes
                if not synced:
                    self._dirty.add(segment)
        return True

    def withdraw(self, address: Address, entry: Entry, *, quarantine: bool = False, insist: bool = False) -> bool:
        """The record of this entry leaves; False where it has left already. OSError: it stays, unless the caller
        insists; then it cannot be found, and its slot is not given out again."""
        with self.journaling:
            with self.memory:
                found = self.index.find(address.name)
            if found is None or found[2] != entry:
                return False
            try:
                self.journal.append(entry._replace(kind=QUARANTINE if quarantine else REMOVE).pack())
            except OSError:
                if not insist:
                    raise
                self.counters.add("write_errors")
                quarantine = True
            with self.memory:
                self.index.delete(address.name, quarantine=quarantine)
                last = found[0].empty and not self.space.spare(found[0])
            if last:
                try:
                    self._retire(found[0])
                except OSError:
                    self.counters.add("write_errors")  # it stays, empty, for later
        return True

    # slots and segments

    def take(self, record_bytes: int) -> tuple[Segment, int] | None:
        """A slot for the caller to fill and `publish`, or to `give_back`; None where there is no room. The segment is
        in use until `leave`. OSError: a segment could not be made."""
        with self.memory:
            taken = self._take(record_bytes)
        if taken is not None:
            return taken
        with self.journaling:
            with self.memory:
                taken = self._take(record_bytes)
            if taken is not None:  # another thread made room meanwhile
                return taken
            segment = self._plan(record_bytes)
            if segment is None:
                return None
            return self._make(segment)

    def _make(self, segment: Segment) -> tuple[Segment, int] | None:
        with self.memory:
            self.space.claim(segment)
        try:
            segment.create(self._disk, self.segment_path(segment.number))
            self.journal.append(segment.entry.pack())
        except OSError as error:
            with self.memory:
                self.space.retire(segment)
            self._clear(segment)
            if error.errno not in FULL:
                raise
            self.counters.add("disk_full")
            self._full_until = self._clock.now() + _FULL_PAUSE_S
            return None
        with self.memory:
            self.space.add(segment)
            self._new_files = True
            return self._take(segment.slot_bytes)

    def _take(self, record_bytes: int) -> tuple[Segment, int] | None:
        taken = self.space.take(record_bytes)
        if taken is not None:
            taken[0].users += 1
        return taken

    def give_back(self, segment: Segment, slot: int) -> None:
        with self.memory:
            self.space.give_back(segment, slot)

    @contextmanager
    def using(self, segment: Segment) -> Iterator[File]:
        """The segment's file, open while this lasts, for a caller who counted himself among its users."""
        try:
            yield segment.open(self._disk, self.segment_path(segment.number))
        finally:
            with self.memory:
                segment.users -= 1
                over = segment.retired and not segment.users
            if over:
                segment.close()

    def lose(self, segment: Segment) -> None:
        """The file is gone, and so are its records."""
        with self.journaling:
            if segment.retired:
                return
            try:
                self.journal.append(Entry(RETIRE, segment=segment.number).pack())
            except OSError:
                self.counters.add("write_errors")  # the next start will see for itself
            with self.memory:
                lost = self.index.drop_segment(segment)
            self._clear(segment)
        self.counters.add("lost_records", lost)

    def _plan(self, record_bytes: int) -> Segment | None:
        """A segment to make, at the cost of empty ones of other sizes."""
        for segment in list(self.leftovers.values()):
            self._clear(segment)
        while True:
            disk_bytes = self._free_bytes()
            if disk_bytes < 0:
                return None
            with self.memory:
                planned = self.space.plan(record_bytes, disk_bytes)
                if planned is not None:
                    return planned
                spare = next(iter(self.space.empties(record_bytes)), None)
            if spare is None:
                return None
            self._retire(spare)

    def _retire(self, segment: Segment) -> None:
        self.journal.append(Entry(RETIRE, segment=segment.number).pack())
        with self.memory:
            self.space.retire(segment)
        self._clear(segment)

    def _clear(self, segment: Segment) -> None:
        """Remove the file of a retired segment. Who still uses it has it open, and goes on until he leaves."""
        try:
            self._disk.remove(self.segment_path(segment.number))
        except FileNotFoundError:
            pass
        except OSError:
            self.counters.add("write_errors")
            self.leftovers[segment.number] = segment  # its bytes stay counted until it can be removed
            return
        self.leftovers.pop(segment.number, None)
        with self.memory:
            self.space.forget(segment)
            unused = not segment.users
        if unused:
            segment.close()

    def _free_bytes(self) -> int:
        """What the disk has left for segments; negative for a while after it said that it is full."""
        if self._clock.now() < self._full_until:
            return -(1 << 62)
        return max(0, self._disk.free_bytes(self.directory.path) - self._floor_bytes)

    def room(self, record_bytes: int) -> int:
        disk_bytes = self._free_bytes()
        with self.memory:
            return self.space.room(record_bytes, disk_bytes)

    # durability

    def sync(self) -> bool:
        """Whether everything that was published before is on the medium."""
        with self._syncing:
            with self.memory:
                dirty, self._dirty = {s for s in self._dirty if not s.retired}, set()
                new_files, self._new_files = self._new_files, False
                dirty_bytes, self.dirty_bytes = self.dirty_bytes, 0
                for segment in dirty:
                    segment.users += 1
            try:
                for segment in dirty:
                    self._sync_segment(segment)
                if new_files:
                    self._disk.sync_directory(self.directory.path)
                if self.journal.in_doubt:
                    self._write_checkpoint()
                self.journal.sync()
            except OSError as error:
                self.counters.add("sync_errors")
                log.warning("nvme directory %s: sync: %s", self.directory.path, error)
                with self.memory:
                    self._dirty |= dirty
                    self._new_files |= new_files
                    self.dirty_bytes += dirty_bytes
                return False
        return True

    def _sync_segment(self, segment: Segment) -> None:
        try:
            with self.using(segment) as file:
                file.sync()
        except FileNotFoundError:
            if not segment.retired:  # else its records are gone, and nothing was promised
                self.lose(segment)

    @property
    def overdue(self) -> bool:
        """Whether the journal is long enough to be compacted."""
        return self.journal.behind > max(self.space.most_entries(), self._compact_at)

    @property
    def stuck(self) -> bool:
        """Whether the journal is as long as the capacity allows."""
        return self.journal.behind > 2 * self.space.most_entries()

    def compact(self) -> bool:
        """Write a checkpoint and drop the journals before it; False where the disk did not let it."""
        with self._syncing:
            if not self.journal.behind > self.space.most_entries():  # another thread has done it
                return True
            try:
                self._write_checkpoint()
            except OSError as error:
                self.counters.add("compaction_errors")
                log.warning("nvme directory %s: compaction: %s", self.directory.path, error)
                self._compact_at = self.journal.behind + self.space.most_entries() // 4  # not at once again
                return False
            self._compact_at = 0
        self.counters.add("compactions")
        return True

    def _write_checkpoint(self) -> None:
        with self.journaling:
            header = self.journal.turn()
            with self.memory:
                pieces, count = self.index.state()
        self.journal.checkpoint(header, iter(pieces), count)

    def close(self) -> None:
        with self._syncing, self.journaling, self.memory:
            self.journal.close()
            for segment in self.space.segments.values():
                segment.close()

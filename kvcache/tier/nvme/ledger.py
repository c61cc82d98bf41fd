"""What a store holds, in memory and in its journal at once: every change is journaled, then true.

So a slot is free again only once the journal no longer gives it to a record, and a record can be found only once the
journal has it. A crash between two steps leaves a slot or a file that nobody refers to, never the opposite.

A sync that fails is final: the system may have dropped what it could not write, and a second sync then says yes. So
what a failed sync should have covered is withdrawn, and `Segment.failures` tells those who are writing meanwhile.

Three locks, taken in this order: `_syncing` (which file the journal is), `journaling` (one change at a time), `memory`
(index and space; never held during I/O).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence

from kvcache.block.address import Address
from kvcache.port import Port
from kvcache.tier.counters import Counters
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.entry import PUT, QUARANTINE, REMOVE, RETIRE, Entry
from kvcache.tier.nvme.files import Files
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import Journal
from kvcache.tier.nvme.segment import Segment
from kvcache.tier.nvme.space import Space
from kvcache.tier.nvme.stretch import Place

log = logging.getLogger("kvcache.tier.nvme")

Record = tuple[Segment, int, Entry]
"""Where a record is and what is known of it."""


class Ledger:
    def __init__(self, port: Port, directory: Directory, space: Space, floor_bytes: int, counters: Counters) -> None:
        """Open what is there or begin; StoreError or OSError where that cannot be."""
        self.directory, self.space, self.counters = directory, space, counters
        self._clock = port.clock
        self._syncing, self.journaling = port.condition(), port.condition()  # held during I/O: a simulation must see
        self.memory = threading.Lock()
        self.files = Files(port.disk, port.clock, directory, space, self.memory, floor_bytes, counters)
        self.index = Index(space)
        self._dirty: dict[Segment, None] = {}  # with records that no sync has covered; in order, so that runs repeat
        self._doubted = False  # records were withdrawn, and no `sync` has said so
        self._new_names = False  # there are segments with names that no sync has covered
        self.dirty_bytes = 0
        self.dirty_since = 0.0
        self._compact_at = 0
        self._unsaid = b""  # entries that are true, but that the journal could not take: they go before the next ones
        self.journal = Journal(directory)
        self._synced = 0  # the journal's entries before this one are on the medium, and all that they say
        self._take_stock()

    def _take_stock(self) -> None:
        """Make index, space and files agree with what the journal said."""
        found = self.journal.found
        self.index.load(found.entries)
        found.entries = b""
        there = self.files.there()
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
                self._append(Entry(RETIRE, segment=s.number) for s in gone)
        for number in sorted(there - self.space.segments.keys()):
            self.directory.disk.remove(self.files.path(number))
        self.space.next_number = max([self.space.next_number, *(number + 1 for number in there)])

    # records

    def find(self, address: Address) -> Record | None:
        """The very record that the address means."""
        with self.memory:
            return self._find(address)

    def _find(self, address: Address) -> Record | None:
        found = self.index.find(address.name)
        return found if found is not None and self.index.holds(found[2], address) else None

    def find_all(self, addresses: Sequence[Address], *, use: bool = False) -> list[Record | None]:
        """The same for many. `use`: the caller counts among the users of each one's segment until he leaves."""
        with self.memory:
            found = list(map(self._find, addresses))
            if use:
                for record in found:
                    if record is not None:
                        record[0].users += 1
        return found

    def standing(self, addresses: Sequence[Address]) -> list[bool | None]:
        """Of each name: None where nothing stands under it, else whether it is the very record."""
        with self.memory:
            found = [self.index.find(address.name) for address in addresses]
            return [
                None if record is None else self.index.holds(record[2], address)
                for record, address in zip(found, addresses, strict=True)
            ]

    def publish(self, places: Sequence[Place], *, synced: bool) -> list[bool]:
        """Taken slots hold these records now. False for one whose name another record took meanwhile, or whose
        segment was lost or failed to sync: that slot is still the caller's. OSError: so they all are. `synced`: the
        payloads are on the medium."""
        with self.journaling:
            with self.memory:
                good, names = [], set(self.index.places.keys() & {p.name for p in places})
                for place in places:
                    sound = not place.segment.retired and place.segment.failures == place.failures
                    good.append(sound and place.name not in names)
                    names.add(place.name)
                published = [place for place, taken in zip(places, good, strict=True) if taken]
                entries = self.index.entries(published)
            if not published:
                return good
            self._append(entries)
            with self.memory:
                self.index.insert(published)
                if not self.dirty_bytes:
                    self.dirty_since = self._clock.now()
                for place in published:
                    self.dirty_bytes += place.record_bytes
                    if not synced:
                        place.segment.unsynced.add(place.slot)
                        self._dirty[place.segment] = None
        return good

    def withdraw(
        self, records: Sequence[tuple[Address, Entry]], *, quarantine: bool = False, insist: bool = False
    ) -> list[bool]:
        """The records of these entries leave; False for one that has left already. OSError: all stay, unless the
        caller insists; then they cannot be found, and their slots are not given out again."""
        with self.journaling:
            with self.memory:
                found = [self.index.find(address.name) for address, _ in records]
            there = [f is not None and f[2] == entry for f, (_, entry) in zip(found, records, strict=True)]
            leaving = {address.name: entry for (address, entry), here in zip(records, there, strict=True) if here}
            self._drop(leaving, quarantine=quarantine, insist=insist)
        return there

    def _drop(self, leaving: dict[bytes, Entry], *, quarantine: bool, insist: bool) -> None:
        if not leaving:
            return
        kind = QUARANTINE if quarantine else REMOVE
        try:
            self._append(entry._replace(kind=kind) for entry in leaving.values())
        except OSError:
            if not insist:
                raise
            quarantine = True
            self._append_later(entry._replace(kind=QUARANTINE) for entry in leaving.values())
        with self.memory:
            touched = [self.index.delete(name, quarantine=quarantine) for name in leaving]
            emptied = dict.fromkeys(segment.slot_bytes for segment in touched if segment.empty)
            surplus = [segment for size in emptied for segment in self.space.surplus(size)]
            for segment in surplus:
                self.space.retire(segment)
        self._retired(surplus)

    def _append(self, entries: Iterable[Entry]) -> None:
        """Journal these and what is unsaid. OSError: nothing was journaled."""
        self.journal.append(self._unsaid + b"".join(entry.pack() for entry in entries))
        self._unsaid = b""

    def _append_later(self, entries: Iterable[Entry]) -> None:
        self._unsaid += b"".join(entry.pack() for entry in entries)

    def say(self) -> None:
        """Journal what is unsaid, if that can be done. Under `journaling`."""
        try:
            if self._unsaid:
                self._append([])
        except OSError:
            self.counters.add("write_errors")

    # slots and segments

    def take(self, record_bytes: int, count: int) -> tuple[Segment, list[int]] | None:
        """Slots of one segment, at most `count`, for the caller to fill and `publish`, or to `give_back`; None where
        there is no room. He is among the segment's users, once a slot. OSError: a segment could not be made."""
        with self.memory:
            taken = self._take(record_bytes, count)
        if taken is not None:
            return taken
        with self.journaling:
            with self.memory:
                taken = self._take(record_bytes, count)
            if taken is not None:  # another thread made room meanwhile
                return taken
            segment = self._plan(record_bytes)
            if segment is None or not self._make(segment):
                return None
            with self.memory:
                self.space.add(segment)
                self._new_names = True
                return self._take(record_bytes, count)

    def _take(self, record_bytes: int, count: int) -> tuple[Segment, list[int]] | None:
        taken = self.space.take(record_bytes, count)
        if taken is not None:
            taken[0].users += len(taken[1])
        return taken

    def _make(self, segment: Segment) -> bool:
        with self.memory:
            self.space.claim(segment)
        made = False
        try:
            if self.files.make(segment):
                self._append([segment.entry])
                made = True
        finally:
            if not made:
                with self.memory:
                    self.space.retire(segment)
                self.files.clear(segment)
        return made

    def give_back(self, place: Place) -> None:
        with self.memory:
            self.space.give_back(place.segment, place.slot)

    def lose(self, segment: Segment) -> None:
        """The file is gone, and so are its records."""
        with self.journaling:
            if segment.retired:
                return
            self._append_later([Entry(RETIRE, segment=segment.number)])
            self.say()
            with self.memory:
                lost = self.index.drop_segment(segment)
            self.files.clear(segment)
        self.counters.add("lost_records", lost)

    def _plan(self, record_bytes: int) -> Segment | None:
        """A segment to make, at the cost of empty ones of other sizes."""
        for segment in list(self.files.leftovers.values()):
            self.files.clear(segment)
        while True:
            disk_bytes = self.files.free_bytes()
            if disk_bytes < 0:
                return None
            with self.memory:
                planned = self.space.plan(record_bytes, disk_bytes)
                if planned is not None:
                    return planned
                spares = self.space.empties(record_bytes)[:1]
                for segment in spares:
                    self.space.retire(segment)
            if not spares:
                return None
            self._retired(spares)

    def _retired(self, segments: Sequence[Segment]) -> None:
        """Journal that these are gone, and let them go. They were empty: where the journal cannot be told now, a start
        misses a file with nothing in it."""
        if segments:
            self._append_later(Entry(RETIRE, segment=s.number) for s in segments)
            self.say()
        for segment in segments:
            self.files.clear(segment)

    def room(self, record_bytes: int) -> int:
        try:
            disk_bytes = self.files.free_bytes(fresh=False)
        except OSError:
            disk_bytes = 0
        with self.memory:
            return self.space.room(record_bytes, disk_bytes)

    # durability

    def sync(self) -> bool:
        """Whether everything that was published before is on the medium, and nothing was withdrawn since the last time
        because it could not be brought there."""
        with self._syncing:
            safe = self._sync()
            doubted, self._doubted = self._doubted, False
            return safe and not doubted

    def flush(self) -> bool:
        """Bring everything that was published before onto the medium; False where some could not be brought there."""
        with self._syncing:
            return self._sync()

    def commit(self) -> bool:
        """The same, at no cost where another caller's sync began after what this one published."""
        sequence = self.journal.sequence
        with self._syncing:
            return self._synced >= sequence or self._sync()

    def _sync(self) -> bool:
        sequence = self.journal.sequence
        with self.memory:
            dirty, self._dirty = [s for s in self._dirty if not s.retired], {}
            new, self._new_names = self._new_names, False
            self.dirty_bytes = 0
            covered = {}
            for segment in dirty:
                covered[segment], segment.unsynced = segment.unsynced, set()
        unsafe = [segment for segment in dirty if not self.sync_payloads(segment, covered[segment])]
        try:
            if new:
                self.directory.sync()
            if self.journal.in_doubt:
                self._write_checkpoint()
            self.journal.sync()
        except OSError as error:
            self._failed(error)
            self._new_names |= new
            return False
        if not unsafe:
            self._synced = sequence
        return not unsafe

    def sync_payloads(self, segment: Segment, slots: Iterable[int] = ()) -> bool:
        """Whether what was written to a segment is on the medium. Where it is not, the records in these slots and in
        those filled since are withdrawn."""
        with self.memory:
            segment.users += 1
        try:
            with self.files.using(segment) as file:
                file.sync()
        except FileNotFoundError:
            self.lose(segment)  # its records are gone, and nothing is promised
        except OSError as error:
            self._failed(error)
            self._doubt(segment, slots)
            return False
        return True

    def _doubt(self, segment: Segment, slots: Iterable[int]) -> None:
        with self.journaling:
            with self.memory:
                segment.failures += 1
                slots = {*slots, *segment.unsynced}
                segment.unsynced = set()
                entries = [entry for slot in slots if (entry := segment.row(slot)).kind == PUT]
                leaving = {self.index.address(entry).name: entry for entry in entries} if not segment.retired else {}
            self._drop(leaving, quarantine=False, insist=True)
        self._doubted = self._doubted or bool(leaving)
        self.counters.add("unsafe_records", len(leaving))

    def _failed(self, error: OSError) -> None:
        self.counters.add("sync_errors")
        log.warning("nvme directory %s: sync: %s", self.directory.path, error)

    @property
    def overdue(self) -> bool:
        """Whether the journal is long enough to be compacted."""
        return self.journal.behind > max(self.space.most_entries(), self._compact_at)

    @property
    def stuck(self) -> bool:
        """Whether the journal is as long as the capacity allows."""
        return self.journal.behind > self.space.stuck_entries()

    def compact(self, *, due: bool = True) -> bool:
        """Write a checkpoint and drop the journals before it; False where the disk did not let it. `due`: only where
        the journal is long enough."""
        with self._syncing:
            if due and not self.journal.behind > self.space.most_entries():  # another thread has done it
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

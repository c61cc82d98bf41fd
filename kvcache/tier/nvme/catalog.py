"""What a store holds, in memory and in its journal at once: every change is journaled, then true.

So a slot is free again only once the journal no longer gives it to a record, and a record can be found only once the
journal has it. A crash between two steps leaves a slot or a file that nobody refers to, never the opposite.

Two locks, taken in this order: `journaling` (one change at a time), `memory` (index and space; never held during I/O).
What is on the medium is the business of `barrier.py`."""

from __future__ import annotations

import logging
import mmap
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from kvcache.block.record import ALIGNMENT, Address, RecordError, expires_ms, read_header
from kvcache.os_env import Port
from kvcache.tier.breaker import Counters
from kvcache.tier.nvme.allocator import Files, Space
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import ENDS, PUT, QUARANTINE, REMOVE, RETIRE, Entry, Journal
from kvcache.tier.nvme.segment import Place, Segment

log = logging.getLogger("kvcache.tier.nvme")

Record = tuple[Segment, int, Entry]
"""Where a record is and what is known of it."""


class Ledger:
    def __init__(
        self,
        port: Port,
        directory: Directory,
        space: Space,
        counters: Counters,
        *,
        floor_bytes: int,
        promises: bool,
    ) -> None:
        """Open what is there or begin; StoreError or OSError where that cannot be. `promises`: whether it is kept which
        records a sync has covered."""
        self._promises = promises
        self.directory, self.space, self.counters = directory, space, counters
        self._clock = port.clock
        self.journaling = port.condition()  # held during I/O, so a simulation must see it
        self.memory = threading.Lock()
        self.files = Files(port.disk, port.clock, directory, space, self.memory, floor_bytes, counters)
        self.index = Index(space)
        self.dirty: dict[Segment, None] = {}  # with records that no sync has covered; in order, so that runs repeat
        self.new_names = False  # there are segments with names that no sync has covered
        self.dirty_bytes = 0
        self.dirty_since = 0.0
        self.on_loss: Callable[[Address], object] = lambda address: None  # hears of what leaves and nobody took
        self._keeping = 0
        self._unsaid = b""  # entries that are true, but that the journal could not take: they go before the next ones
        self.journal = Journal(directory)
        self._take_stock()

    def _take_stock(self) -> None:
        """Make index, space and files agree with what the journal said."""
        found = self.journal.found
        self.index.load(found.entries, found.safe)
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
            self.checkpoint()
        else:
            self.counters.add("journal_torn", int(found.torn > 0))
            if gone:
                self._append(Entry(RETIRE, segment=s.number) for s in gone)
        for segment in self.space.segments.values():
            if segment.again or segment.never_synced:
                self.dirty[segment] = None
                self.new_names = True
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
        segment was lost: that slot is still the caller's. OSError: so they all are. `synced`: the payloads were synced,
        and False also stands for those that a failed sync may have cost."""
        with self.journaling:
            with self.memory:
                good, names = [], set(self.index.places.keys() & {p.name for p in places})
                for place in places:
                    sure = not synced or place.segment.failures == place.failures
                    good.append(sure and not place.segment.retired and place.name not in names)
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
                    if self._promises and not synced:
                        segment = place.segment
                        (segment.unsynced if segment.failures == place.failures else segment.again).add(place.slot)
                        self.dirty[segment] = None
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
            self.drop(leaving, quarantine=quarantine, insist=insist)
        return there

    def drop(self, leaving: Mapping[bytes, Entry], *, quarantine: bool, insist: bool) -> None:
        """The same, under `journaling`, by name, for those that are there."""
        if not leaving:
            return
        kind = QUARANTINE if quarantine else REMOVE
        try:
            self._append(entry._replace(kind=kind) for entry in leaving.values())
        except OSError:
            if not insist:
                raise
            quarantine = True
            self.append_later(entry._replace(kind=QUARANTINE) for entry in leaving.values())
        with self.memory:
            touched = [self.index.delete(name, quarantine=quarantine) for name in leaving]
            surplus = self._surplus(dict.fromkeys(segment.slot_bytes for segment in touched if segment.empty))
        self._retired(surplus)

    def keep_files(self, keep: bool) -> None:
        """Each call with True until one with False: no segment is given back to the file system."""
        with self.journaling:
            with self.memory:
                self._keeping += 1 if keep else -1
                surplus = self._surplus(self.space.shelves)
            self._retired(surplus)

    def _surplus(self, sizes: Iterable[int]) -> list[Segment]:
        """Under `memory`: retire what is beyond the spare ones of these sizes, for `_retired`."""
        surplus = [] if self._keeping else [segment for size in sizes for segment in self.space.surplus(size)]
        for segment in surplus:
            self.space.retire(segment)
        return surplus

    def _append(self, entries: Iterable[Entry]) -> None:
        """Journal these and what is unsaid. OSError: nothing was journaled."""
        self.journal.append(self._unsaid + b"".join(entry.pack() for entry in entries))
        self._unsaid = b""

    def append_later(self, entries: Iterable[Entry]) -> None:
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
                self.new_names = True
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
            self.append_later([Entry(RETIRE, segment=segment.number)])
            self.say()
            with self.memory:
                lost = self.index.addresses(segment)
                self.index.drop_segment(segment)
            self.files.clear(segment)
        self.counters.add("lost_records", len(lost))
        for address in lost:
            self.on_loss(address)

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
                spares = [] if self._keeping else self.space.empties(record_bytes)[:1]
                for segment in spares:
                    self.space.retire(segment)
            if not spares:
                return None
            self._retired(spares)

    def _retired(self, segments: Sequence[Segment]) -> None:
        """Journal that these are gone, and let them go. They were empty: where the journal cannot be told now, a start
        misses a file with nothing in it."""
        if segments:
            self.append_later(Entry(RETIRE, segment=s.number) for s in segments)
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

    def checkpoint(self) -> None:
        """Write the state of this moment, and drop the journals before it. The caller sees to it that nobody else does,
        and that nobody syncs the journal meanwhile."""
        with self.journaling:
            header = self.journal.turn()
            with self.memory:
                pieces, count = self.index.state(synced=self._promises)
        self.journal.checkpoint(header, iter(pieces), count)

    def close(self) -> None:
        with self.journaling, self.memory:
            self.journal.close()
            for segment in self.space.segments.values():
                segment.close()


# Which records of a store end, and when: the journal says which, their own headers when.


def ending(ledger: Ledger) -> Iterator[tuple[Address, int]]:
    """With the end of each, in milliseconds since 1970. Reads a page of each of them, of no other; what cannot be read
    now is left out, and a miss when somebody asks for it."""
    with ledger.memory:
        segments = list(ledger.space.segments.values())
    for segment in segments:
        yield from _of(ledger, segment)


def _of(ledger: Ledger, segment: Segment) -> Iterator[tuple[Address, int]]:
    with ledger.memory:
        rows = segment.columns()
        slots = np.flatnonzero((rows["kind"] == PUT) & (rows["flags"] & ENDS != 0)).tolist()
        if segment.retired or not slots:
            return
        segment.users += 1
    page = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        with ledger.files.using(segment) as file:
            for slot in slots:
                segment.read(file, slot, [page])
                try:
                    header = read_header(page)
                except RecordError:
                    continue
                yield header.address, expires_ms(header.fields)
    except OSError:
        return

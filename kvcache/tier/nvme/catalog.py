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
from kvcache.os_env import OsEnv
from kvcache.tier.breaker import Counters
from kvcache.tier.nvme.allocator import Allocator, SegmentFiles
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import FLAG_EXPIRES, PUT, QUARANTINE, REMOVE, RETIRE, Entry, Journal
from kvcache.tier.nvme.segment import Segment, SlotIO

log = logging.getLogger("kvcache.tier.nvme")

Record = tuple[Segment, int, Entry]
"""Where a record is and what is known of it."""


class Catalog:
    def __init__(
        self,
        os_env: OsEnv,
        directory: Directory,
        allocator: Allocator,
        counters: Counters,
        *,
        floor_bytes: int,
        tracks_syncs: bool,
    ) -> None:
        """Open what is there or begin; StoreError or OSError where that cannot be. `promises`: whether it is kept which
        records a sync has covered."""
        self._tracks_syncs = tracks_syncs
        self.directory, self.allocator, self.counters = directory, allocator, counters
        self._clock = os_env.clock
        self.journal_lock = os_env.condition()  # held during I/O, so a simulation must see it
        self.memory = threading.Lock()
        self.files = SegmentFiles(os_env.disk, os_env.clock, directory, allocator, self.memory, floor_bytes, counters)
        self.index = Index(allocator)
        self.dirty: dict[Segment, None] = {}  # with records that no sync has covered; in order, so that runs repeat
        self.new_names = False  # there are segments with names that no sync has covered
        self.dirty_bytes = 0
        self.oldest_dirty_s = 0.0
        self.on_loss: Callable[[Address], object] = lambda address: None  # hears of what leaves and nobody took
        self._keep_depth = 0
        self._deferred = b""  # entries that are true, but that the journal could not take: they go before the next ones
        self.journal = Journal(directory)
        self._reconcile()

    def _reconcile(self) -> None:
        """Make index, space and files agree with what the journal said."""
        contents = self.journal.contents
        self.index.load(contents.entries, contents.safe)
        contents.entries = b""
        present = self.files.existing_numbers()
        missing_segments = [s for s in self.allocator.segments.values() if s.number not in present]
        for segment in missing_segments:
            self.counters.add("lost_records", self.index.drop_segment(segment))
            self.allocator.forget(segment)
        while (
            self.allocator.unclaimed_bytes() < 0 and self.allocator.segments
        ):  # the capacity is smaller than last time
            missing_segments.append(min(self.allocator.segments.values(), key=lambda s: s.live))
            self.counters.add("excess_records", self.index.drop_segment(missing_segments[-1]))
            self.allocator.forget(missing_segments[-1])
        if contents.damaged:
            self.counters.add("journal_damaged")
            log.warning("nvme directory %s: %s is damaged; what follows is gone", self.directory.path, contents.damaged)
            self.checkpoint()
        else:
            self.counters.add("journal_torn", int(contents.torn > 0))
            if missing_segments:
                self._append(Entry(RETIRE, segment=s.number) for s in missing_segments)
        for segment in self.allocator.segments.values():
            if segment.rewrite_slots or segment.never_synced_slots:
                self.dirty[segment] = None
                self.new_names = True
        for number in sorted(present - self.allocator.segments.keys()):
            self.directory.disk.remove(self.files.path(number))
        self.allocator.next_number = max([self.allocator.next_number, *(number + 1 for number in present)])

    # records

    def find(self, address: Address) -> Record | None:
        """The very record that the address means."""
        with self.memory:
            return self._find(address)

    def _find(self, address: Address) -> Record | None:
        found = self.index.find(address.name)
        return found if found is not None and self.index.matches(found[2], address) else None

    def find_all(self, addresses: Sequence[Address], *, use: bool = False) -> list[Record | None]:
        """The same for many. `use`: the caller counts among the users of each one's segment until he leaves."""
        with self.memory:
            found = list(map(self._find, addresses))
            if use:
                for record in found:
                    if record is not None:
                        record[0].users += 1
        return found

    def names_taken(self, addresses: Sequence[Address]) -> list[bool | None]:
        """Of each name: None where nothing stands under it, else whether it is the very record."""
        with self.memory:
            found = [self.index.find(address.name) for address in addresses]
            return [
                None if record is None else self.index.matches(record[2], address)
                for record, address in zip(found, addresses, strict=True)
            ]

    def publish(self, places: Sequence[SlotIO], *, synced: bool) -> list[bool]:
        """Taken slots hold these records now. False for one whose name another record took meanwhile, or whose
        segment was lost: that slot is still the caller's. OSError: so they all are. `synced`: the payloads were synced,
        and False also stands for those that a failed sync may have cost."""
        with self.journal_lock:
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
                    self.oldest_dirty_s = self._clock.now()
                for place in published:
                    self.dirty_bytes += place.record_bytes
                    if self._tracks_syncs and not synced:
                        segment = place.segment
                        (segment.unsynced_slots if segment.failures == place.failures else segment.rewrite_slots).add(
                            place.slot
                        )
                        self.dirty[segment] = None
        return good

    def unpublish(
        self, records: Sequence[tuple[Address, Entry]], *, quarantine: bool = False, insist: bool = False
    ) -> list[bool]:
        """The records of these entries leave; False for one that has left already. OSError: all stay, unless the
        caller insists; then they cannot be found, and their slots are not given out again."""
        with self.journal_lock:
            with self.memory:
                found = [self.index.find(address.name) for address, _ in records]
            present = [f is not None and f[2] == entry for f, (_, entry) in zip(found, records, strict=True)]
            leaving = {address.name: entry for (address, entry), here in zip(records, present, strict=True) if here}
            self.drop(leaving, quarantine=quarantine, insist=insist)
        return present

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
            self.append_deferred(entry._replace(kind=QUARANTINE) for entry in leaving.values())
        with self.memory:
            touched = [self.index.delete(name, quarantine=quarantine) for name in leaving]
            surplus = self._retire_surplus(dict.fromkeys(segment.slot_bytes for segment in touched if segment.empty))
        self._drop_segments(surplus)

    def keep_files(self, keep: bool) -> None:
        """Each call with True until one with False: no segment is given back to the file system."""
        with self.journal_lock:
            with self.memory:
                self._keep_depth += 1 if keep else -1
                surplus = self._retire_surplus(self.allocator.size_classes)
            self._drop_segments(surplus)

    def _retire_surplus(self, sizes: Iterable[int]) -> list[Segment]:
        """Under `memory`: retire what is beyond the spare ones of these sizes, for `_retired`."""
        surplus = [] if self._keep_depth else [segment for size in sizes for segment in self.allocator.surplus(size)]
        for segment in surplus:
            self.allocator.retire(segment)
        return surplus

    def _append(self, entries: Iterable[Entry]) -> None:
        """Journal these and what is unsaid. OSError: nothing was journaled."""
        self.journal.append(self._deferred + b"".join(entry.pack() for entry in entries))
        self._deferred = b""

    def append_deferred(self, entries: Iterable[Entry]) -> None:
        self._deferred += b"".join(entry.pack() for entry in entries)

    def flush_deferred(self) -> None:
        """Journal what is unsaid, if that can be done. Under `journaling`."""
        try:
            if self._deferred:
                self._append([])
        except OSError:
            self.counters.add("write_errors")

    # slots and segments

    def allocate(self, record_bytes: int, count: int) -> tuple[Segment, list[int]] | None:
        """Slots of one segment, at most `count`, for the caller to fill and `publish`, or to `give_back`; None where
        there is no room. He is among the segment's users, once a slot. OSError: a segment could not be made."""
        with self.memory:
            taken = self._allocate(record_bytes, count)
        if taken is not None:
            return taken
        with self.journal_lock:
            with self.memory:
                taken = self._allocate(record_bytes, count)
            if taken is not None:  # another thread made room meanwhile
                return taken
            segment = self._plan(record_bytes)
            if segment is None or not self._make(segment):
                return None
            with self.memory:
                self.allocator.add(segment)
                self.new_names = True
                return self._allocate(record_bytes, count)

    def _allocate(self, record_bytes: int, count: int) -> tuple[Segment, list[int]] | None:
        taken = self.allocator.allocate(record_bytes, count)
        if taken is not None:
            taken[0].users += len(taken[1])
        return taken

    def _make(self, segment: Segment) -> bool:
        with self.memory:
            self.allocator.claim(segment)
        made = False
        try:
            if self.files.create(segment):
                self._append([segment.entry])
                made = True
        finally:
            if not made:
                with self.memory:
                    self.allocator.retire(segment)
                self.files.clear(segment)
        return made

    def release(self, place: SlotIO) -> None:
        with self.memory:
            self.allocator.release(place.segment, place.slot)

    def drop_segment_records(self, segment: Segment) -> None:
        """The file is gone, and so are its records."""
        with self.journal_lock:
            if segment.retired:
                return
            self.append_deferred([Entry(RETIRE, segment=segment.number)])
            self.flush_deferred()
            with self.memory:
                lost = self.index.addresses(segment)
                self.index.drop_segment(segment)
            self.files.clear(segment)
        self.counters.add("lost_records", len(lost))
        for address in lost:
            self.on_loss(address)

    def _plan(self, record_bytes: int) -> Segment | None:
        """A segment to make, at the cost of empty ones of other sizes."""
        for segment in list(self.files.orphan_files.values()):
            self.files.clear(segment)
        while True:
            disk_bytes = self.files.free_bytes()
            if disk_bytes < 0:
                return None
            with self.memory:
                planned = self.allocator.plan(record_bytes, disk_bytes)
                if planned is not None:
                    return planned
                spares = [] if self._keep_depth else self.allocator.empty_segments(record_bytes)[:1]
                for segment in spares:
                    self.allocator.retire(segment)
            if not spares:
                return None
            self._drop_segments(spares)

    def _drop_segments(self, segments: Sequence[Segment]) -> None:
        """Journal that these are gone, and let them go. They were empty: where the journal cannot be told now, a start
        misses a file with nothing in it."""
        if segments:
            self.append_deferred(Entry(RETIRE, segment=s.number) for s in segments)
            self.flush_deferred()
        for segment in segments:
            self.files.clear(segment)

    def room(self, record_bytes: int) -> int:
        try:
            disk_bytes = self.files.free_bytes(fresh=False)
        except OSError:
            disk_bytes = 0
        with self.memory:
            return self.allocator.room(record_bytes, disk_bytes)

    def checkpoint(self) -> None:
        """Write the state of this moment, and drop the journals before it. The caller sees to it that nobody else does,
        and that nobody syncs the journal meanwhile."""
        with self.journal_lock:
            header = self.journal.rotate()
            with self.memory:
                pieces, count = self.index.state(synced=self._tracks_syncs)
        self.journal.checkpoint(header, iter(pieces), count)

    def close(self) -> None:
        with self.journal_lock, self.memory:
            self.journal.close()
            for segment in self.allocator.segments.values():
                segment.close()


# Which records of a store end, and when: the journal says which, their own headers when.


def expirations(catalog: Catalog) -> Iterator[tuple[Address, int]]:
    """With the end of each, in milliseconds since 1970. Reads a page of each of them, of no other; what cannot be read
    now is left out, and a miss when somebody asks for it."""
    with catalog.memory:
        segments = list(catalog.allocator.segments.values())
    for segment in segments:
        yield from _segment_expirations(catalog, segment)


def _segment_expirations(catalog: Catalog, segment: Segment) -> Iterator[tuple[Address, int]]:
    with catalog.memory:
        rows = segment.columns()
        slots = np.flatnonzero((rows["kind"] == PUT) & (rows["flags"] & FLAG_EXPIRES != 0)).tolist()
        if segment.retired or not slots:
            return
        segment.users += 1
    page = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        with catalog.files.open_file(segment) as file:
            for slot in slots:
                segment.read(file, slot, [page])
                try:
                    header = read_header(page)
                except RecordError:
                    continue
                yield header.address, expires_ms(header.fields)
    except OSError:
        return

"""The catalog: the contents of a store, in memory and in its journal.

Every change is appended to the journal before it is applied in memory. So a slot is free only after the journal has
ended its assignment to a record. A record can be found only after the journal has it. A crash between two steps can
produce a slot or a file without an owner, never a slot with two.

Locks, taken in this order: `journal_lock` (one change at a time, held during I/O), then `memory` (index and allocator,
never held during I/O). `durability.py` decides when data is synced to the medium.
"""

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
"""A record's segment, slot and put entry."""


class Catalog:
    def __init__(
        self,
        os_env: OsEnv,
        directory: Directory,
        allocator: Allocator,
        counters: Counters,
        *,
        min_free_bytes: int,
        tracks_syncs: bool,
    ) -> None:
        """Open the store, or create an empty one.

        Args:
            tracks_syncs: keep track of which records a sync has covered.

        Raises:
            StoreError, OSError: the directory cannot be used.
        """
        self._tracks_syncs = tracks_syncs
        self.directory, self.allocator, self.counters = directory, allocator, counters
        self._clock = os_env.clock
        self.journal_lock = os_env.condition()  # held during I/O, so a simulation must see it
        self.memory = threading.Lock()
        disk, clock = os_env.disk, os_env.clock
        self.files = SegmentFiles(disk, clock, directory, allocator, self.memory, min_free_bytes, counters)
        self.index = Index(allocator)
        # segments with records that no sync has covered; ordered, so that runs repeat
        self.dirty: dict[Segment, None] = {}
        self.new_names = False  # the directory has new segment files that no sync has covered
        self.dirty_bytes = 0
        self.oldest_dirty_s = 0.0
        # called for each record that is lost without a request to remove it
        self.on_loss: Callable[[Address], object] = lambda address: None
        self._keep_depth = 0
        self._deferred = b""  # true entries that the journal could not take; the next append writes them first
        self.journal = Journal(directory)
        self._reconcile()

    def _reconcile(self) -> None:
        """Make index, allocator and files agree with the journal."""
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
        ):  # the capacity is smaller than at the last start
            missing_segments.append(min(self.allocator.segments.values(), key=lambda s: s.live))
            self.counters.add("excess_records", self.index.drop_segment(missing_segments[-1]))
            self.allocator.forget(missing_segments[-1])
        if contents.damaged:
            self.counters.add("journal_damaged")
            log.warning(
                "nvme directory %s: %s is damaged; later entries are lost", self.directory.path, contents.damaged
            )
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
        """Return the record of exactly this address; another record under the same name does not count."""
        with self.memory:
            return self._find(address)

    def _find(self, address: Address) -> Record | None:
        found = self.index.find(address.name)
        return found if found is not None and self.index.matches(found[2], address) else None

    def find_all(self, addresses: Sequence[Address], *, use: bool = False) -> list[Record | None]:
        """Find many. With `use`, each record's segment counts one more user, which `close_file` releases."""
        with self.memory:
            found = list(map(self._find, addresses))
            if use:
                for record in found:
                    if record is not None:
                        record[0].users += 1
        return found

    def names_taken(self, addresses: Sequence[Address]) -> list[bool | None]:
        """Return for each address None where its name is free, else whether the record is exactly this one."""
        with self.memory:
            found = [self.index.find(address.name) for address in addresses]
            return [
                None if record is None else self.index.matches(record[2], address)
                for record, address in zip(found, addresses, strict=True)
            ]

    def publish(self, slot_ios: Sequence[SlotIO], *, synced: bool) -> list[bool]:
        """Record in the journal and the index that these allocated slots hold their records.

        Args:
            synced: the payloads were synced.

        Returns:
            One bool a slot. False where another record took the name meanwhile, the segment was lost, or (`synced`) a
            failed sync may have cost the payload. The caller still owns those slots.

        Raises:
            OSError: the journal took no entry; the caller still owns all slots.
        """
        with self.journal_lock:
            with self.memory:
                good, names = [], set(self.index.locations.keys() & {p.name for p in slot_ios})
                for slot_io in slot_ios:
                    sure = not synced or slot_io.segment.failures == slot_io.failures
                    good.append(sure and not slot_io.segment.retired and slot_io.name not in names)
                    names.add(slot_io.name)
                published = [slot_io for slot_io, taken in zip(slot_ios, good, strict=True) if taken]
                entries = self.index.entries(published)
            if not published:
                return good
            self._append(entries)
            with self.memory:
                self.index.insert(published)
                if not self.dirty_bytes:
                    self.oldest_dirty_s = self._clock.now()
                for slot_io in published:
                    self.dirty_bytes += slot_io.record_bytes
                    if self._tracks_syncs and not synced:
                        segment = slot_io.segment
                        (segment.unsynced_slots if segment.failures == slot_io.failures else segment.rewrite_slots).add(
                            slot_io.slot
                        )
                        self.dirty[segment] = None
        return good

    def unpublish(
        self, records: Sequence[tuple[Address, Entry]], *, quarantine: bool = False, insist: bool = False
    ) -> list[bool]:
        """Remove the records of these entries.

        Args:
            quarantine: do not allocate their slots again.
            insist: remove them even where the journal fails; their slots are then quarantined.

        Returns:
            One bool a record; False where it was removed before.

        Raises:
            OSError: the journal failed without `insist`; all records stay.
        """
        with self.journal_lock:
            with self.memory:
                found = [self.index.find(address.name) for address, _ in records]
            present = [f is not None and f[2] == entry for f, (_, entry) in zip(found, records, strict=True)]
            removed = {address.name: entry for (address, entry), here in zip(records, present, strict=True) if here}
            self.drop(removed, quarantine=quarantine, insist=insist)
        return present

    def drop(self, removed: Mapping[bytes, Entry], *, quarantine: bool, insist: bool) -> None:
        """Remove existing records by name, as `unpublish` does. The caller holds `journal_lock`."""
        if not removed:
            return
        kind = QUARANTINE if quarantine else REMOVE
        try:
            self._append(entry._replace(kind=kind) for entry in removed.values())
        except OSError:
            if not insist:
                raise
            quarantine = True
            self.append_deferred(entry._replace(kind=QUARANTINE) for entry in removed.values())
        with self.memory:
            touched = [self.index.delete(name, quarantine=quarantine) for name in removed]
            surplus = self._retire_surplus(dict.fromkeys(segment.slot_bytes for segment in touched if segment.empty))
        self._drop_segments(surplus)

    def keep_files(self, keep: bool) -> None:
        """Between a call with True and its call with False, keep every segment file. Calls nest."""
        with self.journal_lock:
            with self.memory:
                self._keep_depth += 1 if keep else -1
                surplus = self._retire_surplus(self.allocator.size_classes)
            self._drop_segments(surplus)

    def _retire_surplus(self, sizes: Iterable[int]) -> list[Segment]:
        """Retire the empty segments of these sizes beyond the spare ones, for `_drop_segments`.

        The caller holds `memory`.
        """
        surplus = [] if self._keep_depth else [segment for size in sizes for segment in self.allocator.surplus(size)]
        for segment in surplus:
            self.allocator.retire(segment)
        return surplus

    def _append(self, entries: Iterable[Entry]) -> None:
        """Append the deferred entries and these to the journal. On OSError nothing was appended."""
        self.journal.append(self._deferred + b"".join(entry.pack() for entry in entries))
        self._deferred = b""

    def append_deferred(self, entries: Iterable[Entry]) -> None:
        self._deferred += b"".join(entry.pack() for entry in entries)

    def flush_deferred(self) -> None:
        """Append the deferred entries if the journal takes them. The caller holds `journal_lock`."""
        try:
            if self._deferred:
                self._append([])
        except OSError:
            self.counters.add("write_errors")

    # slots and segments

    def allocate(self, record_bytes: int, count: int) -> tuple[Segment, list[int]] | None:
        """Allocate at most `count` slots of one segment, to fill and `publish` or to `release`.

        The segment counts one more user for each slot.

        Returns:
            The segment and its slots; None where there is no capacity.

        Raises:
            OSError: a new segment could not be created.
        """
        with self.memory:
            taken = self._allocate(record_bytes, count)
        if taken is not None:
            return taken
        with self.journal_lock:
            with self.memory:
                taken = self._allocate(record_bytes, count)
            if taken is not None:  # another thread freed or added slots meanwhile
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

    def release(self, slot_io: SlotIO) -> None:
        with self.memory:
            self.allocator.release(slot_io.segment, slot_io.slot)

    def drop_segment_records(self, segment: Segment) -> None:
        """Drop the records of a segment whose file is missing."""
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
        """Plan a new segment; delete empty segments of other sizes to make capacity for it."""
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
        """Journal the end of these retired, empty segments, and remove their files.

        Where the journal fails now, the next start misses a file that held no record.
        """
        if segments:
            self.append_deferred(Entry(RETIRE, segment=s.number) for s in segments)
            self.flush_deferred()
        for segment in segments:
            self.files.clear(segment)

    def free_slots(self, record_bytes: int) -> int:
        try:
            disk_bytes = self.files.free_bytes(fresh=False)
        except OSError:
            disk_bytes = 0
        with self.memory:
            return self.allocator.free_slots(record_bytes, disk_bytes)

    def checkpoint(self) -> None:
        """Write the current state as a checkpoint, and remove the journals before it.

        The caller makes sure that no other checkpoint and no sync of the journal runs meanwhile.
        """
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


# Records with a TTL. The journal says which records expire; their headers say when.


def expirations(catalog: Catalog) -> Iterator[tuple[Address, int]]:
    """Yield each record that expires, with its expiry in milliseconds since 1970.

    Reads one page of each such record and of no other. A record that cannot be read is left out; a later read misses
    it.
    """
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

"""The store: reads, writes and removes batches of records on the calling thread.

A write allocates slots, writes the payloads, syncs them with durability `block`, appends one frame to the journal, and
publishes the records. A read compares the whole identity and every checksum, so a slot that a race, a crash or a drive
spoiled is a miss. No method raises for data or devices: those are outcomes.

Thread safety: all methods may be called from any thread.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

from kvcache.block.record import Address, Header, RecordError, read_header, verify
from kvcache.os_env import File, OsEnv
from kvcache.tier.breaker import CircuitBreaker, Counters
from kvcache.tier.io_queue import Batch
from kvcache.tier.nvme.allocator import DISK_FULL_ERRNOS, Allocator
from kvcache.tier.nvme.catalog import Catalog, log
from kvcache.tier.nvme.directory import Directory, directory_error
from kvcache.tier.nvme.durability import DurabilityBarrier
from kvcache.tier.nvme.journal import put_entry
from kvcache.tier.nvme.segment import SlotIO, coalesce, flatten
from kvcache.tier.tier import Outcome, Segments, same_record

Durability = Literal["none", "batch", "block"]
Settle = Callable[[int, Outcome, str], None]
"""Called with the block's number in its ticket, its outcome, and the name of the failed check or error."""

Result = tuple[Outcome, str]
ReadFault = OSError | RecordError | None

SUSPECT_AFTER_RECORDS = 16
"""After this many damaged records since the start or a scrub, the drive takes no new records.

A record that an earlier process wrote and no sync covered does not count: a power cut may take it from a sound drive.
"""

_IDENTITY = {"namespace", "address", "signature", "parent"}
"""Checks that a sound record of another address fails: the entry was stale, and the slot is sound."""

_UNSAFE = OSError(errno.EIO, "records could not be made durable")


class Store:
    def __init__(
        self,
        path: str,
        *,
        allocator: Allocator,
        durability: Durability,
        min_free_bytes: int,
        os_env: OsEnv,
        served_address: str = "",
    ) -> None:
        """Open the store, or create an empty one.

        Raises:
            StoreError: the directory cannot be used.
        """
        self.durability = durability
        self.counters = Counters()
        self._breaker = CircuitBreaker(os_env.clock)
        self._damaged = 0  # records found damaged since the start or a scrub
        self._checking = threading.Lock()
        """One thread verifies at a time. It verifies faster than a drive reads. Threads that compete for the
        interpreter lock double each other's processor time and cost a quarter of the drive's rate.
        """
        self.directory = Directory(os_env.disk, path, served_address)
        try:
            self.catalog = Catalog(
                os_env,
                self.directory,
                allocator,
                self.counters,
                min_free_bytes=min_free_bytes,
                tracks_syncs=durability != "none",
            )
        except OSError as error:
            self.directory.release()
            raise directory_error(path, error) from error
        except BaseException:
            self.directory.release()
            raise
        self.barrier = DurabilityBarrier(self.catalog, os_env)

    @property
    def is_suspect(self) -> bool:
        return self._damaged >= SUSPECT_AFTER_RECORDS

    @property
    def failing(self) -> bool:
        """Return whether the breaker is open, so that the next write is a probe."""
        return self._breaker.is_open()

    def clear_suspicion(self) -> None:
        """Trust the drive again: a scrub read every remaining record and found it sound."""
        self._damaged = 0

    def health_issues(self) -> list[str]:
        """Return why the store takes no new records now; empty where it does."""
        if self.is_suspect:
            why = f"{self._damaged} records were damaged; no new ones until a scrub or a restart, look at the drive"
        elif not self._breaker.ready():
            why = "writes failed; the next write is a probe"
        else:
            return []
        return [f"nvme directory {self.directory.path}: {why}"]

    def contains(self, addresses: Sequence[Address], settle: Settle) -> None:
        for i, found in enumerate(self.catalog.find_all(addresses)):
            settle(i, Outcome.DONE if found else Outcome.NOT_FOUND, "")

    # reading

    def read(self, batch: Batch, settle: Settle) -> None:
        slot_ios = []
        for i, found in zip(batch.blocks, self.catalog.find_all(batch.block_addresses, use=True), strict=True):
            if found is None:
                settle(i, Outcome.NOT_FOUND, "")
                continue
            segment, slot, entry = found
            pieces = flatten(batch.segments[i], entry.record_bytes)
            if sum(map(len, pieces)) < entry.record_bytes:
                self.catalog.files.close_file(segment)
                settle(i, Outcome.FAILED, "length")
                continue
            slot_ios.append(SlotIO(i, batch.addresses[i], pieces, segment, slot, entry.record_bytes, entry))
        for run in coalesce(slot_ios):
            faults = self._fetch(run)
            with self._checking:
                faults = [_verify_record(p, batch.segments[p.i], fault) for p, fault in zip(run, faults, strict=True)]
            for slot_io, fault in zip(run, faults, strict=True):
                settle(slot_io.i, *self._classify(slot_io, fault))

    def _fetch(self, run: Sequence[SlotIO]) -> Sequence[ReadFault]:
        """Read neighbouring records with one call; return the device's fault of each, before verification."""
        segment = run[0].segment
        try:
            with self.catalog.files.open_file(segment, len(run)) as file:
                return self._fill(file, run)
        except FileNotFoundError as error:
            self.catalog.drop_segment_records(segment)
            return [error] * len(run)
        except OSError as error:
            return [error] * len(run)

    def _fill(self, file: File, run: Sequence[SlotIO]) -> list[ReadFault]:
        first = run[0]
        try:
            got = first.segment.read(file, first.slot, [piece for slot_io in run for piece in slot_io.pieces])
        except OSError as error:
            if len(run) == 1:
                return [error]
            # the other records of the run may be sound
            return [fault for slot_io in run for fault in self._fill(file, [slot_io])]
        faults: list[ReadFault] = []
        for slot_io in run:
            short = got < slot_io.record_bytes
            faults.append(RecordError("short", f"{got} bytes of {slot_io.record_bytes}") if short else None)
            got = max(0, got - slot_io.record_bytes)
        return faults

    def _classify(self, slot_io: SlotIO, fault: ReadFault) -> Result:
        if fault is None:
            return Outcome.DONE, ""
        if isinstance(fault, RecordError):
            return self._distrust(slot_io, fault)
        if isinstance(fault, FileNotFoundError):
            return Outcome.NOT_FOUND, "segment"
        self.counters.add("read_errors")
        return Outcome.FAILED, _errno_name(fault)

    def _distrust(self, slot_io: SlotIO, error: RecordError) -> Result:
        """Remove a record that failed a check, unless it is incompatible or was replaced since the read."""
        if error.foreign:
            self.counters.add("foreign")
            return Outcome.INCOMPATIBLE, error.check
        bad = error.check not in _IDENTITY
        is_durable = slot_io.segment.is_durable(slot_io.slot)
        if not any(self.catalog.unpublish([(slot_io.address, slot_io.entry)], quarantine=bad, insist=True)):
            return Outcome.NOT_FOUND, ""
        self.counters.add("damaged")
        self.counters.add(f"damaged_{error.check}")
        if bad:
            self.counters.add("bad_slots")
        if bad and is_durable:
            self._damaged += 1
            if self._damaged == SUSPECT_AFTER_RECORDS:
                self.counters.add("suspect")
                log.warning("%s", *self.health_issues())
        return Outcome.DAMAGED, error.check

    # writing

    def write(self, batch: Batch, settle: Settle) -> None:
        new: list[tuple[int, Header]] = []
        for i, same in zip(batch.blocks, self.catalog.names_taken(batch.block_addresses), strict=True):
            try:
                header = _check_header(batch.segments[i][0], batch.addresses[i])
            except RecordError as error:
                settle(i, Outcome.FAILED, error.check)
                continue
            if same is None:
                new.append((i, header))
            else:
                settle(i, *self._already_stored(same))
        if not new:
            return
        directory_error = self._refusal()
        if directory_error is not None:
            for i, _ in new:
                settle(i, *directory_error)
            return
        self._publish(self._put(self._allocate_slots(batch, new, settle), settle), settle)

    def _already_stored(self, same: bool) -> Result:
        """Return the result of a write whose name is taken already."""
        if not same:
            return Outcome.FAILED, "key"
        if self.durability == "block" and not self.barrier.commit():
            return Outcome.FAILED, "sync"
        return Outcome.DONE, ""

    def _refusal(self) -> Result | None:
        """Return why no write is tried now; None where it is."""
        if self.is_suspect:
            return Outcome.FAILED, "suspect"
        if not self._breaker.allows():
            return Outcome.FAILED, "breaker"
        if self.barrier.journal_full and not self.barrier.compact():
            return Outcome.NO_CAPACITY, "journal"
        return None

    def _allocate_slots(self, batch: Batch, new: Sequence[tuple[int, Header]], settle: Settle) -> list[SlotIO]:
        """Allocate a slot for each record, and settle those for which there is no capacity."""
        slot_ios: list[SlotIO] = []
        for size, group in groupby(new, lambda pair: batch.size_bytes(pair[0])):
            removed, result = list(group), (Outcome.NO_CAPACITY, "")
            while removed:
                try:
                    taken = self.catalog.allocate(size, len(removed))
                except OSError as error:
                    taken, result = None, self._failed(error)
                if taken is None:
                    for i, _ in removed:
                        settle(i, *result)
                    break
                segment, slots = taken
                for slot, (i, header) in zip(slots, removed, strict=False):
                    pieces, entry = flatten(batch.segments[i], size), put_entry(header)
                    slot_ios.append(SlotIO(i, batch.addresses[i], pieces, segment, slot, size, entry, segment.failures))
                del removed[: len(slots)]
        return slot_ios

    def _put(self, slot_ios: Sequence[SlotIO], settle: Settle) -> list[SlotIO]:
        """Write the payloads; return the slots that were written."""
        written: list[SlotIO] = []
        for run in coalesce(slot_ios):
            segment = run[0].segment
            try:
                with self.catalog.files.open_file(segment, len(run)) as file:
                    segment.write(file, run[0].slot, [piece for slot_io in run for piece in slot_io.pieces])
                written += run
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    self.catalog.drop_segment_records(segment)
                self._fail_writes(run, error, settle)
        if self.durability != "block":
            return written
        segments = dict.fromkeys(slot_io.segment for slot_io in written)
        unsafe = [segment for segment in segments if not self.barrier.sync_payloads(segment)]
        self._fail_writes([slot_io for slot_io in written if slot_io.segment in unsafe], _UNSAFE, settle)
        return [slot_io for slot_io in written if slot_io.segment not in unsafe]

    def _publish(self, written: Sequence[SlotIO], settle: Settle) -> None:
        if not written:
            return
        synced = self.durability == "block"
        try:
            good = self.catalog.publish(written, synced=synced)
        except OSError as error:
            self._fail_writes(written, error, settle)
            return
        for slot_io in (slot_io for slot_io, taken in zip(written, good, strict=True) if not taken):
            self.catalog.release(slot_io)
            (same,) = self.catalog.names_taken([slot_io.address])
            settle(slot_io.i, *((Outcome.FAILED, "segment") if same is None else self._already_stored(same)))
        published = [slot_io for slot_io, taken in zip(written, good, strict=True) if taken]
        # a write that failed its durability promise is withdrawn
        if synced and published and not self.barrier.commit():
            self.catalog.unpublish([(slot_io.address, slot_io.entry) for slot_io in published], insist=True)
            result = self._failed(_UNSAFE)
            for slot_io in published:
                settle(slot_io.i, *result)
            return
        self._breaker.record_success()
        for slot_io in published:
            settle(slot_io.i, Outcome.DONE, "")

    def _fail_writes(self, slot_ios: Sequence[SlotIO], error: OSError, settle: Settle) -> None:
        if not slot_ios:
            return
        result = self._failed(error)
        for slot_io in slot_ios:
            self.catalog.release(slot_io)
            settle(slot_io.i, *result)

    def _failed(self, error: OSError) -> Result:
        """Count a write error, and return its result."""
        self.counters.add("write_errors")
        if self._breaker.record_failure():
            self.counters.add("breaker_opened")
            log.warning("pausing writes: nvme directory %s, cause: %s", self.directory.path, error)
        return (Outcome.NO_CAPACITY if error.errno in DISK_FULL_ERRNOS else Outcome.FAILED), _errno_name(error)

    def remove(self, batch: Batch, settle: Settle) -> None:
        found = self.catalog.find_all(batch.block_addresses)
        existing = [(address, f[2]) for address, f in zip(batch.block_addresses, found, strict=True) if f is not None]
        try:
            removed = iter(self.catalog.unpublish(existing))
        except OSError as error:
            self.counters.add("write_errors")
            for i in batch.blocks:
                settle(i, Outcome.FAILED, _errno_name(error))
            return
        for i, f in zip(batch.blocks, found, strict=True):
            settle(i, Outcome.DONE if f is not None and next(removed) else Outcome.NOT_FOUND, "")

    def sync(self) -> bool:
        """Return whether every write that said DONE is as durable as `durability` promises."""
        return self.durability == "none" or self.barrier.sync()

    def flush(self) -> bool:
        """Sync written data; False where that failed, which counts as a write error."""
        if self.barrier.sync():
            return True
        self._failed(_UNSAFE)
        return False

    def addresses_in_segment(self, address: Address) -> list[Address]:
        """Return all records in this record's segment, itself included."""
        with self.catalog.memory:
            found = self.catalog.index.find(address.name)
            return [] if found is None else self.catalog.index.addresses(found[0])

    def close(self) -> bool:
        """Sync, close the files and release the directory; return whether the sync succeeded."""
        safe = self.sync()
        self.catalog.close()
        self.directory.release()
        return safe


def _verify_record(slot_io: SlotIO, segments: Segments, fault: ReadFault) -> ReadFault:
    """Verify a record that was read; return its fault, None where it is sound."""
    if fault is None:
        try:
            verify(segments[0], segments[1:], slot_io.address)
        except RecordError as error:
            return error
    return fault


def _check_header(header: memoryview, address: Address) -> Header:
    """Return the header of a record to be written.

    Raises:
        RecordError: the header is damaged or names another address.
    """
    found = read_header(header)
    if found.address.name != address.name or not same_record(found.address, address):
        raise RecordError("address", "the header names another record than the call")
    return found


def _errno_name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "OSError")

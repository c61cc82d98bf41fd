"""The store: what one call does to a batch of records, on the thread that calls. Nothing is raised for data or devices.

A write: slots, the payloads, (durability "block": the payloads on the medium), one frame in the journal, visible. A
read compares the whole identity and every checksum, so what a race, a crash or a drive left behind is a miss.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Literal

from kvcache.block.record import Address, Header, RecordError, read_header, verify
from kvcache.os_env import File, Port
from kvcache.tier.breaker import Breaker, Counters
from kvcache.tier.io_queue import Batch
from kvcache.tier.nvme.allocator import FULL, Space
from kvcache.tier.nvme.catalog import Ledger, log
from kvcache.tier.nvme.directory import Directory, refusal
from kvcache.tier.nvme.durability import Barrier
from kvcache.tier.nvme.journal import put_entry
from kvcache.tier.nvme.segment import Place, flat, stretches
from kvcache.tier.tier import Outcome, Segments, same_record

Durability = Literal["none", "batch", "block"]
Settle = Callable[[int, Outcome, str], None]
"""Takes the block's number in its ticket, what became of it, and the check or error that says why."""

Result = tuple[Outcome, str]
Fault = OSError | RecordError | None

SUSPECT_AFTER = 16
"""So many damaged records since the start or a scrub, and the drive gets no new ones. What an earlier process wrote and
no sync covered does not count: a power cut may take it from a drive that is well."""

_IDENTITY = {"namespace", "address", "signature", "parent"}
"""Checks that a sound record of another address fails: the slot is well, only the entry was stale."""

_UNSAFE = OSError(errno.EIO, "records could not be made durable")


class Store:
    def __init__(
        self, path: str, *, space: Space, durability: Durability, floor_bytes: int, port: Port, serves: str = ""
    ) -> None:
        """Open or begin; StoreError where that cannot be."""
        self.durability = durability
        self.counters = Counters()
        self._breaker = Breaker(port.clock)
        self._bad = 0  # records found damaged since the start or a scrub
        self._checking = threading.Lock()
        """One thread checks at a time: it does so faster than a drive reads, and threads that want the interpreter at
        the same time cost each other twice the processor time and a quarter of the drive's rate."""
        self.directory = Directory(port.disk, path, serves)
        try:
            self.ledger = Ledger(
                port,
                self.directory,
                space,
                self.counters,
                floor_bytes=floor_bytes,
                promises=durability != "none",
            )
        except OSError as error:
            self.directory.release()
            raise refusal(path, error) from error
        except BaseException:
            self.directory.release()
            raise
        self.barrier = Barrier(self.ledger, port)

    @property
    def suspect(self) -> bool:
        return self._bad >= SUSPECT_AFTER

    @property
    def failing(self) -> bool:
        """Whether writes failed, and the next one is a probe."""
        return self._breaker.is_open()

    def trust(self) -> None:
        """Every record that is left was read and is sound: the drive is no longer suspect."""
        self._bad = 0

    def troubles(self) -> list[str]:
        """Why no new records are taken now."""
        if self.suspect:
            why = f"{self._bad} records were damaged; no new ones until a scrub or a restart, look at the drive"
        elif not self._breaker.ready():
            why = "writes failed; the next one is tried by itself"
        else:
            return []
        return [f"nvme directory {self.directory.path}: {why}"]

    def contains(self, addresses: Sequence[Address], settle: Settle) -> None:
        for i, found in enumerate(self.ledger.find_all(addresses)):
            settle(i, Outcome.DONE if found else Outcome.ABSENT, "")

    # reading

    def read(self, batch: Batch, settle: Settle) -> None:
        places = []
        for i, found in zip(batch.blocks, self.ledger.find_all(batch.wanted, use=True), strict=True):
            if found is None:
                settle(i, Outcome.ABSENT, "")
                continue
            segment, slot, entry = found
            pieces = flat(batch.segments[i], entry.record_bytes)
            if sum(map(len, pieces)) < entry.record_bytes:
                self.ledger.files.leave(segment)
                settle(i, Outcome.FAILED, "length")
                continue
            places.append(Place(i, batch.addresses[i], pieces, segment, slot, entry.record_bytes, entry))
        for stretch in stretches(places):
            faults = self._fetch(stretch)
            with self._checking:
                faults = [_check(p, batch.segments[p.i], fault) for p, fault in zip(stretch, faults, strict=True)]
            for place, fault in zip(stretch, faults, strict=True):
                settle(place.i, *self._judge(place, fault))

    def _fetch(self, stretch: Sequence[Place]) -> Sequence[Fault]:
        """Read neighbours; what is wrong with each before anybody looks at it."""
        segment = stretch[0].segment
        try:
            with self.ledger.files.using(segment, len(stretch)) as file:
                return self._fill(file, stretch)
        except FileNotFoundError as error:
            self.ledger.lose(segment)
            return [error] * len(stretch)
        except OSError as error:
            return [error] * len(stretch)

    def _fill(self, file: File, stretch: Sequence[Place]) -> list[Fault]:
        first = stretch[0]
        try:
            got = first.segment.read(file, first.slot, [piece for place in stretch for piece in place.pieces])
        except OSError as error:
            if len(stretch) == 1:
                return [error]
            return [fault for place in stretch for fault in self._fill(file, [place])]  # a neighbour may be well
        faults: list[Fault] = []
        for place in stretch:
            short = got < place.record_bytes
            faults.append(RecordError("short", f"{got} bytes of {place.record_bytes}") if short else None)
            got = max(0, got - place.record_bytes)
        return faults

    def _judge(self, place: Place, fault: Fault) -> Result:
        if fault is None:
            return Outcome.DONE, ""
        if isinstance(fault, RecordError):
            return self._distrust(place, fault)
        if isinstance(fault, FileNotFoundError):
            return Outcome.ABSENT, "segment"
        self.counters.add("read_errors")
        return Outcome.FAILED, _name(fault)

    def _distrust(self, place: Place, error: RecordError) -> Result:
        """A record that failed a check: out with it, unless it is foreign or no longer the write that was read."""
        if error.foreign:
            self.counters.add("foreign")
            return Outcome.FOREIGN, error.check
        bad = error.check not in _IDENTITY
        promised = place.segment.promised(place.slot)
        if not any(self.ledger.withdraw([(place.address, place.entry)], quarantine=bad, insist=True)):
            return Outcome.ABSENT, ""
        self.counters.add("damaged")
        self.counters.add(f"damaged_{error.check}")
        if bad:
            self.counters.add("bad_slots")
        if bad and promised:
            self._bad += 1
            if self._bad == SUSPECT_AFTER:
                self.counters.add("suspect")
                log.warning("%s", *self.troubles())
        return Outcome.DAMAGED, error.check

    # writing

    def write(self, batch: Batch, settle: Settle) -> None:
        new: list[tuple[int, Header]] = []
        for i, same in zip(batch.blocks, self.ledger.standing(batch.wanted), strict=True):
            try:
                header = _sealed(batch.segments[i][0], batch.addresses[i])
            except RecordError as error:
                settle(i, Outcome.FAILED, error.check)
                continue
            if same is None:
                new.append((i, header))
            else:
                settle(i, *self._held(same))
        if not new:
            return
        refusal = self._refusal()
        if refusal is not None:
            for i, _ in new:
                settle(i, *refusal)
            return
        self._publish(self._put(self._take(batch, new, settle), settle), settle)

    def _held(self, same: bool) -> Result:
        """The answer to a write where its name is taken already."""
        if not same:
            return Outcome.FAILED, "key"
        if self.durability == "block" and not self.barrier.commit():
            return Outcome.FAILED, "sync"
        return Outcome.DONE, ""

    def _refusal(self) -> Result | None:
        """Why nothing is written now."""
        if self.suspect:
            return Outcome.FAILED, "suspect"
        if not self._breaker.allows():
            return Outcome.FAILED, "breaker"
        if self.barrier.stuck and not self.barrier.compact():
            return Outcome.NO_ROOM, "journal"
        return None

    def _take(self, batch: Batch, new: Sequence[tuple[int, Header]], settle: Settle) -> list[Place]:
        """A slot for each, as far as there is room."""
        places: list[Place] = []
        for size, group in groupby(new, lambda pair: batch.size_bytes(pair[0])):
            left, result = list(group), (Outcome.NO_ROOM, "")
            while left:
                try:
                    taken = self.ledger.take(size, len(left))
                except OSError as error:
                    taken, result = None, self._failed(error)
                if taken is None:
                    for i, _ in left:
                        settle(i, *result)
                    break
                segment, slots = taken
                for slot, (i, header) in zip(slots, left, strict=False):
                    pieces, entry = flat(batch.segments[i], size), put_entry(header)
                    places.append(Place(i, batch.addresses[i], pieces, segment, slot, size, entry, segment.failures))
                del left[: len(slots)]
        return places

    def _put(self, places: Sequence[Place], settle: Settle) -> list[Place]:
        """Write the payloads; those that are where they should be."""
        written: list[Place] = []
        for stretch in stretches(places):
            segment = stretch[0].segment
            try:
                with self.ledger.files.using(segment, len(stretch)) as file:
                    segment.write(file, stretch[0].slot, [piece for place in stretch for piece in place.pieces])
                written += stretch
            except OSError as error:
                if isinstance(error, FileNotFoundError):
                    self.ledger.lose(segment)
                self._give_up(stretch, error, settle)
        if self.durability != "block":
            return written
        segments = dict.fromkeys(place.segment for place in written)
        unsafe = [segment for segment in segments if not self.barrier.sync_payloads(segment)]
        self._give_up([place for place in written if place.segment in unsafe], _UNSAFE, settle)
        return [place for place in written if place.segment not in unsafe]

    def _publish(self, written: Sequence[Place], settle: Settle) -> None:
        if not written:
            return
        synced = self.durability == "block"
        try:
            good = self.ledger.publish(written, synced=synced)
        except OSError as error:
            self._give_up(written, error, settle)
            return
        for place in (place for place, taken in zip(written, good, strict=True) if not taken):
            self.ledger.give_back(place)
            (same,) = self.ledger.standing([place.address])
            settle(place.i, *((Outcome.FAILED, "segment") if same is None else self._held(same)))
        published = [place for place, taken in zip(written, good, strict=True) if taken]
        if synced and published and not self.barrier.commit():  # a write that cannot keep its promise was not there
            self.ledger.withdraw([(place.address, place.entry) for place in published], insist=True)
            result = self._failed(_UNSAFE)
            for place in published:
                settle(place.i, *result)
            return
        self._breaker.passed()
        for place in published:
            settle(place.i, Outcome.DONE, "")

    def _give_up(self, places: Sequence[Place], error: OSError, settle: Settle) -> None:
        if not places:
            return
        result = self._failed(error)
        for place in places:
            self.ledger.give_back(place)
            settle(place.i, *result)

    def _failed(self, error: OSError) -> Result:
        """Count an error of a write."""
        self.counters.add("write_errors")
        if self._breaker.failed():
            self.counters.add("breaker_opened")
            log.warning("nvme directory %s: writes stop for a while: %s", self.directory.path, error)
        return (Outcome.NO_ROOM if error.errno in FULL else Outcome.FAILED), _name(error)

    # the rest

    def remove(self, batch: Batch, settle: Settle) -> None:
        found = self.ledger.find_all(batch.wanted)
        there = [(address, f[2]) for address, f in zip(batch.wanted, found, strict=True) if f is not None]
        try:
            left = iter(self.ledger.withdraw(there))
        except OSError as error:
            self.counters.add("write_errors")
            for i in batch.blocks:
                settle(i, Outcome.FAILED, _name(error))
            return
        for i, f in zip(batch.blocks, found, strict=True):
            settle(i, Outcome.DONE if f is not None and next(left) else Outcome.ABSENT, "")

    def sync(self) -> bool:
        """Whether every write that said DONE is as durable as it should be."""
        return self.durability == "none" or self.barrier.sync()

    def flush(self) -> bool:
        """Make what was written durable; False where that failed, which counts as an error of a write."""
        if self.barrier.sync():
            return True
        self._failed(_UNSAFE)
        return False

    def addresses_beside(self, address: Address) -> list[Address]:
        """Everything in the same segment as this record, itself included."""
        with self.ledger.memory:
            found = self.ledger.index.find(address.name)
            return [] if found is None else self.ledger.index.addresses(found[0])

    def close(self) -> bool:
        """Whether everything is as durable as it should be."""
        safe = self.sync()
        self.ledger.close()
        self.directory.release()
        return safe


def _check(place: Place, segments: Segments, fault: Fault) -> Fault:
    """What is wrong with a record that was read."""
    if fault is None:
        try:
            verify(segments[0], segments[1:], place.address)
        except RecordError as error:
            return error
    return fault


def _sealed(header: memoryview, address: Address) -> Header:
    """The header of a record that is to be stored under an address; RecordError where it is not that one."""
    found = read_header(header)
    if found.address.name != address.name or not same_record(found.address, address):
        raise RecordError("address", "the header names another record than the call")
    return found


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "OSError")

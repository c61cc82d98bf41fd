"""The store: what one call does to one record, on the thread that calls. Nothing is raised for data or devices.

A write: a slot, the payload, (durability "block": the payload on the medium), the journal entry, visible. A read
compares the whole identity and every checksum, so what a race, a crash or a drive left behind is a miss.
"""

from __future__ import annotations

import errno
from typing import Literal

from kvcache.block.address import Address
from kvcache.block.record import RecordError, read_header, verify
from kvcache.port import Port
from kvcache.tier.nvme.breaker import Breaker
from kvcache.tier.nvme.counters import Counters
from kvcache.tier.nvme.directory import Directory, refusal
from kvcache.tier.nvme.entry import Entry
from kvcache.tier.nvme.ledger import FULL, Ledger, log
from kvcache.tier.nvme.space import Space
from kvcache.tier.tier import Outcome, Segments, same_record

Durability = Literal["none", "batch", "block"]
Result = tuple[Outcome, str]
"""What became of it, and the check or error that says why."""

_IDENTITY = {"namespace", "address", "signature", "parent"}
"""Checks that a sound record of another address fails: the slot is well, only the entry was stale."""


class Store:
    def __init__(self, path: str, *, space: Space, durability: Durability, floor_bytes: int, port: Port) -> None:
        """Open or begin; StoreError where that cannot be."""
        self.durability = durability
        self.counters = Counters()
        self._breaker = Breaker(port.clock)
        self.directory = Directory(port.disk, path)
        try:
            self.ledger = Ledger(port.disk, port.clock, self.directory, space, floor_bytes, self.counters)
        except OSError as error:
            self.directory.release()
            raise refusal(path, error) from error
        except BaseException:
            self.directory.release()
            raise

    def contains(self, address: Address) -> Result:
        return (Outcome.DONE if self.ledger.find(address) else Outcome.ABSENT), ""

    def read(self, address: Address, segments: Segments) -> Result:
        ledger = self.ledger
        with ledger.memory:
            found = ledger.index.find(address.name)
            if found is None or not ledger.index.holds(found[2], address):
                return Outcome.ABSENT, ""
            segment, slot, entry = found
            if sum(map(len, segments)) < entry.record_bytes:
                return Outcome.FAILED, "length"
            segment.users += 1
        try:
            with ledger.using(segment) as file:
                got = segment.read(file, slot, segments, entry.record_bytes)
        except FileNotFoundError:
            ledger.lose(segment)
            return Outcome.ABSENT, "segment"
        except OSError as error:
            self.counters.add("read_errors")
            return Outcome.FAILED, _name(error)
        try:
            if got < entry.record_bytes:
                raise RecordError("short", f"{got} bytes of {entry.record_bytes}")
            verify(segments[0], segments[1:], address)
        except RecordError as error:
            return self._distrust(address, entry, error)
        self.counters.add("read_bytes", entry.record_bytes)
        return Outcome.DONE, ""

    def _distrust(self, address: Address, entry: Entry, error: RecordError) -> Result:
        """A record that failed a check: out with it, unless it is foreign or no longer the write that was read."""
        if error.foreign:
            self.counters.add("foreign")
            return Outcome.FOREIGN, error.check
        if not self.ledger.withdraw(address, entry, quarantine=error.check not in _IDENTITY, insist=True):
            return Outcome.ABSENT, ""
        self.counters.add("damaged")
        self.counters.add(f"damaged_{error.check}")
        return Outcome.DAMAGED, error.check

    def write(self, address: Address, segments: Segments) -> Result:
        try:
            header = read_header(segments[0])
        except RecordError as error:
            return Outcome.FAILED, error.check
        if header.address.name != address.name or not same_record(header.address, address):
            return Outcome.FAILED, "address"
        held = self._held(address)
        if held is not None:
            return held
        if not self._breaker.allows():
            return Outcome.FAILED, "breaker"
        if self.ledger.stuck and not self.ledger.compact():
            return Outcome.NO_ROOM, "journal"
        record_bytes = sum(map(len, segments))
        try:
            result = self._write(address, segments, record_bytes, header.write_id)
        except OSError as error:
            self.counters.add("write_errors")
            if self._breaker.failed():
                self.counters.add("breaker_opened")
                log.warning("nvme directory %s: writes stop for a while: %s", self.directory.path, error)
            return (Outcome.NO_ROOM if error.errno in FULL else Outcome.FAILED), _name(error)
        if result[0] is Outcome.DONE:
            self._breaker.passed()
            self.counters.add("write_bytes", record_bytes)
        return result

    def _held(self, address: Address) -> Result | None:
        """The answer to a write where its name is taken already."""
        with self.ledger.memory:
            found = self.ledger.index.find(address.name)
            if found is None:
                return None
            same = self.ledger.index.holds(found[2], address)
        if not same:
            return Outcome.FAILED, "key"
        if self.durability == "block" and not self.ledger.sync():
            return Outcome.FAILED, "sync"
        return Outcome.DONE, ""

    def _write(self, address: Address, segments: Segments, record_bytes: int, write_id: int) -> Result:
        taken = self.ledger.take(record_bytes)
        if taken is None:
            return Outcome.NO_ROOM, ""
        published, synced = False, self.durability == "block"
        try:
            with self.ledger.using(taken[0]) as file:
                taken[0].write(file, taken[1], segments, record_bytes)
                if synced:
                    file.sync()
                published = self.ledger.publish(address, *taken, record_bytes, write_id, synced=synced)
        except FileNotFoundError:
            self.ledger.lose(taken[0])
            raise
        finally:
            if not published:
                self.ledger.give_back(*taken)
        if not published:
            return self._held(address) or (Outcome.FAILED, "segment")
        if synced and not self.ledger.sync():
            self._take_back(address, write_id)
            raise OSError(errno.EIO, "the record could not be made durable")
        return Outcome.DONE, ""

    def _take_back(self, address: Address, write_id: int) -> None:
        """A write that cannot keep its promise was not there."""
        found = self.ledger.find(address)
        if found is not None and found[2].write_id == write_id:
            self.ledger.withdraw(address, found[2], insist=True)

    def remove(self, address: Address) -> Result:
        found = self.ledger.find(address)
        try:
            if found is None or not self.ledger.withdraw(address, found[2]):
                return Outcome.ABSENT, ""
        except OSError as error:
            self.counters.add("write_errors")
            return Outcome.FAILED, _name(error)
        return Outcome.DONE, ""

    def sync(self) -> bool:
        """Whether every write that said DONE is as durable as it should be."""
        return self.durability == "none" or self.ledger.sync()

    def addresses_beside(self, address: Address) -> list[Address]:
        """Everything in the same segment as this record, itself included."""
        with self.ledger.memory:
            found = self.ledger.index.find(address.name)
            return [] if found is None else self.ledger.index.addresses(found[0])

    def close(self) -> None:
        self.sync()
        self.ledger.close()
        self.directory.release()


def _name(error: OSError) -> str:
    return errno.errorcode.get(error.errno or 0, "OSError")

"""The naive tier: a dict of bytes under one lock. It proves the contract and serves tests only."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvcache.block.record import Address, RecordError, read_header, verify
from kvcache.errors import ClosedError
from kvcache.os_env import OsEnv
from kvcache.tier.tier import DEMAND, BlockingCalls, Op, Outcome, Segments, Ticket, Usage, check_segments, same_record


class MemoryTier(BlockingCalls):
    name = "memory"
    durable = shared = False

    def __init__(self, *, capacity_bytes: int, os_env: OsEnv | None = None) -> None:
        self._capacity_bytes = capacity_bytes
        self._os_env = os_env or OsEnv()
        self._records: dict[bytes, tuple[Address, bytes]] = {}
        self._used_bytes = 0
        self._lock = threading.Lock()
        self._closed = False

    def submit(
        self,
        op: Op,
        addresses: Sequence[Address],
        segments: Sequence[Segments] = (),
        *,
        priority: int = DEMAND,
        deadline: float | None = None,
        on_outcome: Callable[[int, Outcome], None] | None = None,
    ) -> Ticket:
        """Settle every block before returning."""
        if self._closed:
            raise ClosedError("memory tier: it was closed")
        check_segments(op, addresses, segments)
        ticket = Ticket(len(addresses), on_outcome)
        late = deadline is not None and self._os_env.clock.now() > deadline
        for i, address in enumerate(addresses):
            if late:
                ticket.settle(i, Outcome.TIMED_OUT)
                continue
            with self._lock:
                outcome, check = self._one(op, address, segments[i] if segments else ())
            ticket.settle(i, outcome, check)
        return ticket

    def _one(self, op: Op, address: Address, segments: Segments) -> tuple[Outcome, str]:
        held = self._records.get(address.name)
        is_present = held is not None and same_record(held[0], address)
        if op == "contains":
            return (Outcome.DONE if is_present else Outcome.NOT_FOUND), ""
        if op == "write":
            if held is not None:
                return (Outcome.DONE, "") if is_present else (Outcome.FAILED, "key")
            return self._write(address, segments)
        if held is None or not is_present:
            return Outcome.NOT_FOUND, ""
        if op == "remove":
            self._drop(address.name)
            return Outcome.DONE, ""
        return self._read(address, held[1], segments)

    def _read(self, address: Address, record: bytes, segments: Segments) -> tuple[Outcome, str]:
        if sum(map(len, segments)) < len(record):
            return Outcome.FAILED, "length"
        at = 0
        for segment in segments:
            part = record[at : at + len(segment)]
            segment[: len(part)] = part
            at += len(part)
        try:
            verify(segments[0], segments[1:], address)
        except RecordError as error:
            if error.foreign:
                return Outcome.INCOMPATIBLE, error.check
            self._drop(address.name)
            return Outcome.DAMAGED, error.check
        return Outcome.DONE, ""

    def _write(self, address: Address, segments: Segments) -> tuple[Outcome, str]:
        try:
            found = read_header(segments[0]).address
        except RecordError as error:
            return Outcome.FAILED, error.check
        if not same_record(found, address):
            return Outcome.FAILED, "address"
        record = b"".join(segments)
        if self._used_bytes + len(record) > self._capacity_bytes:
            return Outcome.NO_CAPACITY, ""
        self._records[address.name] = (address, record)
        self._used_bytes += len(record)
        return Outcome.DONE, ""

    def _drop(self, name: bytes) -> None:
        _, record = self._records.pop(name)
        self._used_bytes -= len(record)

    def free_slots(self, record_bytes: int) -> int:
        return (self._capacity_bytes - self._used_bytes) // record_bytes

    def scan(self) -> Iterator[Address]:
        with self._lock:
            addresses = [address for address, _ in self._records.values()]
        yield from addresses

    def health_issues(self) -> list[str]:
        return []

    def sync(self) -> bool:
        """Return at once: memory has no pending writes."""
        return True

    def usage(self) -> Usage:
        with self._lock:
            return Usage(len(self._records), self._used_bytes, self._capacity_bytes)

    def check(self) -> list[str]:
        with self._lock:
            records = dict(self._records)
            used_bytes = self._used_bytes
        faults = []
        if used_bytes != sum(len(record) for _, record in records.values()):
            faults.append(f"memory: {used_bytes} bytes counted, others are there")
        if used_bytes > self._capacity_bytes:
            faults.append(f"memory: {used_bytes} bytes of at most {self._capacity_bytes}")
        for name, (address, record) in records.items():
            try:
                header = read_header(record)
            except RecordError as error:
                faults.append(f"memory: {name.hex()}: {error}")
                continue
            if header.address.name != name or not same_record(header.address, address):
                faults.append(f"memory: {name.hex()} holds the record of another address")
        return faults

    def close(self) -> bool:
        with self._lock:
            self._closed = True
            self._records.clear()
            self._used_bytes = 0
        return True

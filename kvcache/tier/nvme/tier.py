"""The NVMe tier: the contract of a tier over a store, on a bounded number of threads of its own.

Each block of a ticket is a job; the most urgent one runs next. Nothing here touches a file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from kvcache.block.address import Address
from kvcache.errors import ClosedError, ConfigError
from kvcache.port import Port
from kvcache.tier.nvme.audit import audit
from kvcache.tier.nvme.queue import Job, Queue
from kvcache.tier.nvme.space import FIXED_BYTES, Space
from kvcache.tier.nvme.store import Durability, Result, Store
from kvcache.tier.tier import WAITING, Op, Outcome, Segments, Ticket, Usage, Waits, check_segments

_LEAST_BYTES = 2 * FIXED_BYTES
_FLUSH_BYTES = 64 << 20
_FLUSH_S = 0.5
_FLUSH_PAUSE_S = 1.0  # after a flush that failed


class NvmeTier(Waits):
    """Records in a directory of a local drive, there again after a restart.

    `durability` says when written data is made safe against a power cut (a killed process loses nothing that said
    DONE in any of them): `block`, before a write says DONE; `batch`, when no job waits, at the latest with the first
    write after 64 MiB or half a second, and by `sync`; `none`, whenever the system does it. Whatever a power cut takes
    is a miss.

    StoreError where the directory cannot be used: see `kvcache/tier/nvme/directory.py` and `journal.py`.
    """

    name = "nvme"
    durable = True

    def __init__(
        self,
        path: str,
        *,
        capacity_bytes: int,
        segment_bytes: int = 256 << 20,
        durability: Durability = "batch",
        threads: int = 4,
        queue_bytes: int = 256 << 20,
        free_floor_bytes: int = 1 << 30,
        port: Port | None = None,
    ) -> None:
        if capacity_bytes < _LEAST_BYTES:
            raise ConfigError(f"nvme.capacity_bytes = {capacity_bytes}: expected at least {_LEAST_BYTES}")
        if durability not in get_args(Durability):
            raise ConfigError(f"nvme.durability = {durability!r}: expected one of {', '.join(get_args(Durability))}")
        for setting, value in (("segment_bytes", segment_bytes), ("threads", threads), ("queue_bytes", queue_bytes)):
            if value < 1:
                raise ConfigError(f"nvme.{setting} = {value}: expected at least 1")
        port = port or Port()
        self._clock = port.clock
        self._store = Store(
            path,
            space=Space(capacity_bytes, segment_bytes),
            durability=durability,
            floor_bytes=free_floor_bytes,
            port=port,
        )
        self._queue = Queue(queue_bytes)
        self._lock = threading.Lock()  # of the queue
        self._tending = threading.Lock()
        self._executor = port.executor(threads, self.name)
        self._flush_after = 0.0
        self._closed = False

    def submit(
        self,
        op: Op,
        addresses: Sequence[Address],
        segments: Sequence[Segments] = (),
        *,
        priority: int = WAITING,
        deadline: float | None = None,
        on_outcome: Callable[[int, Outcome], None] | None = None,
    ) -> Ticket:
        """`contains` is answered from memory before this returns; everything else has a thread to wait for."""
        if self._closed:
            raise ClosedError("nvme tier: it was closed")
        check_segments(op, addresses, segments)
        ticket = Ticket(len(addresses), on_outcome)
        for i, address in enumerate(addresses):
            pieces = segments[i] if segments else ()
            job = Job(op, address, pieces, ticket, i, deadline, sum(map(len, pieces)) if op == "write" else 0)
            if deadline is not None and deadline < self._clock.now():
                self._end(job, (Outcome.LATE, ""))
            elif op == "contains":
                self._end(job, self._store.contains(address))
            else:
                self._start(job, priority)
        return ticket

    def _start(self, job: Job, priority: int) -> None:
        with self._lock:
            late = list(self._queue.expired(self._clock.now()))
            taken = self._queue.push(job, priority)
        for other in late:
            self._end(other, (Outcome.LATE, ""))
        if not taken:
            self._end(job, (Outcome.DROPPED, ""))
            return
        try:
            self._executor.submit(self._run)
        except RuntimeError as error:  # closed meanwhile
            raise ClosedError("nvme tier: it was closed") from error

    def _run(self) -> None:
        """Run the most urgent job: one call for each that was queued."""
        with self._lock:
            late = list(self._queue.expired(self._clock.now()))
            job = self._queue.pop()
        for other in late:
            self._end(other, (Outcome.LATE, ""))
        if job is None:
            return
        try:
            result = self._do(job)
        except Exception as error:  # noqa: BLE001  what was submitted ends, whatever happened
            self._store.counters.add("faults")
            result = Outcome.FAILED, repr(error)
        with self._lock:
            self._queue.end(job)
        self._end(job, result)
        self._tend()

    def _do(self, job: Job) -> Result:
        if job.ticket.cancelled:
            return Outcome.CANCELLED, ""
        if job.op == "read":
            return self._store.read(job.address, job.segments)
        if job.op == "write":
            return self._store.write(job.address, job.segments)
        return self._store.remove(job.address)

    def _end(self, job: Job, result: Result) -> None:
        self._store.counters.add(f"{job.op}_{result[0].value}")
        job.ticket.settle(job.i, *result)

    def _tend(self) -> None:
        """Flush and compact where it is time, on one thread at most."""
        while self._flush_due() or self._store.ledger.overdue:
            if not self._tending.acquire(blocking=False):
                return
            try:
                if self._flush_due() and not self._store.sync():
                    self._flush_after = self._clock.now() + _FLUSH_PAUSE_S
                if self._store.ledger.overdue:
                    self._store.ledger.compact()
            finally:
                self._tending.release()

    def _flush_due(self) -> bool:
        ledger = self._store.ledger
        if self._store.durability != "batch" or not ledger.dirty_bytes:
            return False
        now = self._clock.now()
        if now < self._flush_after:
            return False
        return not len(self._queue) or ledger.dirty_bytes >= _FLUSH_BYTES or now - ledger.dirty_since >= _FLUSH_S

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the tier was opened, by name."""
        return self._store.counters.snapshot()

    def room(self, record_bytes: int) -> int:
        return self._store.ledger.room(record_bytes)

    def siblings(self, address: Address) -> list[Address]:
        """The records of the same segment, this one included."""
        return self._store.addresses_beside(address)

    def scan(self) -> Iterator[Address]:
        """All records, each behind its parent where that is here too."""
        with self._store.ledger.memory:
            return self._store.ledger.index.scan()

    def sync(self) -> None:
        self._store.sync()

    def usage(self) -> Usage:
        ledger = self._store.ledger
        with ledger.memory:
            return Usage(len(ledger.index.places), ledger.space.used_bytes(), ledger.space.capacity_bytes)

    def check(self) -> list[str]:
        return audit(self._store.ledger)

    def close(self) -> None:
        """Run what was submitted, make it durable, let go of the directory. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._executor.close()
        self._store.close()

"""The Redis tier: the contract of a tier over a server that others use as well.

Its room is the server's: `maxmemory` and the server's eviction decide what stays, and a value that went is a miss.
Nothing is remembered here of what is there. Threads are bounded and have one connection each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from kvcache.block.address import Address
from kvcache.block.record import CHUNK_BYTES
from kvcache.errors import ClosedError, ConfigError
from kvcache.port import Port
from kvcache.tier.breaker import Breaker
from kvcache.tier.counters import Counters
from kvcache.tier.queue import Batch, Queue
from kvcache.tier.redis.endpoint import Endpoint
from kvcache.tier.redis.name import Names
from kvcache.tier.redis.piece import IN_FLIGHT_BYTES
from kvcache.tier.redis.pool import Pool, log, reason
from kvcache.tier.redis.store import Store
from kvcache.tier.redis.survey import Survey
from kvcache.tier.redis.wire import Wire
from kvcache.tier.ticket import TimedTicket
from kvcache.tier.tier import WAITING, Op, Outcome, Segments, Ticket, Usage, Waits, check_segments

_CLOSE_S = 2.0  # how long closing waits for what is under way before it cuts the connections
_MOST_LOOKUPS = 64


class RedisTier(Waits):
    """Records in a Redis or Valkey server (6.2 or newer), under keys that begin with `prefix`.

    `part_bytes`: a longer payload is split; a multiple of 256 KiB, 16 MiB at most. `expire_s`: after so long a record
    goes, 0 for never; the parts of a long one go after `part_expire_s` in any case. `timeout_s`: what a call without a
    deadline of its own may take, and the most that any may.

    Opening asks nothing of the server: one that is away is a miss until it is there.
    """

    name = "redis"
    durable = shared = True

    def __init__(
        self,
        url: str,
        *,
        username: str = "",
        password_file: str = "",
        prefix: str = "kvcache",
        part_bytes: int = 4 << 20,
        expire_s: float = 0,
        part_expire_s: float = 86_400,
        connections: int = 4,
        queue_bytes: int = 256 << 20,
        timeout_s: float = 5.0,
        port: Port | None = None,
    ) -> None:
        if part_bytes % CHUNK_BYTES or not 0 < part_bytes <= IN_FLIGHT_BYTES:
            raise ConfigError(f"redis.part_bytes = {part_bytes}: expected a multiple of 256 KiB, 16 MiB at most")
        for setting, value, least in (
            ("connections", connections, 1),
            ("queue_bytes", queue_bytes, 1),
            ("timeout_s", timeout_s, 0.001),
            ("expire_s", expire_s, 0),
            ("part_expire_s", part_expire_s, 1),
        ):
            if value < least:
                raise ConfigError(f"redis.{setting} = {value}: expected at least {least}")
        self._port = port or Port()
        self._endpoint = Endpoint(url, username=username, password_file=password_file)
        self._counters = Counters()
        self._pool = Pool(self._endpoint, self._port.clock, self._counters, timeout_s=timeout_s)
        self._shut = Breaker(self._port.clock, pause_s=0.25, most_s=10.0)
        names = Names(prefix)
        self._store = Store(
            names,
            self._counters,
            self._shut,
            part_bytes=part_bytes,
            expire_ms=int(expire_s * 1000),
            part_expire_ms=int(part_expire_s * 1000),
        )
        self._survey = Survey(names, self._store)
        self._threads = connections
        self._queue = Queue(connections, queue_bytes)
        self._lock = threading.Lock()  # of the queue
        self._running = 0
        self._lookups = 0
        self._idle = self._port.condition()
        self._executor = self._port.executor(connections, self.name)
        self._asking = self._port.executor(1, f"{self.name}-lookup")
        self._closed = False

    def __repr__(self) -> str:
        return f"RedisTier({self._endpoint.name!r})"

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
        if self._closed:
            raise ClosedError("redis tier: it was closed")
        check_segments(op, addresses, segments)
        ticket = TimedTicket(len(addresses), on_outcome, deadline, self.expire, self._port)
        batch = Batch(op, addresses, segments, ticket, 0, len(addresses), deadline=deadline)
        if deadline is not None and deadline < self._port.clock.now():
            self._end(batch, Outcome.LATE)
        elif addresses:
            self._start(batch, priority, deadline)
        return ticket

    def _start(self, batch: Batch, priority: int, deadline: float | None) -> None:
        self.expire()
        blocks = batch.end
        with self._lock:
            if self._closed:
                raise ClosedError("redis tier: it was closed")
            taken = self._queue.push(batch, priority, deadline)
            more = min(self._threads - self._running, len(self._queue))
            self._running += more
        if taken < blocks:
            self._end(replace(batch, first=taken, end=blocks), Outcome.DROPPED)
        for _ in range(more):
            self._executor.submit(self._work)

    def expire(self) -> None:
        """End what waited past its deadline."""
        with self._lock:
            late = list(self._queue.expired(self._port.clock.now()))
        for batch in late:
            self._end(batch, Outcome.LATE)

    def _work(self) -> None:
        """Do the most urgent piece of work until there is none that may begin."""
        while True:
            self.expire()
            with self._lock:
                piece = self._queue.pop()
                if piece is None:
                    self._running -= 1
                    break
            try:
                self._do(piece)
            except Exception as error:  # noqa: BLE001  what was submitted ends, whatever happened
                self._counters.add("defects")
                log.exception("redis tier: a defect")
                self._end(piece, Outcome.FAILED, type(error).__name__)
            with self._lock:
                self._queue.leave(piece)
        with self._idle:
            self._idle.notify_all()

    def _do(self, piece: Batch) -> None:
        if piece.ticket.cancelled:
            self._end(piece, Outcome.CANCELLED)
            return
        work = getattr(self._store, piece.op)
        settle = self._settling(piece)
        try:
            self._pool.run(lambda wire: work(wire, piece, settle), piece.deadline)
        except TimeoutError:
            self._end(piece, Outcome.LATE, "timeout")
        except OSError as error:
            self._end(piece, Outcome.FAILED, reason(error))

    def _settling(self, batch: Batch) -> Callable[[int, Outcome, str], None]:
        def settle(i: int, outcome: Outcome, check: str) -> None:
            self._counters.add(f"{batch.op}_{outcome.value}")
            if outcome is Outcome.DONE and batch.segments:
                self._counters.add(f"{batch.op}_bytes", batch.size_bytes(i))
            batch.ticket.settle(i, outcome, check)

        return settle

    def _end(self, batch: Batch, outcome: Outcome, check: str = "") -> None:
        """Settle what of a batch is not settled."""
        settle, outcomes = self._settling(batch), batch.ticket.outcomes
        for i in batch.blocks:
            if not outcomes[i].settled:
                settle(i, outcome, check)

    def leading(self, addresses: Sequence[Address], *, deadline: float | None = None) -> Future[int]:
        """How many of a chain are here, from its head: in a few round trips however long it is, since a tail is stored
        behind its head. A hole that the probes step over shows as a shorter prefix when the blocks are read. 0 where
        the server does not answer in time."""
        with self._lock:
            if self._closed:
                raise ClosedError("redis tier: it was closed")
            if self._lookups >= _MOST_LOOKUPS or not addresses:
                nothing: Future[int] = Future()
                nothing.set_result(0)
                return nothing
            self._lookups += 1
        return self._asking.submit(lambda: self._look(addresses, deadline))

    def _look(self, addresses: Sequence[Address], deadline: float | None) -> int:
        try:
            return self._ask(lambda wire: self._store.leading(wire, addresses), deadline) or 0
        finally:
            with self._lock:
                self._lookups -= 1

    def _ask(self, work: Callable[[Wire], Any], deadline: float | None = None) -> Any:
        """What the server says; None where it does not."""
        try:
            return self._pool.run(work, deadline)
        except OSError:
            return None

    @property
    def counters(self) -> dict[str, int]:
        """What happened since the tier was opened, by name."""
        return self._counters.snapshot()

    @property
    def breaker(self) -> str:
        """Of the node, `open` or `closed`. While it is open, one call in a while is tried."""
        return "open" if self._pool.breaker.is_open() else "closed"

    def room(self, record_bytes: int) -> int:
        """As the server's memory has it; where the server evicts by itself there is always room for what fits."""
        facts = self._ask(self._survey.memory)
        return facts.room(record_bytes) if facts else 0

    def siblings(self, address: Address) -> list[Address]:
        """Only itself: a server gives memory back record by record."""
        return self._ask(lambda wire: self._survey.find(wire, address)) or []

    def scan(self) -> Iterator[Address]:
        """All records of this prefix, each behind its parent where that is here too. Asks for the head of each."""
        return iter(self._ask(self._survey.scan) or [])

    def sync(self) -> bool:
        """What was acknowledged is as safe as the server makes it."""
        return True

    def usage(self) -> Usage:
        """Keys of the database, whoever wrote them; bytes of the whole server. Nothing while it does not answer."""
        facts = self._ask(self._survey.memory)
        return facts.usage() if facts else Usage(0, 0, 0)

    def check(self) -> list[str]:
        """Whether each record lies under its own key, whole in length. Reads no payload."""
        if self._closed:
            return []
        faults = self._ask(self._survey.check)
        return [f"redis {self._endpoint.name}: it does not answer"] if faults is None else faults

    def troubles(self) -> list[str]:
        ready = self._closed or self._pool.breaker.ready()
        return [] if ready else [f"redis {self._endpoint.name}: it does not answer; it is tried again by itself"]

    def close(self) -> bool:
        """Run what was submitted, for a moment; what the server leaves unanswered then fails. Idempotent."""
        with self._lock:
            if self._closed:
                return True
            self._closed = True
        with self._idle:
            idle = self._idle.wait_for(lambda: not self._running, _CLOSE_S)
        if not idle:
            with self._lock:
                left = list(self._queue.clear())
            for batch in left:
                self._end(batch, Outcome.FAILED, "closed")
        self._pool.close()
        self._executor.close()
        self._asking.close()
        return True

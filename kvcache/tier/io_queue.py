"""The queue and the worker threads that the NVMe, Redis and object tiers share.

`IOQueue` orders work by priority; then lookups before reads before removals before writes; then by arrival. A batch
waits as one and is taken in pieces, each as large as one thread should do at a time. So neighbouring blocks are read
and written together. Writers never take all of several threads: a device that hangs on writes still reads. Waiting
writes are bounded by bytes, and all work by the number of blocks.

`DeadlineTicket` reports timeouts even while every thread hangs. `QueuedTier` runs the queue on a bounded number of
threads. Every submitted block gets an outcome, whatever the device, the peer or a defect in this code does.

Thread safety: `IOQueue` has none; `QueuedTier` calls it under its lock.
"""

from __future__ import annotations

import heapq
import logging
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from kvcache.block.record import Address
from kvcache.errors import ClosedError
from kvcache.os_env import OsEnv
from kvcache.tier.tier import DEMAND, BlockingCalls, Op, Outcome, Segments, Ticket, check_segments

MAX_QUEUED_BLOCKS = 1 << 17
WORK_UNIT_BYTES = 4 << 20
WORK_UNIT_BLOCKS = 256
LOOKUP_UNIT_BLOCKS = 4096
"""Lookups in a piece: they are so cheap that dividing them costs more than it saves."""
_RANK: dict[Op, int] = {"contains": 0, "read": 1, "remove": 2, "write": 3}


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks `first` to `end` (excluded) of one ticket."""

    op: Op
    addresses: Sequence[Address]
    segments: Sequence[Segments]  # empty for lookups and removals
    ticket: Ticket
    first: int
    end: int
    unit_blocks: int = 1  # the most blocks that one thread takes
    deadline: float | None = None
    whole: bool = False  # one thread took the whole rest of the batch

    @property
    def blocks(self) -> range:
        return range(self.first, self.end)

    @property
    def block_addresses(self) -> Sequence[Address]:
        return self.addresses[self.first : self.end]

    def size_bytes(self, i: int) -> int:
        return sum(map(len, self.segments[i])) if self.segments else 0


class IOQueue:
    def __init__(
        self, threads: int, max_write_bytes: int, *, work_unit_bytes: int = WORK_UNIT_BYTES, spread: int = 0
    ) -> None:
        """Create an empty queue.

        Args:
            threads: the number of threads; writes take all but one at most.
            max_write_bytes: bound of the bytes of waiting and running writes.
            work_unit_bytes: the size of a piece.
            spread: the number of threads that share a batch too small for a piece each; 0 means all.
        """
        self._spread = spread or threads
        self._max_writers, self._max_write_bytes = max(1, threads - 1), max_write_bytes
        self._work_unit_bytes = work_unit_bytes
        self._lines: dict[tuple[int, int], deque[Batch]] = {}
        self._deadlines: list[tuple[float, int, Batch]] = []
        self._order = count()
        self._waiting = 0
        self._writers = 0
        self.write_bytes = 0  # of waiting and running writes

    def __len__(self) -> int:
        """Return the number of waiting blocks."""
        return self._waiting

    def push(self, batch: Batch, priority: int, deadline: float | None) -> int:
        """Queue a batch; return how many of its blocks, from the first, were taken.

        The batch ends before the first block that exceeds a bound. A write larger than the bound is taken if no other
        write waits or runs.
        """
        batch.end = min(batch.end, batch.first + MAX_QUEUED_BLOCKS - self._waiting)
        if batch.op == "write":
            batch.end = self._admit(batch)
        taken = batch.end - batch.first
        if taken > 0:
            blocks_per_thread = -(-taken // self._spread)
            batch.unit_blocks = (
                LOOKUP_UNIT_BLOCKS if batch.op == "contains" else min(WORK_UNIT_BLOCKS, blocks_per_thread)
            )
            self._waiting += taken
            self._lines.setdefault((priority, _RANK[batch.op]), deque()).append(batch)
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, next(self._order), batch))
        return max(0, taken)

    def _admit(self, batch: Batch) -> int:
        for i in batch.blocks:
            size = batch.size_bytes(i)
            if self.write_bytes and self.write_bytes + size > self._max_write_bytes:
                return i
            self.write_bytes += size
        return batch.end

    def pop(self, whole: Callable[[Op], bool] = lambda op: False) -> Batch | None:
        """Return the next piece of work for one thread; None where none may start. Call `finish` after it ran.

        Args:
            whole: returns whether the thread takes the whole rest of the batch, to run it in `pieces`.
        """
        for key in sorted(self._lines):
            line = self._lines[key]
            while line and line[0].first >= line[0].end:
                line.popleft()
            if not line:
                del self._lines[key]
            elif key[1] != _RANK["write"] or self.try_start_write():
                return self._take_unit(line[0], whole=whole(line[0].op))
        return None

    def _take_unit(self, batch: Batch, *, whole: bool) -> Batch:
        piece = replace(batch, end=batch.end if whole else self._piece_end(batch), whole=whole)
        batch.first = piece.end
        self._waiting -= piece.end - piece.first
        return piece

    def _piece_end(self, batch: Batch) -> int:
        """Return the end of the first piece of a batch: a thread's share, or as much of it as one piece holds."""
        most = min(batch.end, batch.first + batch.unit_blocks)
        end, size = batch.first + 1, batch.size_bytes(batch.first)
        while end < most and size + (more := batch.size_bytes(end)) <= self._work_unit_bytes:
            end, size = end + 1, size + more
        return end

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """Yield the work of a thread as the pieces that several threads would take."""
        while batch.whole and (end := self._piece_end(batch)) < batch.end:
            yield replace(batch, end=end)
            batch = replace(batch, first=end)
        yield batch

    def finish(self, piece: Batch) -> None:
        if piece.op == "write":
            self.finish_write()
            self._forget(piece)

    def try_start_write(self) -> bool:
        """Count one more writer if the limit allows; call `finish_write` at its end."""
        if self._writers >= self._max_writers:
            return False
        self._writers += 1
        return True

    def finish_write(self) -> None:
        self._writers -= 1

    def _forget(self, batch: Batch) -> None:
        self.write_bytes -= sum(map(batch.size_bytes, batch.blocks)) if batch.op == "write" else 0

    def expired(self, now: float) -> Iterator[Batch]:
        """Remove and yield the batches whose deadline passed while they waited."""
        while self._deadlines and self._deadlines[0][0] < now:
            batch = heapq.heappop(self._deadlines)[2]
            if batch.first < batch.end:
                late = replace(batch)
                batch.first = batch.end
                self._waiting -= late.end - late.first
                self._forget(late)
                yield late
        if len(self._deadlines) > 2 * self._waiting + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].first < entry[2].end]
            heapq.heapify(self._deadlines)

    def clear(self) -> Iterator[Batch]:
        """Remove and yield all waiting batches."""
        for line in self._lines.values():
            for batch in line:
                if batch.first < batch.end:
                    self._waiting -= batch.end - batch.first
                    self._forget(batch)
                    yield batch
        self._lines.clear()


# A ticket that checks its deadline when it is read, so TIMED_OUT appears even while every thread hangs.


class DeadlineTicket(Ticket):
    def __init__(
        self,
        count: int,
        on_outcome: Callable[[int, Outcome], None] | None,
        deadline: float | None,
        expire: Callable[[], None],
        os_env: OsEnv,
    ) -> None:
        """`expire` times out all waiting work past its deadline, this ticket's blocks included."""
        super().__init__(count, on_outcome)
        self._changed = os_env.condition()
        self._deadline, self._expire, self._clock = deadline, expire, os_env.clock

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        self._check_deadline()
        return super().outcomes

    @property
    def done(self) -> bool:
        self._check_deadline()
        return super().done

    def _check_deadline(self) -> None:
        if self._deadline is not None and self._unsettled and self._clock.now() > self._deadline:
            self._expire()

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._deadline is None:
            return super().wait(timeout_s)
        self._check_deadline()
        first = max(0.0, self._deadline - self._clock.now())
        if timeout_s is not None and timeout_s <= first:
            return super().wait(timeout_s)
        if super().wait(first):
            return True
        self._expire()  # the remaining blocks have started, and end when the device answers
        return super().wait(None if timeout_s is None else timeout_s - first)


# The worker threads.


class QueuedTier(BlockingCalls, ABC):
    """Base class of a tier whose calls wait for threads of a bounded pool.

    A subclass defines `_execute`, `_settle_rest` and `_count_defect`, and overrides other hooks where needed.
    """

    name: str

    def __init__(
        self,
        *,
        threads: int,
        queue_bytes: int,
        os_env: OsEnv | None,
        log: logging.Logger | logging.LoggerAdapter[logging.Logger],
        work_unit_bytes: int = WORK_UNIT_BYTES,
        spread: int = 0,
    ) -> None:
        self._os_env = os_env or OsEnv()
        self._log, self._threads = log, threads
        self._queue = IOQueue(threads, queue_bytes, work_unit_bytes=work_unit_bytes, spread=spread)
        self._lock = threading.Lock()  # guards the queue
        self._running = 0  # threads that work or are about to start
        self._writing: dict[object, float] = {}  # running writes, with their start times
        self._idle = self._os_env.condition()
        self._executor = self._os_env.executor(threads, self.name)
        self._closed = False

    @abstractmethod
    def _execute(self, piece: Batch) -> None:
        """Do the work of a piece that was not cancelled, and settle all its blocks."""

    @abstractmethod
    def _settle_rest(self, batch: Batch, outcome: Outcome, check: str = "") -> None:
        """Settle the blocks of a batch that are still pending."""

    @abstractmethod
    def _count_defect(self) -> None:
        """Count an error in this code."""

    def _complete_inline(self, batch: Batch) -> bool:
        """Settle the call here if it needs no thread; return whether it did."""
        return False

    def _failing(self, op: Op) -> bool:
        """Return whether a breaker is open for calls of this kind.

        One thread then does the whole batch, piece by piece. The first piece is the breaker's probe. Other threads
        would find the breaker open while the probe runs, and the rest of the batch would be lost.
        """
        return False

    def _maintain(self) -> None:
        """Hook: called by a worker after each piece."""

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
        if self._closed:
            raise ClosedError(f"{self.name} tier: it was closed")
        check_segments(op, addresses, segments)
        ticket = DeadlineTicket(len(addresses), on_outcome, deadline, self.expire, self._os_env)
        batch = Batch(op, addresses, segments, ticket, 0, len(addresses), deadline=deadline)
        if deadline is not None and deadline < self._os_env.clock.now():
            self._settle_rest(batch, Outcome.TIMED_OUT)
        elif addresses and not self._complete_inline(batch):
            self._start(batch, priority, deadline)
        return ticket

    def _start(self, batch: Batch, priority: int, deadline: float | None) -> None:
        self.expire()
        blocks = batch.end
        with self._lock:
            if self._closed:
                raise ClosedError(f"{self.name} tier: it was closed")
            taken = self._queue.push(batch, priority, deadline)
        if taken < blocks:
            self._settle_rest(replace(batch, first=taken, end=blocks), Outcome.DROPPED)
        self._start_workers()

    def _start_workers(self) -> None:
        """Start as many threads as there is work for."""
        with self._lock:
            more = min(self._threads - self._running, len(self._queue))
            self._running += more
        for _ in range(more):
            self._executor.submit(self._work)

    def expire(self) -> None:
        """Time out waiting work past its deadline."""
        with self._lock:
            late = list(self._queue.expired(self._os_env.clock.now()))
        for batch in late:
            self._settle_rest(batch, Outcome.TIMED_OUT)

    def _work(self) -> None:
        """Do the most urgent piece of work until none may start."""
        while True:
            self.expire()
            with self._lock:
                piece = self._queue.pop(self._failing)
                if piece is None:
                    self._running -= 1
                    break
                if piece.op == "write":
                    self._writing[piece] = self._os_env.clock.now()
            try:
                for part in self._queue.pieces(piece):
                    if part.first > piece.first and part.op == "write":
                        self._writing[piece] = self._os_env.clock.now()  # the previous piece did not hang
                    if part.ticket.cancelled:
                        self._settle_rest(part, Outcome.CANCELLED)
                    else:
                        self._execute(part)
            except Exception as error:  # noqa: BLE001  worker thread that must survive
                self._count_defect()
                self._log.exception("%s tier: unexpected error", self.name)
                self._settle_rest(piece, Outcome.FAILED, type(error).__name__)
            with self._lock:
                self._writing.pop(piece, None)
                self._queue.finish(piece)
            self._maintain()
        with self._idle:
            self._idle.notify_all()

    def _drain(self, patience_s: float) -> bool:
        """Wait until the running and queued work has ended; False after `patience_s`."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, patience_s)

    def _fail_queued(self, check: str) -> None:
        """Fail all waiting work."""
        with self._lock:
            queued = list(self._queue.clear())
        for batch in queued:
            self._settle_rest(batch, Outcome.FAILED, check)

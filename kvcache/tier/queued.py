"""A tier whose calls wait in a queue for threads of its own: what NVMe, Redis and object stores have in common.

What was asked for together is done in pieces, the most urgent one next, on a bounded number of threads. What is
submitted ends, whatever the device, the peer or a defect of ours does to it.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace

from kvcache.block.record import Address
from kvcache.errors import ClosedError
from kvcache.os_env import Port
from kvcache.tier.queue import PIECE_BYTES, Batch, Queue
from kvcache.tier.ticket import TimedTicket
from kvcache.tier.tier import WAITING, Op, Outcome, Segments, Ticket, Waits, check_segments


class QueuedTier(Waits, ABC):
    """To inherit. What a tier says for itself: `_do`, `_end` and, where something is special, the other hooks."""

    name: str

    def __init__(
        self,
        *,
        threads: int,
        queue_bytes: int,
        port: Port | None,
        log: logging.Logger | logging.LoggerAdapter[logging.Logger],
        piece_bytes: int = PIECE_BYTES,
        spread: int = 0,
    ) -> None:
        self._port = port or Port()
        self._log, self._threads = log, threads
        self._queue = Queue(threads, queue_bytes, piece_bytes=piece_bytes, spread=spread)
        self._lock = threading.Lock()  # of the queue
        self._running = 0  # threads at work or asked for
        self._writing: dict[object, float] = {}  # since when
        self._idle = self._port.condition()
        self._executor = self._port.executor(threads, self.name)
        self._closed = False

    @abstractmethod
    def _do(self, piece: Batch) -> None:
        """Do the work of a piece that is wanted, and settle all of it."""

    @abstractmethod
    def _end(self, batch: Batch, outcome: Outcome, check: str = "") -> None:
        """Settle what of a batch is not settled."""

    @abstractmethod
    def _defect(self) -> None:
        """Count an error of ours."""

    def _at_once(self, batch: Batch) -> bool:
        """Whether this call needs no thread: it was settled here."""
        return False

    def _failing(self, op: Op) -> bool:
        """Whether a breaker is open for calls of this kind.

        One thread then does the whole batch, piece by piece. The first piece is the breaker's probe. Other threads
        would find the breaker open while the probe runs, and the rest of the batch would be lost.
        """
        return False

    def _tend(self) -> None:
        """What a thread does besides, after each piece."""

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
            raise ClosedError(f"{self.name} tier: it was closed")
        check_segments(op, addresses, segments)
        ticket = TimedTicket(len(addresses), on_outcome, deadline, self.expire, self._port)
        batch = Batch(op, addresses, segments, ticket, 0, len(addresses), deadline=deadline)
        if deadline is not None and deadline < self._port.clock.now():
            self._end(batch, Outcome.LATE)
        elif addresses and not self._at_once(batch):
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
            self._end(replace(batch, first=taken, end=blocks), Outcome.DROPPED)
        self._hire()

    def _hire(self) -> None:
        """Put as many threads to work as there is work for."""
        with self._lock:
            more = min(self._threads - self._running, len(self._queue))
            self._running += more
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
                piece = self._queue.pop(self._failing)
                if piece is None:
                    self._running -= 1
                    break
                if piece.op == "write":
                    self._writing[piece] = self._port.clock.now()
            try:
                for part in self._queue.pieces(piece):
                    if part.first > piece.first and part.op == "write":
                        self._writing[piece] = self._port.clock.now()  # the piece before it did not hang
                    if part.ticket.cancelled:
                        self._end(part, Outcome.CANCELLED)
                    else:
                        self._do(part)
            except Exception as error:  # noqa: BLE001  what was submitted ends, whatever happened
                self._defect()
                self._log.exception("%s tier: a defect", self.name)
                self._end(piece, Outcome.FAILED, type(error).__name__)
            with self._lock:
                self._writing.pop(piece, None)
                self._queue.leave(piece)
            self._tend()
        with self._idle:
            self._idle.notify_all()

    def _stop(self, patience_s: float) -> bool:
        """Take no more, and let what was submitted end; whether it did in time."""
        with self._idle:
            return self._idle.wait_for(lambda: not self._running, patience_s)

    def _give_up(self, check: str) -> None:
        """End all that waits."""
        with self._lock:
            left = list(self._queue.clear())
        for batch in left:
            self._end(batch, Outcome.FAILED, check)

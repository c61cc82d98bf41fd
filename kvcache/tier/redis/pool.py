"""The connections to one server, and whether to try it at all.

A server that does not answer, or answers that it cannot serve now, opens the breaker: from then on nothing waits for it
until a probe finds it well. A connection that proves dead before anything came back is replaced once, so a restart of
the server costs a caller nothing but the time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import TypeVar

from kvcache.log import logger
from kvcache.os_env import Clock
from kvcache.tier.breaker import CircuitBreaker, Counters
from kvcache.tier.redis.connect import Endpoint, RefusedError, SentinelEndpoint
from kvcache.tier.redis.wire import RespConnection

T = TypeVar("T")

REDIRECT_REPLIES = {"ASK", "MOVED", "TRYAGAIN"}
"""Refusals of a server that is well, but not the one for this key."""
FAILURE_REPLIES = {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOAUTH", "NOPERM", "WRONGPASS", *REDIRECT_REPLIES}
"""Refusals of a server that would refuse the next call as well."""

_MIN_FAIR_TIMEOUT_S = 0.02  # a call given less than this says nothing of the server by being late
_LOG_INTERVAL_S = 5.0
_MASTER_CHECK_S = 1.0

log = logger("kvcache.tier.redis")


class ConnectionPool:
    def __init__(
        self,
        endpoint: Endpoint | SentinelEndpoint,
        clock: Clock,
        counters: Counters,
        *,
        timeout_s: float,
        failure_replies: Collection[str] = FAILURE_REPLIES,
        replaced: Collection[str] = (),
    ) -> None:
        """`unfit`: refusals that count as a failure of the server. `replaced`: those by which a server tells that
        another one has taken its place, so that connections to it are of no use."""
        self._endpoint, self._clock, self._timeout_s = endpoint, clock, timeout_s
        self._failure_replies, self._replaced_replies = failure_replies, replaced
        self.name = endpoint.name
        self.host = endpoint.host if isinstance(endpoint, Endpoint) else ""
        self._counters = counters
        self.breaker = CircuitBreaker(clock, pause_s=0.25, max_pause_s=10.0)
        self._idle: list[RespConnection] = []
        self._tracking_idle: list[RespConnection] = []  # idle, for lookups: the server tells on them what changes
        self._master_checked_s = clock.now()
        self._busy: set[RespConnection] = set()
        self._old: set[RespConnection] = set()  # of these, those to close when they come back
        self._lock = threading.Lock()
        self._closed = False
        self._logged_s = float("-inf")
        self._unlogged_faults = 0

    def run(
        self,
        work: Callable[[RespConnection], T],
        deadline: float | None,
        *,
        listening: bool = False,
        asking: bool = False,
    ) -> T:
        """What `work` returns. OSError where there was no server to do it: TimeoutError for time, RefusedError with a
        reason, or what the system said. `listening`: over a wire on which the server tells what changes. `asking`: for
        keys that are on their way to this server."""
        if not self.breaker.allows():
            raise RefusedError("breaker")
        began = self._clock.now()
        limit = began + self._timeout_s if deadline is None else min(deadline, began + self._timeout_s)
        fresh = False
        while True:
            wire = None
            try:
                self._follow(began, limit)
                wire = self._take(limit, listening=listening, fresh=fresh)
                wire.set_deadline(limit - self._clock.now())
                wire.wrong, wire.asking = "", asking
                received = wire.received
                result = work(wire)
            except OSError as error:
                self._drop(wire)
                untouched = wire is not None and received and wire.received == received
                if untouched and not fresh and not isinstance(error, TimeoutError) and not self._closed:
                    fresh = True
                    continue
                if not (isinstance(error, TimeoutError) and limit - began < _MIN_FAIR_TIMEOUT_S):
                    self._failed(reason(error))
                raise
            except BaseException:
                self._drop(wire)
                raise
            if wire.wrong in self._failure_replies:
                self._failed(wire.wrong)
            else:
                self.breaker.record_success()
            if wire.wrong in self._replaced_replies:
                self._counters.add("replaced")
                self._drop(wire)
                self._retire_all()
            else:
                self._return(wire, self._tracking_idle if listening else self._idle)
            return result

    def _follow(self, now: float, limit: float) -> None:
        """Once in a while, whether the master is still the master: one that was replaced does not know it at once."""
        if isinstance(self._endpoint, SentinelEndpoint) and now - self._master_checked_s > _MASTER_CHECK_S:
            self._master_checked_s = now
            if self._endpoint.master_changed((limit - now) / 2):
                self._counters.add("replaced")
                self._retire_all()

    def _take(self, limit: float, *, listening: bool, fresh: bool) -> RespConnection:
        while (wire := self._pop(self._tracking_idle if listening else self._idle)) is not None:
            if not fresh and (listening or not wire.is_stale()):  # the others are as old as the one that proved dead
                return wire
            self._drop(wire)
        remaining_s = limit - self._clock.now()
        if remaining_s <= 0:
            raise TimeoutError("connect")
        wire = RespConnection(*self._endpoint.connect(remaining_s, protocol=3 if listening else 2), self._clock)
        self._counters.add("connects")
        with self._lock:
            self._busy.add(wire)
        if listening:
            try:
                wire.set_deadline(limit - self._clock.now())
                wire.enable_tracking()
            except OSError:
                self._drop(wire)
                raise
        return wire

    def _pop(self, idle: list[RespConnection]) -> RespConnection | None:
        with self._lock:
            if self._closed:
                raise RefusedError("closed")
            wire = idle.pop() if idle else None
            if wire is not None:
                self._busy.add(wire)
            return wire

    def _return(self, wire: RespConnection, idle: list[RespConnection]) -> None:
        with self._lock:
            self._busy.discard(wire)
            keep = not self._closed and wire not in self._old
            self._old.discard(wire)
            if keep:
                idle.append(wire)
        if not keep:
            wire.close()

    def _drop(self, wire: RespConnection | None) -> None:
        if wire is not None:
            with self._lock:
                self._busy.discard(wire)
                self._old.discard(wire)
            wire.close()

    def _failed(self, why: str) -> None:
        self._counters.add("faults")
        self._counters.add(f"faults_{why}")
        if self.breaker.record_failure():
            self._counters.add("breaker_opened")
        self.log_fault(why)

    def log_fault(self, why: str) -> None:
        """One line at most every few seconds, whatever happens meanwhile."""
        now = self._clock.now()
        with self._lock:
            self._unlogged_faults += 1
            if now - self._logged_s < _LOG_INTERVAL_S:
                return
            times, self._unlogged_faults, self._logged_s = self._unlogged_faults, 0, now
        log.warning("redis %s: %s; %d faults since the last line", self._endpoint.name, why, times)

    def close(self) -> None:
        """Close what is idle and wake whoever waits for an answer; their wires close as they come back."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self._retire_all()
        for wire in busy:
            wire.abort()

    def _retire_all(self) -> None:
        """Close what is idle, and what is busy when it comes back."""
        with self._lock:
            self._old |= self._busy
            idle = [*self._idle, *self._tracking_idle]
            self._idle.clear()
            self._tracking_idle.clear()
        for wire in idle:
            wire.close()


def reason(error: OSError) -> str:
    """A word for counters, outcomes and the log."""
    if isinstance(error, RefusedError):
        return error.reason
    return "timeout" if isinstance(error, TimeoutError) else type(error).__name__

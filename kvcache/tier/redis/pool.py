"""The connections to one server, and its breaker.

A server that does not answer, or that refuses every call, opens the breaker. Calls then fail at once until a probe
succeeds. A call retries once on a new connection when its old one fails before any byte of a reply. A restart of the
server therefore costs a caller time, but no failure.
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
"""Refusals of a healthy server that does not own this key."""
FAILURE_REPLIES = {"BUSY", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "NOAUTH", "NOPERM", "WRONGPASS", *REDIRECT_REPLIES}
"""Refusals of a server that would also refuse the next call."""

_MIN_FAIR_TIMEOUT_S = 0.02  # a call with less time than this is no evidence against the server when it times out
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
        """Create a pool without connections.

        Args:
            timeout_s: Time of a call without a deadline, and the most of a call with one.
            failure_replies: Refusals that count as a failure of the server.
            replaced: Refusals by which a server shows that it is no longer the master; its connections are closed.
        """
        self._endpoint, self._clock, self._timeout_s = endpoint, clock, timeout_s
        self._failure_replies, self._replaced_replies = failure_replies, replaced
        self.name = endpoint.name
        self.host = endpoint.host if isinstance(endpoint, Endpoint) else ""
        self._counters = counters
        self.breaker = CircuitBreaker(clock, pause_s=0.25, max_pause_s=10.0)
        self._idle: list[RespConnection] = []
        self._tracking_idle: list[RespConnection] = []  # idle, for lookups: with client tracking
        self._master_checked_s = clock.now()
        self._busy: set[RespConnection] = set()
        self._old: set[RespConnection] = set()  # the busy ones to close when their call ends
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
        """Run `work` on a connection and return its result.

        Args:
            listening: Use a connection with client tracking.
            asking: The keys are migrating to this server; each command follows an ASKING.

        Raises:
            OSError: The call failed: TimeoutError past the deadline, RefusedError with a reason, or the system's error.
        """
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
        """Check with the sentinels once a second whether the master changed: the old one learns of it late."""
        if isinstance(self._endpoint, SentinelEndpoint) and now - self._master_checked_s > _MASTER_CHECK_S:
            self._master_checked_s = now
            if self._endpoint.master_changed((limit - now) / 2):
                self._counters.add("replaced")
                self._retire_all()

    def _take(self, limit: float, *, listening: bool, fresh: bool) -> RespConnection:
        while (wire := self._pop(self._tracking_idle if listening else self._idle)) is not None:
            if not fresh and (listening or not wire.is_stale()):  # the other idle ones may be dead too
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
        """Log a fault, at most one line in 5 s; the line counts the faults since the last one."""
        now = self._clock.now()
        with self._lock:
            self._unlogged_faults += 1
            if now - self._logged_s < _LOG_INTERVAL_S:
                return
            times, self._unlogged_faults, self._logged_s = self._unlogged_faults, 0, now
        log.warning("redis %s: %s; %d faults since the last line", self._endpoint.name, why, times)

    def close(self) -> None:
        """Close idle connections and wake the threads that wait on busy ones, which close when their calls end."""
        with self._lock:
            self._closed = True
            busy = list(self._busy)
        self._retire_all()
        for wire in busy:
            wire.abort()

    def _retire_all(self) -> None:
        """Close idle connections, and mark busy ones to be closed when their calls end."""
        with self._lock:
            self._old |= self._busy
            idle = [*self._idle, *self._tracking_idle]
            self._idle.clear()
            self._tracking_idle.clear()
        for wire in idle:
            wire.close()


def reason(error: OSError) -> str:
    """Return one word for the error, for counters, outcomes and the log."""
    if isinstance(error, RefusedError):
        return error.reason
    return "timeout" if isinstance(error, TimeoutError) else type(error).__name__

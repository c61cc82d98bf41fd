"""A circuit breaker for writes to a drive or calls to a server, and counters of a tier's events.

After `errors` failures in a row the breaker opens, and no call is tried. After a pause one call is tried as a probe. It
closes the breaker or doubles the pause.
"""

from __future__ import annotations

import threading

from kvcache.os_env import Clock


class CircuitBreaker:
    def __init__(self, clock: Clock, *, errors: int = 3, pause_s: float = 1.0, max_pause_s: float = 60.0) -> None:
        self._clock, self._errors, self._first_s, self._max_pause_s = clock, errors, pause_s, max_pause_s
        self._failures = 0
        self._pause_s = pause_s
        self._open_until = 0.0
        self._probing = False
        self._lock = threading.Lock()

    def is_open(self) -> bool:
        return self._failures >= self._errors

    def ready(self) -> bool:
        """Return whether a call may be tried; changes nothing."""
        return not self.is_open() or self._clock.now() >= self._open_until

    def failing(self) -> bool:
        """Return whether the last call failed."""
        return self._failures > 0

    def allows(self) -> bool:
        """Return whether to try a call; while the breaker is open, True for one caller after each pause."""
        with self._lock:
            if not self.is_open():
                return True
            now = self._clock.now()
            if now < self._open_until:
                return False
            self._open_until = now + self._pause_s  # other callers wait for the probe's result
            self._probing = True
            return True

    def record_failure(self) -> bool:
        """Record a failed call; return whether it opened the breaker."""
        with self._lock:
            if self.is_open():
                if self._probing:  # otherwise the call began before the breaker opened and adds no information
                    self._pause_s = min(2 * self._pause_s, self._max_pause_s)
                    self._open_until = self._clock.now() + self._pause_s
                    self._probing = False
                return False
            self._failures += 1
            if not self.is_open():
                return False
            self._open_until = self._clock.now() + self._pause_s
            return True

    def record_success(self) -> None:
        with self._lock:
            self._failures = 0
            self._pause_s = self._first_s
            self._probing = False


# Event counts of a tier since it was opened.


class Counters:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1) -> int:
        """Add to a count; return the new value."""
        with self._lock:
            count = self._counts[name] = self._counts.get(name, 0) + n
            return count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

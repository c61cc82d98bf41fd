"""Stops what fails, writes to a drive or calls to a server, and tries again by itself.

After `errors` failures in a row it opens: nothing is tried. When its pause is over one call is, as a probe, which
closes it or doubles the pause."""

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
        """Whether a call may be tried; asking changes nothing."""
        return not self.is_open() or self._clock.now() >= self._open_until

    def failing(self) -> bool:
        """What was tried last failed."""
        return self._failures > 0

    def allows(self) -> bool:
        """Whether to try; while it is open, yes to one caller each time the pause is over."""
        with self._lock:
            if not self.is_open():
                return True
            now = self._clock.now()
            if now < self._open_until:
                return False
            self._open_until = now + self._pause_s  # the others wait for what this one finds
            self._probing = True
            return True

    def record_failure(self) -> bool:
        """Tell of an error; True where it opened the breaker."""
        with self._lock:
            if self.is_open():
                if self._probing:  # else it began before the breaker opened, and says nothing new
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


# What happened in a tier, counted by name since it was opened.


class Counters:
    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(self, name: str, n: int = 1) -> int:
        """The new count."""
        with self._lock:
            count = self._counts[name] = self._counts.get(name, 0) + n
            return count

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

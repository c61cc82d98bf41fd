"""How much a tenant may ask for in a second. What is beyond is answered as a miss: it waits for nobody.

A bucket holds what one second allows. What is asked for while something is in it may owe the rest, so that a transfer
larger than the bucket is let through once, and nothing after it until it is paid for.
"""

from __future__ import annotations

import threading

from kvcache.daemon.tenant import Tenant
from kvcache.os_env import Clock

FLOOD_S = 10.0
"""Of operations owed, beyond which a client is let go."""

QUOTA = "quota"
"""The reason that is said of what was beyond."""


class Bucket:
    """Not for use by several threads at once."""

    def __init__(self, rate: float | None, clock: Clock) -> None:
        """`rate`: a second; None for no limit."""
        self._clock = clock
        self.rate = rate
        self._level, self._then = rate or 0.0, clock.now()

    def level(self) -> float:
        """What is left; below zero, what is owed."""
        if self.rate is None:
            return float("inf")
        now = self._clock.now()
        self._level, self._then = min(self.rate, self._level + (now - self._then) * self.rate), now
        return self._level

    def take(self, amount: float) -> None:
        """Whatever is left."""
        self._level = self.level() - amount if self.rate is not None else 0.0

    def change(self, rate: float | None) -> None:
        """Another rate from now on; what is owed stays owed."""
        level = min(self.level(), 0.0)
        self.rate = rate
        self._level = level + (rate or 0.0)


class Meter:
    """Of one tenant, all its connections together. Thread-safe."""

    def __init__(self, tenant: Tenant, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._operations, self._bytes = Bucket(tenant.operations, clock), Bucket(tenant.bandwidth, clock)
        self.refused = 0
        """Matches, loads, stores and requests of the page that a limit turned into a miss."""
        self.moved_bytes = 0

    def change(self, tenant: Tenant) -> None:
        with self._lock:
            for bucket, rate in ((self._operations, tenant.operations), (self._bytes, tenant.bandwidth)):
                if bucket.rate != rate:
                    bucket.change(rate)

    def ask(self, *, moves: bool = False, refusable: bool = True) -> bool:
        """Take one operation from the budget; return whether it is within the limits.

        Args:
            moves: The limit of bytes applies too.
            refusable: The caller refuses the operation where this returns False. Others, such as the end of a
                request, are carried out all the same and do not count as refused.
        """
        with self._lock:
            allowed = self._operations.level() > 0 and not (moves and self._bytes.level() <= 0)
            self._operations.take(1)
            self.refused += refusable and not allowed
            return allowed

    @property
    def flooded(self) -> bool:
        with self._lock:
            return self._operations.level() < -FLOOD_S * (self._operations.rate or 0.0)

    def move(self, size: int) -> None:
        """So many bytes, which are on their way already."""
        with self._lock:
            self._bytes.take(size)
            self.moved_bytes += size

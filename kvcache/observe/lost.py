"""What became of blocks that are not there: evicted, dropped, not written. Bounded; the oldest are forgotten first.

Kept in two halves, so that remembering a thousand victims is one update of a dictionary: when the newer half is full
it becomes the older one, and what stood there is forgotten.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from kvcache.os_env import Clock

BLOCKS = 1 << 15


@dataclass(frozen=True, slots=True)
class Fate:
    """`reason` as in the table of `misses`; `why`, the detail that goes with it: the policy, or the reason of the drop,
    or the outcome of the write."""

    reason: str
    tier: str
    why: str
    clock: int  # in requests
    time: float  # seconds since 1970


class Lost:
    """By signature, which names namespace and prefix as well. Thread-safe; remembers `blocks` at least."""

    def __init__(self, clock: Clock, blocks: int = BLOCKS) -> None:
        self._clock, self._most = clock, blocks
        self._newer: dict[bytes, Fate] = {}
        self._older: dict[bytes, Fate] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._newer.keys() | self._older.keys())

    def add(self, signatures: Iterable[bytes], reason: str, *, tier: str, why: str, clock: int) -> None:
        """What left a tier because the one below never got it was lost by the write, not by the eviction."""
        fate = Fate(reason, tier, why, clock, self._clock.wall())
        with self._lock:
            if reason == "evicted":
                signatures = [s for s in signatures if not self._unwritten(s, tier)]
            self._newer.update(dict.fromkeys(signatures, fate))
            if len(self._newer) >= self._most:
                self._older, self._newer = self._newer, {}

    def _unwritten(self, signature: bytes, tier: str) -> bool:
        fate = self._find(signature)
        return fate is not None and fate.reason != "evicted" and fate.tier != tier

    def find(self, signature: bytes) -> Fate | None:
        """The last that was heard of it. Only who has looked that it is not there may ask."""
        with self._lock:
            return self._find(signature)

    def _find(self, signature: bytes) -> Fate | None:
        return self._newer.get(signature) or self._older.get(signature)

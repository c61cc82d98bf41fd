"""What happened lately, a run of blocks at a time: a bounded ring for whoever is curious.

Blocks that meet the same fate one after another are one event. Counters keep the totals; here is the order, the
request and the reason of the last few.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from kvcache.log import Work, current_work
from kvcache.os_env import Clock

Kind = Literal["stored", "loaded", "evicted", "dropped", "refused"]

KINDS: dict[Kind, str] = {
    "stored": "taken from an engine's pages into a tier",
    "loaded": "brought into an engine's pages; the tier is the one that they came from",
    "evicted": "left a tier to make room; the reason says whether a tier below has them",
    "dropped": "offered and not kept, by the reason of `drops`; or not written to a tier, by the outcome",
    "refused": "found in a tier and not given out, by the check that failed",
}

_Fate = tuple[Kind, str, bytes, Work, str]  # kind, tier, namespace, whose, reason

RUN_S = 1.0
"""A run ends after so long, so that its time still says something."""


@dataclass(frozen=True, slots=True)
class Event:
    time: float  # seconds since 1970, of the run's first block
    kind: Kind
    tier: str
    namespace: str  # the first 8 hexadecimal digits of its id
    request: str  # "" where no single request caused it
    blocks: int
    bytes: int  # 0 where the tier does not tell
    reason: str
    agent: str = ""  # that the request named
    session: str = ""


class _Run:
    """An event that may still grow: kept apart from `Event`, since a run of blocks comes one by one on hot paths."""

    __slots__ = ("blocks", "bytes", "fate", "time")

    def __init__(self, time: float, fate: _Fate, blocks: int, size: int) -> None:
        self.time, self.fate, self.blocks, self.bytes = time, fate, blocks, size

    def event(self) -> Event:
        kind, tier, namespace, (request, agent, session), reason = self.fate
        short = namespace[:4].hex()
        return Event(self.time, kind, tier, short, request, self.blocks, self.bytes, reason, agent, session)


class Events:
    """Thread-safe. The oldest leave when `capacity` is reached."""

    def __init__(self, clock: Clock, capacity: int = 1024) -> None:
        self._clock = clock
        self._ring: deque[_Run] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def add(
        self, kind: Kind, *, tier: str, namespace: bytes, blocks: int = 1, bytes: int = 0, reason: str = ""
    ) -> None:
        """Say it of the request that this thread works for."""
        if not blocks:
            return
        fate: _Fate = (kind, tier, namespace, current_work(), reason)
        now = self._clock.wall()
        with self._lock:
            last = self._ring[-1] if self._ring else None
            if last is not None and last.fate == fate and 0 <= now - last.time < RUN_S:
                last.blocks += blocks
                last.bytes += bytes
            else:
                self._ring.append(_Run(now, fate, blocks, bytes))

    def last(self, count: int | None = None, namespaces: Collection[bytes] | None = None) -> list[Event]:
        """The newest `count` of those that are left, or all of them; the oldest first. `namespaces`: of these alone."""
        with self._lock:
            runs = [run for run in self._ring if namespaces is None or run.fate[2] in namespaces]
            runs = runs if count is None else runs[max(0, len(runs) - count) :]
            return [run.event() for run in runs]

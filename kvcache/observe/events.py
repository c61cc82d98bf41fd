"""What happened lately, a run of blocks at a time: a bounded ring for whoever is curious.

Blocks that meet the same fate one after another are one event. Counters keep the totals; here is the order, the
request and the reason of the last few.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Literal

from kvcache.observe.request import current_request
from kvcache.port import Clock

Kind = Literal["stored", "loaded", "evicted", "dropped", "refused"]

KINDS: dict[Kind, str] = {
    "stored": "taken from an engine's pages into a tier",
    "loaded": "brought into an engine's pages; the tier is the one that they came from",
    "evicted": "left a tier to make room; the reason says whether a tier below has them",
    "dropped": "offered and not kept, by the reason of `drops`; or not written to a tier, by the outcome",
    "refused": "found in a tier and not given out, by the check that failed",
}

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


class Events:
    """Thread-safe. The oldest leave when `capacity` is reached."""

    def __init__(self, clock: Clock, capacity: int = 1024) -> None:
        self._clock = clock
        self._ring: deque[Event] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def add(
        self, kind: Kind, *, tier: str, namespace: bytes, blocks: int = 1, bytes: int = 0, reason: str = ""
    ) -> None:
        """Say it of the request that this thread works for."""
        if not blocks:
            return
        new = Event(
            time=self._clock.wall(),
            kind=kind,
            tier=tier,
            namespace=namespace[:4].hex(),
            request=current_request(),
            blocks=blocks,
            bytes=bytes,
            reason=reason,
        )
        with self._lock:
            last = self._ring[-1] if self._ring else None
            if last is not None and _one_run(last, new):
                self._ring[-1] = replace(last, blocks=last.blocks + blocks, bytes=last.bytes + bytes)
            else:
                self._ring.append(new)

    def last(self, count: int | None = None) -> list[Event]:
        """The newest `count` of those that are left, or all of them; the oldest first."""
        with self._lock:
            events = list(self._ring)
        return events if count is None else events[max(0, len(events) - count) :]


def _one_run(last: Event, new: Event) -> bool:
    return 0 <= new.time - last.time < RUN_S and new == replace(last, time=new.time, blocks=new.blocks, bytes=new.bytes)

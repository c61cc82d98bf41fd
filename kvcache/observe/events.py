"""Recent events of blocks, in a bounded ring, and the eviction history that explains misses.

Consecutive blocks with the same fate are one event. Counters keep the totals; the ring keeps order, request and reason
of the latest events.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from kvcache.log import RequestContext, current_request
from kvcache.os_env import Clock

EventKind = Literal["stored", "loaded", "evicted", "dropped", "refused"]

EVENT_KINDS: dict[EventKind, str] = {
    "stored": "taken from an engine's pages into a tier",
    "loaded": "loaded into an engine's pages, by source tier",
    "evicted": "evicted from a tier; the reason says whether a lower tier has them",
    "dropped": "offered to a tier and dropped, by the reason of `drops`; or not written, by outcome",
    "refused": "found in a tier and not loaded, by the check that failed",
}

_EventKey = tuple[EventKind, str, bytes, RequestContext, str]  # kind, tier, namespace, request, reason

MERGE_WINDOW_S = 1.0
"""Longest time that one event covers, so that its `time` stays meaningful."""


@dataclass(frozen=True, slots=True)
class Event:
    time: float  # of the event's first block, in seconds since 1970
    kind: EventKind
    tier: str
    namespace: str  # the first 8 hexadecimal digits of its id
    request: str  # "" where no single request caused it
    blocks: int
    bytes: int  # 0 where the tier does not report them
    reason: str
    agent: str = ""  # as the request named it
    session: str = ""


class _OpenEvent:
    """An event that may still grow. Mutable, unlike `Event`, because hot paths add blocks one by one."""

    __slots__ = ("blocks", "bytes", "fate", "time")

    def __init__(self, time: float, fate: _EventKey, blocks: int, size: int) -> None:
        self.time, self.fate, self.blocks, self.bytes = time, fate, blocks, size

    def event(self) -> Event:
        kind, tier, namespace, (request, agent, session), reason = self.fate
        short = namespace[:4].hex()
        return Event(self.time, kind, tier, short, request, self.blocks, self.bytes, reason, agent, session)


class EventLog:
    """A ring of the latest `capacity` events.

    Thread safety: any thread may call it.
    """

    def __init__(self, clock: Clock, capacity: int = 1024) -> None:
        self._clock = clock
        self._ring: deque[_OpenEvent] = deque(maxlen=capacity)
        self._lock = threading.Lock()

    def add(
        self, kind: EventKind, *, tier: str, namespace: bytes, blocks: int = 1, bytes: int = 0, reason: str = ""
    ) -> None:
        """Add blocks to the log, under the request of the calling thread's context."""
        if not blocks:
            return
        fate: _EventKey = (kind, tier, namespace, current_request(), reason)
        now = self._clock.wall()
        with self._lock:
            last = self._ring[-1] if self._ring else None
            if last is not None and last.fate == fate and 0 <= now - last.time < MERGE_WINDOW_S:
                last.blocks += blocks
                last.bytes += bytes
            else:
                self._ring.append(_OpenEvent(now, fate, blocks, bytes))

    def last(self, count: int | None = None, namespaces: Collection[bytes] | None = None) -> list[Event]:
        """Return the newest `count` events, or all, oldest first; only those of `namespaces` where given."""
        with self._lock:
            runs = [run for run in self._ring if namespaces is None or run.fate[2] in namespaces]
            runs = runs if count is None else runs[max(0, len(runs) - count) :]
            return [run.event() for run in runs]


# Eviction history: the fate of absent blocks (evicted, dropped, not written). Bounded; drops the oldest first. Two
# generations make adding a thousand victims one dictionary update. A full newer generation replaces the older one.

MIN_REMEMBERED_BLOCKS = 1 << 15


@dataclass(frozen=True, slots=True)
class BlockFate:
    """The fate of an absent block.

    `reason` is one of the table of `misses`. `why` is its detail: the policy, the reason of the drop, or the outcome of
    the write.
    """

    reason: str
    tier: str
    why: str
    clock: int  # in requests
    time: float  # seconds since 1970


class EvictionHistory:
    """The fates of at least the last `blocks` absent blocks, by signature, which covers namespace and prefix.

    Thread safety: any thread may call it.
    """

    def __init__(self, clock: Clock, blocks: int = MIN_REMEMBERED_BLOCKS) -> None:
        self._clock, self._most = clock, blocks
        self._newer: dict[bytes, BlockFate] = {}
        self._older: dict[bytes, BlockFate] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._newer.keys() | self._older.keys())

    def add(self, signatures: Iterable[bytes], reason: str, *, tier: str, why: str, clock: int) -> None:
        """Add a fate for these blocks.

        An eviction does not replace a failed write to another tier: the failed write lost the block.
        """
        fate = BlockFate(reason, tier, why, clock, self._clock.wall())
        with self._lock:
            if reason == "evicted":
                signatures = [s for s in signatures if not self._unwritten(s, tier)]
            self._newer.update(dict.fromkeys(signatures, fate))
            if len(self._newer) >= self._most:
                self._older, self._newer = self._newer, {}

    def _unwritten(self, signature: bytes, tier: str) -> bool:
        fate = self._find(signature)
        return fate is not None and fate.reason != "evicted" and fate.tier != tier

    def find(self, signature: bytes) -> BlockFate | None:
        """Return the last known fate of a block. Call it only for a block that is in no tier."""
        with self._lock:
            return self._find(signature)

    def _find(self, signature: bytes) -> BlockFate | None:
        return self._newer.get(signature) or self._older.get(signature)

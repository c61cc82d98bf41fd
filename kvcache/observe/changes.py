"""Which blocks came into a tier and which left, by signature, in that order: for routers that want to know where a
prefix is.

Nothing is kept until somebody asks for the first time, so that a cache which nobody follows pays nothing. What is kept
is bounded; who comes too late is told that something is missing, and takes what he knows for gone.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

from kvcache.block.key import SIGNATURE_BYTES
from kvcache.port import Clock

KEPT_BLOCKS = 1 << 18
"""8 MiB of signatures."""
TOLD_BLOCKS = 1 << 16
"""In one answer."""

_FREE: AbstractContextManager[object] = nullcontext()


@dataclass(frozen=True, slots=True)
class Change:
    """Blocks of one shard of one group. Of those that were stored each is the parent of the next; `parent` is the
    first's, empty where it is not known. Those that were removed come in no order."""

    kind: Literal["stored", "removed"]
    tier: str
    namespace: bytes
    group: int
    shard: tuple[int, int, int, int]  # first and end layer, first and end head
    parent: bytes
    signatures: bytes  # 32 bytes each, one behind the other

    @property
    def blocks(self) -> int:
        return len(self.signatures) // SIGNATURE_BYTES

    @property
    def each(self) -> list[bytes]:
        size = SIGNATURE_BYTES
        return [self.signatures[at : at + size] for at in range(0, len(self.signatures), size)]


@dataclass(frozen=True, slots=True)
class Told:
    """`next`: what to ask for the next time. `lost`: there were changes before these that are not kept any more; what
    was known by then may be gone."""

    next: int
    lost: bool
    changes: Sequence[Change]


class Changes:
    """Thread-safe. A number counts changes, from one that no earlier process has reached, so that a follower sees that
    the cache was started anew."""

    def __init__(self, clock: Clock, kept_blocks: int = KEPT_BLOCKS) -> None:
        self._clock, self._kept = clock, kept_blocks
        self._ring: deque[Change] = deque()
        self._first = self._blocks = 0
        self._lock = threading.RLock()
        self.on = False

    @property
    def order(self) -> AbstractContextManager[object]:
        """Held by whoever changes what is where, and tells it: so what is told comes in the order in which it was."""
        return self._lock if self.on else _FREE

    def add(self, change: Change) -> None:
        with self._lock:
            self._ring.append(change)
            self._blocks += change.blocks
            while self._blocks > self._kept and self._ring:
                self._blocks -= self._ring.popleft().blocks
                self._first += 1

    def since(self, after: int | None, namespaces: Collection[bytes]) -> Told:
        """Those of these namespaces from number `after` on, as many as go into one answer; none where it is None, which
        begins."""
        with self._lock:
            if not self.on:
                self.on, self._first = True, int(self._clock.wall() * 1e6)
            end = self._first + len(self._ring)
            if after is None:
                return Told(end, lost=False, changes=())
            lost = not self._first <= after <= end
            at = self._first if lost else after
            found: list[Change] = []
            blocks = 0
            for change in list(self._ring)[at - self._first :]:
                if blocks >= TOLD_BLOCKS:
                    break
                at += 1
                if change.namespace in namespaces:
                    found.append(change)
                    blocks += change.blocks
            return Told(at, lost, found)

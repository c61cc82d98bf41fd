"""Blocks stored in and removed from tiers, by signature and in order, for routers that track where a prefix is.

Recording begins with the first call of `since`, so a cache without followers pays nothing. The log is bounded. A
follower that is too late learns that events are missing and must discard its state. Each tenant's events are kept and
numbered separately, so that a number reveals nothing about other tenants. Where the log is full, the oldest events of
the tenant with the most blocks are dropped.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain, islice, takewhile
from typing import Literal

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.os_env import Clock

MAX_KEPT_BLOCKS = 1 << 18
"""8 MiB of signatures."""
MAX_BATCH_BLOCKS = 1 << 16
"""In one batch."""

_UNLOCKED: AbstractContextManager[object] = nullcontext()


@dataclass(frozen=True, slots=True)
class KVEvent:
    """Blocks of one shard of one group.

    Stored blocks are in chain order, each the parent of the next; `parent` is the first's, empty if unknown. Removed
    blocks are in no order.
    """

    kind: Literal["stored", "removed"]
    tier: str
    namespace: bytes
    group: int
    shard: tuple[int, int, int, int]  # first and end layer, first and end head
    parent: bytes
    signatures: bytes  # 32 bytes each, concatenated

    @property
    def blocks(self) -> int:
        return len(self.signatures) // SIGNATURE_BYTES

    @property
    def each(self) -> list[bytes]:
        size = SIGNATURE_BYTES
        return [self.signatures[at : at + size] for at in range(0, len(self.signatures), size)]


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events for a follower.

    `next`: the number for the next call. `lost`: earlier events were dropped, so the follower's state may be out of
    date.
    """

    next: int
    lost: bool
    kv_events: Sequence[KVEvent]


class _TenantEvents:
    """Events of one tenant, each with its number in the whole log; its position gives its number within the tenant."""

    def __init__(self, first: int) -> None:
        self.first, self.blocks = first, 0
        self.rows: deque[tuple[int, KVEvent]] = deque()

    @property
    def end(self) -> int:
        return self.first + len(self.rows)

    def add(self, number: int, event: KVEvent) -> None:
        self.rows.append((number, event))
        self.blocks += event.blocks

    def drop(self) -> int:
        """Drop the oldest event; its number in the whole log."""
        number, event = self.rows.popleft()
        self.blocks -= event.blocks
        self.first += 1
        return number


class KVEvents:
    """The event log. Numbers start higher than those of any earlier process, so that a follower notices a restart.

    Thread safety: any thread.
    """

    def __init__(
        self,
        clock: Clock,
        tenant_of: Callable[[bytes], str] = lambda namespace: "",
        kept_blocks: int = MAX_KEPT_BLOCKS,
    ) -> None:
        """`tenant_of` returns the tenant of a namespace."""
        self._clock, self._kept = clock, kept_blocks
        self._rings: dict[str, _TenantEvents] = {}
        self._began = self._end = self._dropped_until = self._blocks = 0
        self._lock = threading.RLock()
        self.on = False
        self._tenant_of = tenant_of

    @property
    def order(self) -> AbstractContextManager[object]:
        """Held while a tier's contents change and the event is added, so that events are in the order of changes."""
        return self._lock if self.on else _UNLOCKED

    def add(self, event: KVEvent) -> None:
        with self._lock:
            self._ring(self._tenant_of(event.namespace)).add(self._end, event)
            self._end += 1
            self._blocks += event.blocks
            while self._blocks > self._kept:
                largest = max(self._rings.values(), key=lambda ring: ring.blocks)
                self._blocks -= largest.rows[0][1].blocks
                self._dropped_until = max(self._dropped_until, largest.drop() + 1)

    def since(self, after: int | None, namespaces: Collection[bytes], tenant: str | None = None) -> EventBatch:
        """Events of these namespaces from number `after` on, at most one batch. None starts recording and returns none.

        Args:
            tenant: the owner of all of these namespaces; events then have its own numbers, else those of the whole log.
        """
        with self._lock:
            if not self.on:
                self.on, self._began = True, int(self._clock.wall() * 1e6)
                self._end = self._dropped_until = self._began
            rows: Iterable[tuple[int, KVEvent]]
            if tenant is not None:
                ring = self._ring(tenant)
                first, end = ring.first, ring.end
                lost = after is not None and not first <= after <= end
                at = first if lost or after is None else after
                rows = enumerate((event for _, event in islice(ring.rows, at - first, None)), at)
            else:
                first, end = self._dropped_until, self._end
                lost = after is not None and not first <= after <= end
                at = self._began if lost or after is None else after
                recent = (takewhile(lambda row: row[0] >= at, reversed(ring.rows)) for ring in self._rings.values())
                rows = sorted(chain.from_iterable(recent), key=lambda row: row[0])
            if after is None:
                return EventBatch(end, lost=False, kv_events=())
            events: list[KVEvent] = []
            blocks = 0
            for number, event in rows:
                if blocks >= MAX_BATCH_BLOCKS:
                    return EventBatch(number, lost, events)
                if event.namespace in namespaces:
                    events.append(event)
                    blocks += event.blocks
            return EventBatch(end, lost, events)

    def _ring(self, tenant: str) -> _TenantEvents:
        if tenant not in self._rings:
            self._rings[tenant] = _TenantEvents(self._began)
        return self._rings[tenant]

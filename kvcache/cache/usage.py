"""Usage of a cache: last use and counts by namespace and agent, and memory by namespace, for an operator.

A use is one admitted request. Each table is bounded: the least recently used row is removed first.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.record import record_bytes
from kvcache.index.index import Index
from kvcache.os_env import Clock
from kvcache.tier.tier import SupportsNamespaceUsage, Tier

# Records and bytes of each namespace in each tier, counted on request. Counting a million records takes a large part of
# a second of one core. A count is therefore reused for MIN_COUNT_AGE_S, or COUNT_AGE_RATIO times its own duration if
# that is longer. Frequent callers then cost a few hundredths of a core at most.

MIN_COUNT_AGE_S, COUNT_AGE_RATIO = 5.0, 30.0


class TierUsage(NamedTuple):
    records: int
    bytes: int  # 0 for a shared tier, whose server does not report it


UsageByNamespace = Mapping[bytes, Mapping[str, TierUsage]]
"""By namespace and tier."""


class NamespaceUsage:
    def __init__(self, index: Index, tiers: Sequence[Tier], clock: Clock, sizes: Callable[[], Mapping[bytes, int]]):
        """Counts records by namespace.

        Args:
            tiers: host first.
            sizes: payload bytes by shard key, for all records that can be in host.
        """
        self._index, self._tiers, self._clock, self._sizes = index, tiers, clock, sizes
        self._counted: UsageByNamespace = {}
        self._until = float("-inf")
        self._recounting = False
        self._lock = threading.Lock()

    def take(self, *, anew: bool = False) -> UsageByNamespace:
        """The last count while it is valid; `anew`: a new count."""
        with self._lock:
            began = self._clock.now()
            if anew or began >= self._until:
                self._counted = self._count()
                ended = self._clock.now()
                self._until = ended + max(MIN_COUNT_AGE_S, COUNT_AGE_RATIO * (ended - began))
            return self._counted

    def cached(self, submit: Callable[[Callable[[], object]], object]) -> UsageByNamespace:
        """The last count, for callers that must not wait; empty before the first count.

        If the count is too old, `submit` runs a new one in the background.
        """
        if self._clock.now() >= self._until and not self._recounting:
            self._recounting = True
            submit(self._recount)
        return self._counted

    def _recount(self) -> None:
        try:
            self.take()
        finally:
            self._recounting = False

    def _count(self) -> UsageByNamespace:
        counted: dict[bytes, dict[str, TierUsage]] = {}
        sizes = self._sizes()
        for tier in self._tiers:
            if isinstance(tier, SupportsNamespaceUsage):
                for namespace, (records, size) in tier.usage_by_namespace().items():
                    counted.setdefault(namespace, {})[tier.name] = TierUsage(records, size)
            else:
                for shard_key, records in self._index.records_by_shard(tier.name).items():
                    of_namespace = counted.setdefault(shard_key[:SIGNATURE_BYTES], {})
                    previous = of_namespace.get(tier.name, TierUsage(0, 0))
                    size = record_bytes(sizes[shard_key]) if shard_key in sizes and not tier.shared else 0
                    of_namespace[tier.name] = TierUsage(previous.records + records, previous.bytes + records * size)
        return counted


MAX_NAMESPACES, MAX_AGENTS = 8192, 1024

N = TypeVar("N", bound=Hashable)


@dataclass(slots=True)
class UsageRow:
    last: float  # seconds since 1970
    requests: int = 0
    asked_tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)  # by tier


class _LRUTable(Generic[N]):
    """Rows in order of use, the most recent last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.rows: OrderedDict[N, UsageRow] = OrderedDict()

    def touch(self, name: N, now: float) -> UsageRow:
        use = self.rows.get(name)
        if use is None:
            use = self.rows[name] = UsageRow(now)
            if len(self.rows) > self._most:
                self.rows.popitem(last=False)
        else:
            self.rows.move_to_end(name)
            use.last = now
        return use


class UsageLog:
    """Uses by namespace and by agent.

    Thread safety: any thread.
    """

    def __init__(self, clock: Clock, *, namespaces: int = MAX_NAMESPACES, agents: int = MAX_AGENTS) -> None:
        self._clock = clock
        self.since = clock.wall()
        """Earlier uses are unknown."""
        self._namespaces: _LRUTable[bytes] = _LRUTable(namespaces)
        self._agents: _LRUTable[tuple[str, str]] = _LRUTable(agents)  # by tenant and agent
        self._lock = threading.Lock()

    def touch(self, namespace: bytes) -> None:
        """Note that a request of this namespace loads or stores, whether or not it is admitted."""
        with self._lock:
            self._namespaces.touch(namespace, self._clock.wall())

    def add(self, namespace: bytes, tenant: str, agent: str, asked_tokens: int, hit_tokens: Mapping[str, int]) -> None:
        """Add an admitted request. `agent`: "" if it has none."""
        now = self._clock.wall()
        with self._lock:
            uses = [self._namespaces.touch(namespace, now)]
            if agent:
                uses.append(self._agents.touch((tenant, agent), now))
            for use in uses:
                use.requests += 1
                use.asked_tokens += asked_tokens
                for tier, tokens in hit_tokens.items():
                    use.hit_tokens[tier] = use.hit_tokens.get(tier, 0) + tokens

    def namespaces(self) -> dict[bytes, UsageRow]:
        with self._lock:
            return {name: _copy_row(use) for name, use in self._namespaces.rows.items()}

    def agents(self) -> dict[tuple[str, str], UsageRow]:
        """By tenant and agent."""
        with self._lock:
            return {name: _copy_row(use) for name, use in self._agents.rows.items()}

    def export(self, most: int) -> list[tuple[bytes, float]]:
        """The most recently used namespaces and the time of their use, oldest first, to save."""
        with self._lock:
            rows = self._namespaces.rows
            return [(name, use.last) for name, use in islice(rows.items(), max(0, len(rows) - most), None)]

    def restore(self, exported: Iterable[tuple[bytes, float]]) -> None:
        """Restore saved rows, at start, before any use."""
        now = self._clock.wall()
        with self._lock:
            for name, last in exported:
                self._namespaces.touch(name, min(last, now))

    def forget(self, namespace: bytes) -> None:
        with self._lock:
            self._namespaces.rows.pop(namespace, None)


def _copy_row(use: UsageRow) -> UsageRow:
    return UsageRow(use.last, use.requests, use.asked_tokens, dict(use.hit_tokens))

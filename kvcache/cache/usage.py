"""Who used a cache, how much and when last: by namespace and by agent, for an operator.

A use is one admitted request. Each table is bounded: what was not used for longest is forgotten first."""

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
from kvcache.tier.tier import Tier

# What each namespace has in each tier: records and bytes, counted when asked. To count a million records takes a good
# part of a second of one core, so a count stands for a while: for `STANDS_S`, and for `REST` times what it took. So
# whoever asks, however often, takes a few hundredths of a core at most.

MIN_COUNT_AGE_S, COUNT_AGE_RATIO = 5.0, 30.0


class TierUsage(NamedTuple):
    records: int
    bytes: int  # 0 of a tier that others share: what its server takes for them is not told


UsageByNamespace = Mapping[bytes, Mapping[str, TierUsage]]
"""By namespace and tier."""


class NamespaceUsage:
    def __init__(self, index: Index, tiers: Sequence[Tier], clock: Clock, sizes: Callable[[], Mapping[bytes, int]]):
        """`tiers`: host first. `sizes`: payload bytes of a record, by its place; of whatever can be in host."""
        self._index, self._tiers, self._clock, self._sizes = index, tiers, clock, sizes
        self._counted: UsageByNamespace = {}
        self._until = float("-inf")
        self._recounting = False
        self._lock = threading.Lock()

    def take(self, *, anew: bool = False) -> UsageByNamespace:
        """As it was counted last; `anew`: as it is now."""
        with self._lock:
            began = self._clock.now()
            if anew or began >= self._until:
                self._counted = self._count()
                ended = self._clock.now()
                self._until = ended + max(MIN_COUNT_AGE_S, COUNT_AGE_RATIO * (ended - began))
            return self._counted

    def cached(self, submit: Callable[[Callable[[], object]], object]) -> UsageByNamespace:
        """As it was counted last, for whoever may not wait: where that stands no more it is counted anew, by what
        `submit` gives it to. Nothing before the first count is over."""
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
            told = tier.usage_by_namespace()
            if told is None:
                for place, records in self._index.places(tier.name).items():
                    of_namespace = counted.setdefault(place[:SIGNATURE_BYTES], {})
                    previous = of_namespace.get(tier.name, TierUsage(0, 0))
                    size = record_bytes(sizes[place]) if place in sizes and not tier.shared else 0
                    of_namespace[tier.name] = TierUsage(previous.records + records, previous.bytes + records * size)
            else:
                for namespace, (records, size) in told.items():
                    counted.setdefault(namespace, {})[tier.name] = TierUsage(records, size)
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
    """The last used stands last."""

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
    """Thread-safe."""

    def __init__(self, clock: Clock, *, namespaces: int = MAX_NAMESPACES, agents: int = MAX_AGENTS) -> None:
        self._clock = clock
        self.since = clock.wall()
        """Before then nothing is known of."""
        self._namespaces: _LRUTable[bytes] = _LRUTable(namespaces)
        self._agents: _LRUTable[tuple[str, str]] = _LRUTable(agents)  # by tenant and agent
        self._lock = threading.Lock()

    def touch(self, namespace: bytes) -> None:
        """A request of this namespace loads or stores: it is in use, whether or not that is admitted."""
        with self._lock:
            self._namespaces.touch(namespace, self._clock.wall())

    def add(self, namespace: bytes, tenant: str, agent: str, asked_tokens: int, hit_tokens: Mapping[str, int]) -> None:
        """A request was admitted. `agent`: "" where none was named."""
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

    def told(self, most: int) -> list[tuple[bytes, float]]:
        """For another life: the namespaces that were used last, and when, the oldest of them first."""
        with self._lock:
            rows = self._namespaces.rows
            return [(name, use.last) for name, use in islice(rows.items(), max(0, len(rows) - most), None)]

    def recall(self, told: Iterable[tuple[bytes, float]]) -> None:
        """What another life told; at the start, before anything is used."""
        now = self._clock.wall()
        with self._lock:
            for name, last in told:
                self._namespaces.touch(name, min(last, now))

    def forget(self, namespace: bytes) -> None:
        with self._lock:
            self._namespaces.rows.pop(namespace, None)


def _copy_row(use: UsageRow) -> UsageRow:
    return UsageRow(use.last, use.requests, use.asked_tokens, dict(use.hit_tokens))

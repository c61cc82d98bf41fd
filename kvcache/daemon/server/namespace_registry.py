"""What sessions have bound: counted by tenant, and let go once nobody has it bound any more.

A binding that no session has is kept for a while, among so many others, so that an engine that comes back finds its
own and an operator its name. Its records stay longer than it: whoever binds their namespace again finds them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable

from kvcache.cache.cache import Cache
from kvcache.cache.request import CacheNamespace
from kvcache.daemon.server.admission import FairShare
from kvcache.errors import ConfigError

MAX_BOUND_NAMESPACES = 16_384
"""Of all tenants together."""
MAX_IDLE_NAMESPACES, IDLE_EVICTION_BATCH = 1024, 256
"""That nobody has; so many go at a time."""


class NamespaceRegistry:
    """Of the loop's thread. A session is whatever has an identity."""

    def __init__(self, cache: Cache, tenants: Callable[[], int]) -> None:
        self._cache, self._fair_share = cache, FairShare(MAX_BOUND_NAMESPACES, tenants)
        self._by_tenant: defaultdict[str, OrderedDict[CacheNamespace, set[object]]] = defaultdict(OrderedDict)
        """By tenant, what was used last at the end: the sessions that have it."""
        self._references: Counter[CacheNamespace] = Counter()  # tenants that have it, and open requests
        self._idle: OrderedDict[CacheNamespace, None] = OrderedDict()  # what was let go of longest ago stands first

    def acquire(self, tenant: str, bind: Callable[[], CacheNamespace], session: object) -> CacheNamespace:
        """For a session of this tenant. Where the tenant has as many as it may, the one goes that its sessions used
        longest ago, whoever has it: who uses it again takes it again. ConfigError where it may not have one."""
        bound, registered = bind(), self._by_tenant[tenant]
        if bound not in registered:
            if not self._fair_share.has_capacity(tenant):
                if not registered:
                    if not self._references[bound]:
                        self._mark_idle(bound)
                    raise ConfigError(
                        f"tenant {tenant!r} can have no namespace bound: all tenants together have "
                        f"{MAX_BOUND_NAMESPACES}; end engines"
                        " that are not used"
                    )
                self._remove(tenant, next(iter(registered)))
            self._fair_share.acquire_unchecked(tenant)
            registered[bound] = set()
            self.add_reference(bound)
        registered[bound].add(session)
        registered.move_to_end(bound)
        return bound

    def touch(self, tenant: str, bound: CacheNamespace, session: object) -> bool:
        """The session uses it now. False where it is no longer bound for it."""
        if session not in self._by_tenant[tenant].get(bound, ()):
            return False
        self._by_tenant[tenant].move_to_end(bound)
        return True

    def release(self, tenant: str, bound: CacheNamespace, session: object) -> None:
        """Idempotent."""
        sessions = self._by_tenant[tenant].get(bound, set())
        sessions.discard(session)
        if not sessions and bound in self._by_tenant[tenant]:
            self._remove(tenant, bound)

    def _remove(self, tenant: str, bound: CacheNamespace) -> None:
        del self._by_tenant[tenant][bound]
        self._fair_share.release(tenant)
        self.drop_reference(bound)

    def add_reference(self, bound: CacheNamespace) -> None:
        """It stays until as many `leave` it: an open request goes on with what its session has ended."""
        self._references[bound] += 1
        self._idle.pop(bound, None)

    def drop_reference(self, bound: CacheNamespace) -> None:
        self._references[bound] -= 1
        if not self._references[bound]:
            del self._references[bound]
            self._mark_idle(bound)

    def _mark_idle(self, bound: CacheNamespace) -> None:
        """Nobody has it."""
        self._idle[bound] = None
        if len(self._idle) >= MAX_IDLE_NAMESPACES + IDLE_EVICTION_BATCH:
            evicted = self._eviction_candidates(IDLE_EVICTION_BATCH)
            for each in evicted:
                del self._idle[each]
            self._cache.unbind(evicted)

    def _eviction_candidates(self, count: int) -> list[CacheNamespace]:
        """That go: the oldest of the tenant that has most at each, so that whoever binds without end pushes out its
        own."""
        newer: Counter[str] = Counter()
        ranks = {}
        for bound in reversed(self._idle):
            ranks[bound] = newer[bound.tenant] = newer[bound.tenant] + 1
        return sorted(self._idle, key=ranks.__getitem__, reverse=True)[:count]

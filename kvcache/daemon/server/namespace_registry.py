"""Namespaces that client sessions have bound, counted by tenant.

The registry keeps a limited number of bindings that no session uses any more. An engine that returns then finds its
binding, and an operator sees the namespace's name. Records outlive the binding: binding the namespace again finds them.
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
"""Bindings kept without a session, and how many are unbound at a time beyond that."""


class NamespaceRegistry:
    """Counts bindings and references.

    Any hashable object can stand for a session. Thread safety: the loop's thread only.
    """

    def __init__(self, cache: Cache, tenants: Callable[[], int]) -> None:
        self._cache, self._fair_share = cache, FairShare(MAX_BOUND_NAMESPACES, tenants)
        self._by_tenant: defaultdict[str, OrderedDict[CacheNamespace, set[object]]] = defaultdict(OrderedDict)
        """By tenant, sessions of each binding; the most recently used binding is last."""
        self._references: Counter[CacheNamespace] = Counter()  # by tenants and by open requests
        self._idle: OrderedDict[CacheNamespace, None] = OrderedDict()  # least recently released first

    def acquire(self, tenant: str, bind: Callable[[], CacheNamespace], session: object) -> CacheNamespace:
        """Bind a namespace for a session of this tenant.

        A tenant at its share loses its least recently used binding, whichever session uses it. That session binds it
        again at its next use.

        Raises:
            ConfigError: The tenant has no share, and no binding to replace.
        """
        handle, registered = bind(), self._by_tenant[tenant]
        if handle not in registered:
            if not self._fair_share.has_capacity(tenant):
                if not registered:
                    if not self._references[handle]:
                        self._mark_idle(handle)
                    raise ConfigError(
                        f"tenant {tenant!r} cannot bind a namespace: all tenants together have "
                        f"{MAX_BOUND_NAMESPACES}; end engines"
                        " that are not used"
                    )
                self._remove(tenant, next(iter(registered)))
            self._fair_share.acquire_unchecked(tenant)
            registered[handle] = set()
            self.add_reference(handle)
        registered[handle].add(session)
        registered.move_to_end(handle)
        return handle

    def touch(self, tenant: str, handle: CacheNamespace, session: object) -> bool:
        """Mark the binding as used; return False where the session no longer has it."""
        if session not in self._by_tenant[tenant].get(handle, ()):
            return False
        self._by_tenant[tenant].move_to_end(handle)
        return True

    def release(self, tenant: str, handle: CacheNamespace, session: object) -> None:
        """End a session's use of the binding. Idempotent."""
        sessions = self._by_tenant[tenant].get(handle, set())
        sessions.discard(session)
        if not sessions and handle in self._by_tenant[tenant]:
            self._remove(tenant, handle)

    def _remove(self, tenant: str, handle: CacheNamespace) -> None:
        del self._by_tenant[tenant][handle]
        self._fair_share.release(tenant)
        self.drop_reference(handle)

    def add_reference(self, handle: CacheNamespace) -> None:
        """Keep the binding until as many calls of `drop_reference`.

        An open request continues after its session has ended the binding.
        """
        self._references[handle] += 1
        self._idle.pop(handle, None)

    def drop_reference(self, handle: CacheNamespace) -> None:
        self._references[handle] -= 1
        if not self._references[handle]:
            del self._references[handle]
            self._mark_idle(handle)

    def _mark_idle(self, handle: CacheNamespace) -> None:
        """Record that no session and no request uses the binding; unbind a batch where too many are idle."""
        self._idle[handle] = None
        if len(self._idle) >= MAX_IDLE_NAMESPACES + IDLE_EVICTION_BATCH:
            evicted = self._eviction_candidates(IDLE_EVICTION_BATCH)
            for each in evicted:
                del self._idle[each]
            self._cache.unbind(evicted)

    def _eviction_candidates(self, count: int) -> list[CacheNamespace]:
        """Return the idle bindings to unbind: repeatedly the oldest of the tenant with most.

        A tenant that binds without end therefore evicts only its own.
        """
        newer: Counter[str] = Counter()
        ranks = {}
        for handle in reversed(self._idle):
            ranks[handle] = newer[handle.tenant] = newer[handle.tenant] + 1
        return sorted(self._idle, key=ranks.__getitem__, reverse=True)[:count]

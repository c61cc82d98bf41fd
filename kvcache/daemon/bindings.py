"""What sessions have bound: counted by tenant, and let go once nobody has it bound any more.

A binding that no session has is kept for a while, among so many others, so that an engine that comes back finds its
own and an operator its name. Its records stay longer than it: whoever binds their namespace again finds them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence

from kvcache.daemon.allotment import Allotment
from kvcache.errors import ConfigError
from kvcache.hierarchy.cache import Cache
from kvcache.hierarchy.request import BoundCache

MOST = 16_384
"""Of all tenants together."""
KEPT, A_BATCH = 1024, 256
"""That nobody has; so many go at a time."""


class Bindings:
    """Of the loop's thread."""

    def __init__(self, cache: Cache, tenants: Callable[[], int]) -> None:
        self._cache, self._allotment = cache, Allotment(MOST, tenants)
        self._sessions: Counter[tuple[str, BoundCache]] = Counter()
        self._users: Counter[BoundCache] = Counter()  # tenants that have it, and open requests
        self._idle: OrderedDict[BoundCache, None] = OrderedDict()  # what was let go of longest ago stands first

    def take(self, tenant: str, bind: Callable[[], BoundCache], ends: Sequence[BoundCache] = ()) -> BoundCache:
        """For a session of this tenant, which gives back `ends` next. ConfigError where the tenant has as many as it
        may and none of these leaves it room; what it has already costs nothing."""
        bound = bind()
        if not self._sessions[tenant, bound]:
            leaves = any(self._sessions[tenant, ended] == 1 for ended in ends)
            if not leaves and not self._allotment.has_room(tenant):
                if not self._users[bound]:
                    self._rest(bound)
                raise ConfigError(
                    f"tenant {tenant!r} has {self._allotment.used(tenant)} namespaces bound, of {MOST} for all: no "
                    "more can be bound before one of its engines ends some"
                )
            self._allotment.exchange(tenant)
            self.use(bound)
        self._sessions[tenant, bound] += 1
        return bound

    def give_back(self, tenant: str, bound: BoundCache) -> None:
        self._sessions[tenant, bound] -= 1
        if self._sessions[tenant, bound]:
            return
        del self._sessions[tenant, bound]
        self._allotment.give_back(tenant)
        self.leave(bound)

    def use(self, bound: BoundCache) -> None:
        """It stays until as many `leave` it: an open request goes on with what its session has ended."""
        self._users[bound] += 1
        self._idle.pop(bound, None)

    def leave(self, bound: BoundCache) -> None:
        self._users[bound] -= 1
        if not self._users[bound]:
            del self._users[bound]
            self._rest(bound)

    def _rest(self, bound: BoundCache) -> None:
        """Nobody has it."""
        self._idle[bound] = None
        if len(self._idle) >= KEPT + A_BATCH:
            gone = self._first(A_BATCH)
            for each in gone:
                del self._idle[each]
            self._cache.unbind(gone)

    def _first(self, count: int) -> list[BoundCache]:
        """That go: the oldest of the tenant that has most at each, so that whoever binds without end pushes out its
        own."""
        newer: Counter[str] = Counter()
        ranks = {}
        for bound in reversed(self._idle):
            ranks[bound] = newer[bound.tenant] = newer[bound.tenant] + 1
        return sorted(self._idle, key=ranks.__getitem__, reverse=True)[:count]

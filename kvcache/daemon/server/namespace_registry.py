"""What sessions have bound: counted by tenant, and let go once nobody has it bound any more.

A binding that no session has is kept for a while, among so many others, so that an engine that comes back finds its
own and an operator its name. Its records stay longer than it: whoever binds their namespace again finds them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable

from kvcache.cache.cache import Cache
from kvcache.cache.request import BoundCache
from kvcache.daemon.server.admission import Allotment
from kvcache.errors import ConfigError

MOST = 16_384
"""Of all tenants together."""
KEPT, A_BATCH = 1024, 256
"""That nobody has; so many go at a time."""


class Bindings:
    """Of the loop's thread. A session is whatever has an identity."""

    def __init__(self, cache: Cache, tenants: Callable[[], int]) -> None:
        self._cache, self._allotment = cache, Allotment(MOST, tenants)
        self._had: defaultdict[str, OrderedDict[BoundCache, set[object]]] = defaultdict(OrderedDict)
        """By tenant, what was used last at the end: the sessions that have it."""
        self._users: Counter[BoundCache] = Counter()  # tenants that have it, and open requests
        self._idle: OrderedDict[BoundCache, None] = OrderedDict()  # what was let go of longest ago stands first

    def take(self, tenant: str, bind: Callable[[], BoundCache], session: object) -> BoundCache:
        """For a session of this tenant. Where the tenant has as many as it may, the one goes that its sessions used
        longest ago, whoever has it: who uses it again takes it again. ConfigError where it may not have one."""
        bound, had = bind(), self._had[tenant]
        if bound not in had:
            if not self._allotment.has_room(tenant):
                if not had:
                    if not self._users[bound]:
                        self._rest(bound)
                    raise ConfigError(
                        f"tenant {tenant!r} can have no namespace bound: all tenants together have {MOST}; end engines"
                        " that are not used"
                    )
                self._let_go(tenant, next(iter(had)))
            self._allotment.exchange(tenant)
            had[bound] = set()
            self.use(bound)
        had[bound].add(session)
        had.move_to_end(bound)
        return bound

    def touch(self, tenant: str, bound: BoundCache, session: object) -> bool:
        """The session uses it now. False where it is no longer bound for it."""
        if session not in self._had[tenant].get(bound, ()):
            return False
        self._had[tenant].move_to_end(bound)
        return True

    def give_back(self, tenant: str, bound: BoundCache, session: object) -> None:
        """Idempotent."""
        sessions = self._had[tenant].get(bound, set())
        sessions.discard(session)
        if not sessions and bound in self._had[tenant]:
            self._let_go(tenant, bound)

    def _let_go(self, tenant: str, bound: BoundCache) -> None:
        del self._had[tenant][bound]
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

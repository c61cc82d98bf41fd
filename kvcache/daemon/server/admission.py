"""The daemon's door: as which tenant a connection comes in, and what that tenant may ask for in a second."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kvcache.cache.cache import Cache
from kvcache.daemon.server.auth import OPERATOR, UNRESTRICTED_TENANT, Tenant, Tenants
from kvcache.errors import AccessError
from kvcache.evict.quotas import UNLIMITED, Quota
from kvcache.os_env import Clock
from kvcache.settings import Settings
from kvcache.settings.cache import Tenant as TenantQuota
from kvcache.settings.types import check_at_most

# So many of one thing for all tenants together, of which each can always have its share. Half of them are shares,
# equal ones, and nobody else has a tenant's; the other half is for whoever comes first. So one tenant alone has more
# than half of all, and however many it wants, the next one finds its own share free.


class FairShare:
    """Of one thread. Without tenants apart from each other there is one, who has all."""

    def __init__(self, capacity: int, tenants: Callable[[], int]) -> None:
        """`tenants`: how many there are now; where that changes, so does everybody's share from then on."""
        self.capacity, self._tenants = capacity, tenants
        self._used: Counter[str] = Counter()

    @property
    def share(self) -> int:
        """0 where there are more tenants than half as many things: then whoever comes first has them."""
        return self.capacity // (2 * max(1, self._tenants()))

    def used(self, tenant: str) -> int:
        return self._used[tenant]

    def has_capacity(self, tenant: str) -> bool:
        share = self.share
        if self._used.total() >= self.capacity:
            return False
        if self._used[tenant] < share:
            return True
        beyond = sum(max(0, used - share) for used in self._used.values())
        return beyond < self.capacity - share * max(1, self._tenants())

    def acquire(self, tenant: str) -> bool:
        """One; False where nothing is left for it."""
        if not self.has_capacity(tenant):
            return False
        self.acquire_unchecked(tenant)
        return True

    def acquire_unchecked(self, tenant: str) -> None:
        """One, in the place of another that it gave back."""
        self._used[tenant] += 1

    def release(self, tenant: str) -> None:
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]


# Bytes that each tenant may take of a tier, and what others leave to it: from the tenants file to the cache.

QUOTA_TIERS = ("host", "nvme")


class TenantQuotas:
    """What a daemon has set of a cache's shares. A tenant of whom the file says nothing of bytes has what
    `evict.tenants` gives it."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._set: set[str] = set()

    def set(self, tenants: Tenants | None) -> None:
        """ConfigError, before anything is changed, where the least shares together are more than there is."""
        quotas = tenant_quotas(self._cache.settings, tenants)
        for name in self._set | quotas.keys():
            for tier in QUOTA_TIERS:
                self._cache.quotas.set(name, tier, _limit_of(quotas.get(name, TenantQuota()), tier))
        self._set = set(quotas)


def tenant_quotas(settings: Settings, tenants: Tenants | None) -> dict[str, TenantQuota]:
    """By tenant; ConfigError where the least shares together are more than there is."""
    quotas: dict[str, TenantQuota] = dict(settings.evict.tenants)
    for tenant in tenants.by_name.values() if tenants is not None else ():
        if tenant.name != OPERATOR and tenant.model_fields_set & TenantQuota.model_fields.keys():
            quotas[tenant.name] = tenant
    host, nvme = settings.host, settings.nvme
    for tier, capacity in (("host", host.capacity_bytes), ("nvme", nvme.capacity_bytes if nvme.enabled else 0)):
        least = sum(_limit_of(given, tier).guaranteed_bytes for given in quotas.values())
        if capacity:
            check_at_most(f"{tier}_guaranteed_bytes of all tenants", least, f"{tier}.capacity_bytes", capacity)
    return quotas


def _limit_of(given: TenantQuota, tier: str) -> Quota:
    quota: int | None = getattr(given, f"{tier}_quota_bytes")
    return Quota(UNLIMITED if quota is None else quota, getattr(given, f"{tier}_guaranteed_bytes"))


# How much a tenant may ask for in a second. What is beyond is answered as a miss: it waits for nobody. A bucket holds
# what one second allows. What is asked for while something is in it may owe the rest, so that a transfer larger than
# the bucket is let through once, and nothing after it until it is paid for.

MAX_OVERDRAFT_S = 10.0
"""Of operations owed, beyond which a client is let go."""

QUOTA_REASON = "quota"
"""The reason that is said of what was beyond."""


class TokenBucket:
    """Not for use by several threads at once."""

    def __init__(self, rate: float | None, clock: Clock) -> None:
        """`rate`: a second; None for no limit."""
        self._clock = clock
        self.rate = rate
        self._level, self._then = rate or 0.0, clock.now()

    def level(self) -> float:
        """What is left; below zero, what is owed."""
        if self.rate is None:
            return float("inf")
        now = self._clock.now()
        self._level, self._then = min(self.rate, self._level + (now - self._then) * self.rate), now
        return self._level

    def consume(self, amount: float) -> None:
        """Whatever is left."""
        self._level = self.level() - amount if self.rate is not None else 0.0

    def change(self, rate: float | None) -> None:
        """Another rate from now on; what is owed stays owed."""
        level = min(self.level(), 0.0)
        self.rate = rate
        self._level = level + (rate or 0.0)


class RateLimit:
    """Of one tenant, all its connections together. Thread-safe."""

    def __init__(self, tenant: Tenant, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._operations, self._bytes = TokenBucket(tenant.operations, clock), TokenBucket(tenant.bandwidth, clock)
        self.refused = 0
        """Matches, loads, stores and requests of the page that a limit turned into a miss."""
        self.moved_bytes = 0

    def change(self, tenant: Tenant) -> None:
        with self._lock:
            for bucket, rate in ((self._operations, tenant.operations), (self._bytes, tenant.bandwidth)):
                if bucket.rate != rate:
                    bucket.change(rate)

    def count_operation(self, *, moves: bool = False, refusable: bool = True) -> bool:
        """Take one operation from the budget; return whether it is within the limits.

        Args:
            moves: The limit of bytes applies too.
            refusable: The caller refuses the operation where this returns False. Others, such as the end of a
                request, are carried out all the same and do not count as refused.
        """
        with self._lock:
            allowed = self._operations.level() > 0 and not (moves and self._bytes.level() <= 0)
            self._operations.consume(1)
            self.refused += refusable and not allowed
            return allowed

    @property
    def overdrawn(self) -> bool:
        with self._lock:
            return self._operations.level() < -MAX_OVERDRAFT_S * (self._operations.rate or 0.0)

    def count_bytes(self, size: int) -> None:
        """So many bytes, which are on their way already."""
        with self._lock:
            self._bytes.consume(size)
            self.moved_bytes += size


@dataclass(frozen=True, slots=True)
class Credentials:
    """What somebody showed, as it may be kept and compared again: no token is in it."""

    user: int | None = None
    token_hash: str = ""
    certificates: Sequence[str] = ()
    remote: bool = False
    """Not of this host: it can map nothing, and there is no user."""


class Admission:
    """Of the loop's thread, but for what says otherwise."""

    def __init__(self, path: str, clock: Clock) -> None:
        """`path` of the tenants file, if there is one; ConfigError as `Tenants.read`."""
        self.path, self._clock = path, clock
        self.tenants = self.load_tenants()
        self._rate_limits: dict[str, RateLimit] = {}

    @property
    def isolates_tenants(self) -> bool:
        """Whether tenants are kept apart."""
        return self.tenants is not None

    @property
    def count(self) -> int:
        """How many tenants there are; one where they are not kept apart."""
        return 1 if self.tenants is None else len(self.tenants.by_name)

    def load_tenants(self) -> Tenants | None:
        """The file as it is now; ConfigError where it makes no sense."""
        return Tenants.read(self.path) if self.path else None

    def set_tenants(self, tenants: Tenants | None) -> None:
        """From now on."""
        self.tenants = tenants
        for name, rate_limit in self.rate_limits.items():
            rate_limit.change((tenants.by_name if tenants is not None else {}).get(name, Tenant(name=name)))

    def tenant(self, credentials: Credentials) -> Tenant:
        """AccessError for whoever is in no table. A token that nobody has is no reason to look at the rest."""
        if self.tenants is None:
            return UNRESTRICTED_TENANT
        found = None
        if credentials.token_hash:
            found = self.tenants.by_hash(credentials.token_hash)
        elif credentials.certificates:
            found = self.tenants.by_certificate(credentials.certificates)
        elif credentials.user is not None:
            found = self.tenants.by_user(credentials.user)
        if found is None:
            what = (
                "token"
                if credentials.token_hash
                else "certificate"
                if credentials.certificates or credentials.remote
                else "user"
            )
            raise AccessError(
                f"no tenant has this {what}: give token_file or KVCACHE_TOKEN, or be entered in the tenants file of "
                f"the daemon (process {os.getpid()})"
            )
        return found

    def rate_limit(self, tenant: Tenant) -> RateLimit:
        """From any thread."""
        found = self._rate_limits.get(tenant.name)
        return found or self._rate_limits.setdefault(tenant.name, RateLimit(tenant, self._clock))

    @property
    def rate_limits(self) -> dict[str, RateLimit]:
        """By name, of tenants that came in."""
        return dict(self._rate_limits)

    @property
    def rates(self) -> dict[str, dict[str, Any]]:
        """By tenant, what it may ask for in a second (None: no limit), and what it did. From any thread."""
        rate_limits, tenants = self.rate_limits, {} if self.tenants is None else self.tenants.by_name
        return {
            name: {
                "bandwidth": tenant.bandwidth,
                "operations": tenant.operations,
                "moved_bytes": rate_limits[name].moved_bytes if name in rate_limits else 0,
                "refused": rate_limits[name].refused if name in rate_limits else 0,
            }
            for name, tenant in tenants.items()
        }

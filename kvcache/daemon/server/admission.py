"""Maps a connection's credentials to a tenant, and limits what each tenant uses.

`Admission` authenticates and holds the rate limits. `FairShare` divides connections and namespaces between tenants,
`TenantQuotas` sets the memory quotas of the cache, and `RateLimit` counts operations and bytes a second.
"""

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

# Fair shares of a number of things (connections, namespaces). Half of them are divided into equal guaranteed shares,
# one a tenant; the other half is first come, first served. One tenant alone can therefore use more than half, and every
# other tenant still has its share free.


class FairShare:
    """Counts things in use by tenant. Without tenant isolation there is one tenant, which may use all.

    Thread safety: one thread only.
    """

    def __init__(self, capacity: int, tenants: Callable[[], int]) -> None:
        """`tenants` returns their current number; a change takes effect on every share at once."""
        self.capacity, self._tenants = capacity, tenants
        self._used: Counter[str] = Counter()

    @property
    def share(self) -> int:
        """Guaranteed number per tenant; 0 where there are more tenants than half the capacity.

        Without a guaranteed share every tenant is served first come, first served.
        """
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
        """Take one; return False where none is left for this tenant."""
        if not self.has_capacity(tenant):
            return False
        self.acquire_unchecked(tenant)
        return True

    def acquire_unchecked(self, tenant: str) -> None:
        """Take one without a check, after the caller has ensured capacity."""
        self._used[tenant] += 1

    def release(self, tenant: str) -> None:
        self._used[tenant] -= 1
        if not self._used[tenant]:
            del self._used[tenant]


# Memory quotas and guaranteed shares of tenants: from the tenants file to the cache.

QUOTA_TIERS = ("host", "nvme")


class TenantQuotas:
    """Sets the quotas of a cache from the tenants file.

    `evict.tenants` applies to a tenant for which the file gives no bytes.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._set: set[str] = set()

    def set(self, tenants: Tenants | None) -> None:
        """Set all quotas.

        Raises:
            ConfigError: The guaranteed bytes of all tenants exceed a tier. Nothing is changed then.
        """
        quotas = tenant_quotas(self._cache.settings, tenants)
        for name in self._set | quotas.keys():
            for tier in QUOTA_TIERS:
                self._cache.quotas.set(name, tier, _limit_of(quotas.get(name, TenantQuota()), tier))
        self._set = set(quotas)


def tenant_quotas(settings: Settings, tenants: Tenants | None) -> dict[str, TenantQuota]:
    """Return the quotas by tenant; ConfigError where the guaranteed bytes together exceed a tier."""
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


# Rate limits. A request beyond a limit is answered as a miss at once; it waits for nothing. A bucket holds what one
# second allows. A bucket that is not empty may be overdrawn: a transfer larger than the bucket passes once, and later
# ones are refused until the bucket has refilled.

MAX_OVERDRAFT_S = 10.0
"""Overdraft of operations beyond which the daemon closes the client's connection."""

QUOTA_REASON = "quota"
"""Miss reason of a request beyond a limit."""


class TokenBucket:
    """A token bucket that may be overdrawn. Thread safety: one thread at a time."""

    def __init__(self, rate: float | None, clock: Clock) -> None:
        """`rate` is per second; None for no limit."""
        self._clock = clock
        self.rate = rate
        self._level, self._then = rate or 0.0, clock.now()

    def level(self) -> float:
        """Return the amount left; negative while overdrawn."""
        if self.rate is None:
            return float("inf")
        now = self._clock.now()
        self._level, self._then = min(self.rate, self._level + (now - self._then) * self.rate), now
        return self._level

    def consume(self, amount: float) -> None:
        """Take `amount`, even where less is left."""
        self._level = self.level() - amount if self.rate is not None else 0.0

    def change(self, rate: float | None) -> None:
        """Change the rate; an overdraft remains."""
        level = min(self.level(), 0.0)
        self.rate = rate
        self._level = level + (rate or 0.0)


class RateLimit:
    """Limits of one tenant, over all its connections. Thread-safe."""

    def __init__(self, tenant: Tenant, clock: Clock) -> None:
        self._lock = threading.Lock()
        self._operations, self._bytes = TokenBucket(tenant.operations, clock), TokenBucket(tenant.bandwidth, clock)
        self.refused = 0
        """Matches, loads, stores and HTTP requests that a limit turned into a miss."""
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
        """Count bytes of a transfer that has started."""
        with self._lock:
            self._bytes.consume(size)
            self.moved_bytes += size


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a client authenticated with. It holds the token's hash, so that it can be kept and compared again."""

    user: int | None = None
    token_hash: str = ""
    certificates: Sequence[str] = ()
    remote: bool = False
    """From another host: the client cannot map memory, and has no user id."""


class Admission:
    """Authenticates clients and holds the rate limits of tenants.

    Thread safety: the loop's thread; `rate_limit`, `rates` and reads of `tenants` from any thread.
    """

    def __init__(self, path: str, clock: Clock) -> None:
        """Read the tenants file at `path`, "" for none; ConfigError as `Tenants.read`."""
        self.path, self._clock = path, clock
        self.tenants = self.load_tenants()
        self._rate_limits: dict[str, RateLimit] = {}

    @property
    def isolates_tenants(self) -> bool:
        """Whether tenants are isolated: there is a tenants file."""
        return self.tenants is not None

    @property
    def count(self) -> int:
        """Number of tenants; 1 without isolation."""
        return 1 if self.tenants is None else len(self.tenants.by_name)

    def load_tenants(self) -> Tenants | None:
        """Read the file again; ConfigError where it is invalid. Nothing changes before `set_tenants`."""
        return Tenants.read(self.path) if self.path else None

    def set_tenants(self, tenants: Tenants | None) -> None:
        """Use these tenants and their limits from now on."""
        self.tenants = tenants
        for name, rate_limit in self.rate_limits.items():
            rate_limit.change((tenants.by_name if tenants is not None else {}).get(name, Tenant(name=name)))

    def tenant(self, credentials: Credentials) -> Tenant:
        """Return the tenant with these credentials.

        A token is checked alone: an unknown token does not fall back to certificate or user.

        Raises:
            AccessError: No tenant has them.
        """
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
                f"no tenant has this {what}: give token_file or KVCACHE_TOKEN, or add it to the tenants file of "
                f"the daemon (process {os.getpid()})"
            )
        return found

    def rate_limit(self, tenant: Tenant) -> RateLimit:
        """Return the tenant's rate limit. Thread safety: any thread."""
        found = self._rate_limits.get(tenant.name)
        return found or self._rate_limits.setdefault(tenant.name, RateLimit(tenant, self._clock))

    @property
    def rate_limits(self) -> dict[str, RateLimit]:
        """Limits by name, of tenants that have connected."""
        return dict(self._rate_limits)

    @property
    def rates(self) -> dict[str, dict[str, Any]]:
        """Limits a second (None for no limit) and counters, by tenant. Thread safety: any thread."""
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

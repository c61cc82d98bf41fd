"""Bytes that each tenant may take of a tier, and what others leave to it: from the tenants file to the cache."""

from __future__ import annotations

from kvcache.daemon.tenant import OPERATOR, Tenants
from kvcache.evict.shares import UNLIMITED, Limit
from kvcache.hierarchy.cache import Cache
from kvcache.settings.work import Tenant as Bytes
from kvcache.values import no_larger

TIERS = ("host", "nvme")


class Limits:
    """What a daemon has set of a cache's shares. A tenant of whom the file says nothing of bytes has what
    `evict.tenants` gives it."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._set: set[str] = set()
        self._given = dict(cache.settings.evict.tenants)
        host, nvme = cache.settings.host, cache.settings.nvme
        self._capacities = {"host": host.capacity_bytes, "nvme": nvme.capacity_bytes if nvme.enabled else 0}

    def set(self, tenants: Tenants | None) -> None:
        """ConfigError, before anything is changed, where the least shares together are more than there is."""
        wanted: dict[str, Bytes] = dict(self._given)
        for tenant in tenants.by_name.values() if tenants is not None else ():
            if tenant.name != OPERATOR and tenant.model_fields_set & Bytes.model_fields.keys():
                wanted[tenant.name] = tenant
        for tier in TIERS:
            least = sum(_of(given, tier).least_bytes for given in wanted.values())
            if self._capacities[tier]:
                no_larger(f"{tier}_least_bytes of all tenants", least, f"{tier}.capacity_bytes", self._capacities[tier])
        for name in self._set | wanted.keys():
            for tier in TIERS:
                self._cache.shares.set(name, tier, _of(wanted.get(name, Bytes()), tier))
        self._set = set(wanted)


def _of(given: Bytes, tier: str) -> Limit:
    quota: int | None = getattr(given, f"{tier}_quota_bytes")
    return Limit(UNLIMITED if quota is None else quota, getattr(given, f"{tier}_least_bytes"))

"""Bytes that each tenant may take of a tier, and what others leave to it: from the tenants file to the cache."""

from __future__ import annotations

from kvcache.cache.cache import Cache
from kvcache.daemon.tenant import OPERATOR, Tenants
from kvcache.evict.quotas import UNLIMITED, Limit
from kvcache.settings import Settings
from kvcache.settings.cache import Tenant as Bytes
from kvcache.settings.types import no_larger

TIERS = ("host", "nvme")


class Limits:
    """What a daemon has set of a cache's shares. A tenant of whom the file says nothing of bytes has what
    `evict.tenants` gives it."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._set: set[str] = set()

    def set(self, tenants: Tenants | None) -> None:
        """ConfigError, before anything is changed, where the least shares together are more than there is."""
        wanted = limits(self._cache.settings, tenants)
        for name in self._set | wanted.keys():
            for tier in TIERS:
                self._cache.shares.set(name, tier, _of(wanted.get(name, Bytes()), tier))
        self._set = set(wanted)


def limits(settings: Settings, tenants: Tenants | None) -> dict[str, Bytes]:
    """By tenant; ConfigError where the least shares together are more than there is."""
    wanted: dict[str, Bytes] = dict(settings.evict.tenants)
    for tenant in tenants.by_name.values() if tenants is not None else ():
        if tenant.name != OPERATOR and tenant.model_fields_set & Bytes.model_fields.keys():
            wanted[tenant.name] = tenant
    host, nvme = settings.host, settings.nvme
    for tier, capacity in (("host", host.capacity_bytes), ("nvme", nvme.capacity_bytes if nvme.enabled else 0)):
        least = sum(_of(given, tier).least_bytes for given in wanted.values())
        if capacity:
            no_larger(f"{tier}_least_bytes of all tenants", least, f"{tier}.capacity_bytes", capacity)
    return wanted


def _of(given: Bytes, tier: str) -> Limit:
    quota: int | None = getattr(given, f"{tier}_quota_bytes")
    return Limit(UNLIMITED if quota is None else quota, getattr(given, f"{tier}_least_bytes"))

"""Builds the components of a cache from its settings; describes tier sizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

from kvcache.block.cipher import CipherKeys
from kvcache.cache.canary import Canary
from kvcache.cache.context import Bypass, CacheContext
from kvcache.cache.expiry import Expiry
from kvcache.cache.holds import Holds
from kvcache.cache.load_plan import LoadPlan
from kvcache.cache.miss_explainer import MissExplainer
from kvcache.cache.pins import Pins
from kvcache.cache.shared_lookup import SharedLookup, SharedTier
from kvcache.cache.usage import UsageLog
from kvcache.errors import ConfigError
from kvcache.evict.hazard import Hazard
from kvcache.evict.policy import LRU, Policy
from kvcache.evict.quotas import UNLIMITED, Quota, Quotas
from kvcache.index.cost_classes import CostClasses
from kvcache.index.index import Index
from kvcache.index.mrc import MissRatioCurve
from kvcache.machine import file_system
from kvcache.observe.events import EventLog
from kvcache.observe.metrics import Counters
from kvcache.os_env import OsEnv
from kvcache.settings import Settings
from kvcache.settings.types import check_at_most, show_bytes
from kvcache.tier.host.tier import HostTier
from kvcache.tier.nvme import NvmeTier, open_drives
from kvcache.tier.record_codec import RecordCodec
from kvcache.tier.tier import Tier

MAX_KNOWN_BLOCKS = 1 << 18
"""Most blocks of a shared tier in the index, at about 100 bytes of memory each: 25 MB for 4 million tokens."""

_log = logging.getLogger("kvcache")


def build_context(settings: Settings, os_env: OsEnv, *, shared: bool, served_address: str) -> CacheContext:
    """Open the tiers and build the index and the components over them. Nothing is indexed yet.

    Args:
        shared: whether other processes may map the host memory.
        served_address: the address under which other processes reach this cache.
    """
    counters, events = Counters(), EventLog(os_env.clock)
    record_codec = record_codec_of(settings, counters)
    lower_tiers = open_lower_tiers(settings, os_env, served_address)
    quotas, tenants = quotas_of(settings), dict[bytes, str]()
    host = _open_host(settings, os_env, quotas, shared=shared)
    tiers, shared_tiers = (host, *lower_tiers), [cast(SharedTier, tier) for tier in lower_tiers if tier.shared]
    names = [tier.name for tier in tiers]
    index = Index(
        names, policy_of(settings), clock=os_env.clock, tenant_of=lambda namespace: tenants.get(namespace, "")
    )
    cost_classes = CostClasses(index, names, quotas)
    miss_explainer = MissExplainer(
        index, os_env.clock, settings.explain.memory_bytes, [tier.name for tier in shared_tiers]
    )
    index.subscribe(on_evicted=miss_explainer.on_evicted)
    background = os_env.executor(1, "curve")
    return CacheContext(
        settings=settings,
        os_env=os_env,
        background=background,
        index=index,
        tenants=tenants,
        host=host,
        lower_tiers=lower_tiers,
        record_codec=record_codec,
        cost_classes=cost_classes,
        counters=counters,
        events=events,
        miss_explainer=miss_explainer,
        usage_log=UsageLog(os_env.clock),
        curve=MissRatioCurve(
            {tier.name: tier.usage().capacity_bytes for tier in tiers if not tier.shared},
            index.policy,
            index.values,
            background.submit,
            samples=settings.evict.mrc_samples,
            refuses=host.name if not lower_tiers else "",
        ),
        bypass=Bypass(),
        canary=Canary(settings.canary.sample_rate, record_codec.error_bound, counters, os_env),
        expiry=Expiry(
            index=index,
            host=host,
            lower_tiers=lower_tiers,
            counters=counters,
            events=events,
            miss_explainer=miss_explainer,
            clock=os_env.clock,
        ),
        holds=Holds(index, tiers),
        pins=Pins(index, tiers, os_env.clock),
        plan=LoadPlan(os_env.clock, counters, enabled=settings.plan.enabled),
        shared_lookup=_shared_lookup(settings, shared_tiers, index, os_env),
    )


def _open_host(settings: Settings, os_env: OsEnv, quotas: Quotas, *, shared: bool) -> HostTier:
    return HostTier(
        capacity_bytes=settings.host.capacity_bytes,
        slab_bytes=settings.host.slab_bytes,
        verify_arena=settings.host.verify_arena,
        shared=shared,
        quota=lambda tenant: quotas.of(tenant, HostTier.name).quota_bytes,
        os_env=os_env,
    )


def _shared_lookup(settings: Settings, tiers: Sequence[SharedTier], index: Index, os_env: OsEnv) -> SharedLookup:
    return SharedLookup(
        tiers,
        index=index,
        os_env=os_env,
        max_known_blocks=MAX_KNOWN_BLOCKS,
        deadline_s=settings.flow.lookup_timeout_s,
    )


def open_lower_tiers(settings: Settings, os_env: OsEnv, served_address: str) -> list[Tier]:
    tiers: list[Tier] = []
    nvme = settings.nvme
    if nvme.enabled:
        for path in nvme.directories:
            if file_system(path) == "overlay":
                _log.warning(
                    "nvme.path = %r: in a container's own layer (overlay), slow and deleted with the "
                    "container; mount a volume there, or give another path",
                    str(path),
                )
        tiers.append(open_drives(nvme, served_address=served_address, os_env=os_env))
    return tiers + open_shared_tiers(settings, os_env)


def open_shared_tiers(settings: Settings, os_env: OsEnv) -> list[Tier]:
    """The shared tiers of the settings. Opening them connects to no server."""
    tiers: list[Tier] = []
    if settings.redis.enabled:
        from kvcache.tier.redis import RedisTier

        tiers.append(RedisTier(settings.redis, os_env))
    if settings.object.enabled:
        from kvcache.tier.object import ObjectTier

        tiers.append(ObjectTier(settings.object, os_env))
    return tiers


POLICIES: Mapping[str, type[Policy]] = {"hazard": Hazard, "lru": LRU}


def policy_of(settings: Settings) -> Policy:
    name = settings.evict.policy
    if name not in POLICIES:
        raise ConfigError(f"evict.policy = {name!r}: expected one of {', '.join(POLICIES)}")
    return POLICIES[name]()


def quotas_of(settings: Settings) -> Quotas:
    quotas, capacities = Quotas(), {"host": settings.host.capacity_bytes}
    if settings.nvme.enabled:
        capacities[NvmeTier.name] = settings.nvme.capacity_bytes
    for tier, capacity in capacities.items():
        for tenant, limits in settings.evict.tenants.items():
            quota, guaranteed = getattr(limits, f"{tier}_quota_bytes"), getattr(limits, f"{tier}_guaranteed_bytes")
            quotas.set(tenant, tier, Quota(UNLIMITED if quota is None else quota, guaranteed))
        guaranteed = sum(limit.guaranteed_bytes for limit in quotas.all(tier).values())
        check_at_most(
            f"{tier}_guaranteed_bytes of all in evict.tenants", guaranteed, f"{tier}.capacity_bytes", capacity
        )
    return quotas


def record_codec_of(settings: Settings, counters: Counters) -> RecordCodec:
    key_file = settings.encryption.key_file
    return RecordCodec(
        {NvmeTier.name: settings.nvme.codec} if settings.nvme.enabled else {},
        counters,
        keys=CipherKeys.of(key_file, "encryption.key_file") if key_file else None,
        accept_unencrypted=settings.encryption.accept_unencrypted,
    )


def check_settings(settings: Settings) -> None:
    """Raise ConfigError as opening a cache would, without opening a drive or connecting to a server.

    Causes are a missing key file or package, and guaranteed shares that do not fit.
    """
    policy_of(settings)
    quotas_of(settings)
    record_codec_of(settings, Counters())
    for tier in open_shared_tiers(settings, OsEnv()):
        tier.close()


def describe_size(tier: Tier) -> str:
    if tier.shared:
        return repr(tier)
    usage = tier.usage()
    return f"{show_bytes(usage.capacity_bytes)} with {usage.records} records"

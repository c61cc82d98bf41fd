"""Builds the parts of a cache from its settings: tiers, policy, quotas and record codec; describes tier sizes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from kvcache.block.cipher import CipherKeys
from kvcache.errors import ConfigError
from kvcache.evict.hazard import Hazard
from kvcache.evict.policy import LRU, Policy
from kvcache.evict.quotas import UNLIMITED, Quota, Quotas
from kvcache.machine import file_system
from kvcache.observe.metrics import Counters
from kvcache.os_env import OsEnv
from kvcache.settings import Settings
from kvcache.settings.types import check_at_most, show_bytes
from kvcache.tier.nvme import NvmeTier, open_drives
from kvcache.tier.record_codec import RecordCodec
from kvcache.tier.tier import Tier

# Tiers under host memory, the fastest first.

_log = logging.getLogger("kvcache")


def open_lower_tiers(settings: Settings, os_env: OsEnv, served_address: str) -> list[Tier]:
    tiers: list[Tier] = []
    nvme = settings.nvme
    if nvme.enabled:
        for path in nvme.directories:
            if file_system(path) == "overlay":
                _log.warning(
                    "nvme.path = %r: lies in a container's own layer (overlay), slow and gone with the container; "
                    "mount a volume there, or give another path",
                    str(path),
                )
        tiers.append(
            open_drives(
                [str(path) for path in nvme.directories],
                capacity_bytes=nvme.capacity_bytes,
                segment_bytes=nvme.segment_bytes,
                durability=nvme.durability,
                threads=nvme.threads,
                queue_bytes=nvme.queue_bytes,
                min_free_bytes=nvme.min_free_bytes,
                served_address=served_address,
                os_env=os_env,
            )
        )
    return tiers + open_shared_tiers(settings, os_env)


def open_shared_tiers(settings: Settings, os_env: OsEnv) -> list[Tier]:
    """The shared tiers of the settings. Opening them connects to no server."""
    tiers: list[Tier] = []
    redis = settings.redis
    if redis.enabled:
        from kvcache.tier.redis import RedisTier

        tiers.append(RedisTier(**redis.model_dump(exclude={"enabled", "write"}), os_env=os_env))
    if settings.object.enabled:
        from kvcache.tier.object import ObjectTier

        tiers.append(ObjectTier(**settings.object.model_dump(exclude={"enabled", "write"}), os_env=os_env))
    return tiers


POLICIES: Mapping[str, type[Policy]] = {"hazard": Hazard, "lru": LRU}


def policy_of(settings: Settings) -> Policy:
    name = settings.evict.policy
    if name not in POLICIES:
        raise ConfigError(f"evict.policy = {name!r}: no such policy; there is {', '.join(POLICIES)}")
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

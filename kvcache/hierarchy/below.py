"""The tiers below host that the settings ask for, the nearest first."""

from __future__ import annotations

import logging

from kvcache.machine import file_system
from kvcache.os_env import Port
from kvcache.settings import Settings
from kvcache.tier.nvme import open_drives
from kvcache.tier.tier import Tier

_log = logging.getLogger("kvcache")


def tiers_below(settings: Settings, port: Port, serves: str) -> list[Tier]:
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
                free_floor_bytes=nvme.free_floor_bytes,
                serves=serves,
                port=port,
            )
        )
    return tiers + far_tiers(settings, port)


def far_tiers(settings: Settings, port: Port) -> list[Tier]:
    """Those that others use as well. Opening them asks nobody anything."""
    tiers: list[Tier] = []
    redis = settings.redis
    if redis.enabled:
        from kvcache.tier.redis import RedisTier

        tiers.append(RedisTier(**redis.model_dump(exclude={"enabled", "write"}), port=port))
    if settings.object.enabled:
        from kvcache.tier.object import ObjectTier

        tiers.append(ObjectTier(**settings.object.model_dump(exclude={"enabled", "write"}), port=port))
    return tiers

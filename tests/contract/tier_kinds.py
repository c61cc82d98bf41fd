"""The tiers that there are, made small, for the suites of this folder. A new one is a line in `TIERS`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import NvmeSettings, ObjectSettings, RedisSettings
from kvcache.testing.memory_tier import MemoryTier
from kvcache.testing.tier import Factory, TierFixture, tier_fixture
from kvcache.tier.host.tier import HostTier
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme.drives import open_drives
from kvcache.tier.object import ObjectTier
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import Tier
from tests.peer.redis_server import MISSING, empty
from tests.peer.redis_topology import empty_cluster

MIB = 1 << 20


def nvme(path: Path, capacity_bytes: int, os_env: OsEnv, durability: Any = "batch") -> Tier:
    return NvmeTier(
        str(path / "nvme"),
        NvmeSettings(capacity_bytes=capacity_bytes, segment_bytes=MIB // 4, durability=durability, min_free_bytes=0),
        os_env=os_env,
    )


def drives(path: Path, capacity_bytes: int, os_env: OsEnv) -> Tier:
    return open_drives(
        NvmeSettings(
            paths=[str(path / "one"), str(path / "two")],
            capacity_bytes=capacity_bytes,
            segment_bytes=MIB // 4,
            min_free_bytes=0,
        ),
        os_env=os_env,
    )


def redis(path: Path, capacity_bytes: int, os_env: OsEnv) -> Tier:
    return RedisTier(RedisSettings(url=empty(path).unix), os_env=os_env)


def cluster(path: Path, capacity_bytes: int, os_env: OsEnv) -> Tier:
    return RedisTier(RedisSettings(url=empty_cluster(path).url, mode="cluster"), os_env=os_env)


def objects(path: Path, capacity_bytes: int, os_env: OsEnv) -> Tier:
    return ObjectTier(ObjectSettings(url=f"file://{path}/objects", pack_bytes=MIB), os_env=os_env)


TIERS: dict[str, Factory] = {
    "host": lambda path, capacity, os_env: HostTier(capacity_bytes=capacity, slab_bytes=MIB // 4, os_env=os_env),
    "host-verified": lambda path, capacity, os_env: HostTier(
        capacity_bytes=capacity, slab_bytes=MIB // 4, verify_arena=True, os_env=os_env
    ),
    "memory": lambda path, capacity, os_env: MemoryTier(capacity_bytes=capacity, os_env=os_env),
    "nvme-batch": nvme,
    "nvme-block": partial(nvme, durability="block"),
    "nvme-none": partial(nvme, durability="none"),
    "nvme-drives": drives,
    "redis": redis,
    "redis-cluster": cluster,
    "object": objects,
}
SHARED = {"redis", "redis-cluster", "object"}
"""Tiers whose room is not their own: how much fits is not theirs to say."""

_NEEDS = dict.fromkeys(SHARED - {"object"}, pytest.mark.skipif(bool(MISSING), reason=MISSING))
KINDS = [pytest.param(kind, marks=_NEEDS.get(kind, ())) for kind in TIERS]
OWN = [kind for kind in TIERS if kind not in SHARED]


def make(kind: str, path: Path) -> TierFixture:
    return tier_fixture(TIERS[kind], path)

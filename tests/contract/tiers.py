"""The tiers that there are, made small, for the suites of this folder. A new one is a line in `TIERS`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcache.os_env import Port
from kvcache.testing.memory_tier import MemoryTier
from kvcache.testing.tier import Bench, Factory, on_bench
from kvcache.tier.host.tier import HostTier
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme.drives import open_drives
from kvcache.tier.object import ObjectTier
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import Tier
from tests.peer.fleet import empty_cluster
from tests.peer.server import MISSING, empty

MIB = 1 << 20


def nvme(path: Path, capacity_bytes: int, port: Port, durability: Any = "batch") -> Tier:
    return NvmeTier(
        str(path / "nvme"),
        capacity_bytes=capacity_bytes,
        segment_bytes=MIB // 4,
        durability=durability,
        free_floor_bytes=0,
        port=port,
    )


def drives(path: Path, capacity_bytes: int, port: Port) -> Tier:
    return open_drives(
        [str(path / "one"), str(path / "two")],
        capacity_bytes=capacity_bytes,
        segment_bytes=MIB // 4,
        free_floor_bytes=0,
        port=port,
    )


def redis(path: Path, capacity_bytes: int, port: Port) -> Tier:
    return RedisTier(empty(path).unix, port=port)


def cluster(path: Path, capacity_bytes: int, port: Port) -> Tier:
    return RedisTier(empty_cluster(path).url, mode="cluster", port=port)


def objects(path: Path, capacity_bytes: int, port: Port) -> Tier:
    return ObjectTier(f"file://{path}/objects", pack_bytes=MIB, port=port)


TIERS: dict[str, Factory] = {
    "host": lambda path, capacity, port: HostTier(capacity_bytes=capacity, extent_bytes=MIB // 4, port=port),
    "host-verified": lambda path, capacity, port: HostTier(
        capacity_bytes=capacity, extent_bytes=MIB // 4, verify_arena=True, port=port
    ),
    "memory": lambda path, capacity, port: MemoryTier(capacity_bytes=capacity, port=port),
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


def make(kind: str, path: Path) -> Bench:
    return on_bench(TIERS[kind], path)

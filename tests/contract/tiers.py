"""The tiers that there are, made small, for the suites of this folder. A new one is a line in `TIERS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.address import Address
from kvcache.port import Port, SystemClock
from kvcache.tier.host import HostTier
from kvcache.tier.memory import MemoryTier
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme.drives import open_drives
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import Outcome, Tier
from tests.peer.fleet import empty_cluster
from tests.peer.server import MISSING, empty
from tests.tier.blocks import PAYLOAD_BYTES, buffer, holds, record

DONE, ABSENT, LATE = Outcome.DONE, Outcome.ABSENT, Outcome.LATE
MIB = 1 << 20
CAPACITY = 4 * MIB

Factory = Callable[[Path, int, Port], Tier]


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
}
SHARED = {"redis", "redis-cluster"}
"""Tiers whose room is not their own: how much fits is not theirs to say."""

_NEEDS = dict.fromkeys(SHARED, pytest.mark.skipif(bool(MISSING), reason=MISSING))
KINDS = [pytest.param(kind, marks=_NEEDS.get(kind, ())) for kind in TIERS]
OWN = [kind for kind in TIERS if kind not in SHARED]


class Clock(SystemClock):
    """Time that stands still unless a test moves it."""

    seconds = 100.0

    def now(self) -> float:
        return self.seconds


@dataclass
class Bench:
    """A tier, and how to open it again."""

    factory: Factory
    path: Path
    clock: Clock
    tier: Tier

    def reopen(self, capacity_bytes: int = CAPACITY) -> Tier:
        self.tier.close()
        self.tier = self.factory(self.path, capacity_bytes, Port(clock=self.clock))
        return self.tier


def make(kind: str, path: Path) -> Bench:
    clock = Clock()
    return Bench(TIERS[kind], path, clock, TIERS[kind](path, CAPACITY, Port(clock=clock)))


def write(tier: Tier, addresses: list[Address], size_bytes: int = PAYLOAD_BYTES) -> tuple[Outcome, ...]:
    return tier.write(addresses, [record(address, size_bytes) for address in addresses])


def intact(tier: Tier, addresses: list[Address], size_bytes: int = PAYLOAD_BYTES) -> bool:
    """Every record is there and is what was written."""
    into = [buffer(size_bytes) for _ in addresses]
    outcomes = tier.read(addresses, into)
    return set(outcomes) <= {DONE} and all(map(partial(_holds, size_bytes), into, addresses))


def _holds(size_bytes: int, segments: list[memoryview], address: Address) -> bool:
    return holds(segments, address, size_bytes)

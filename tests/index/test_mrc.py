"""The live miss-ratio curve: what it says is what the simulator finds with so much memory, within two points."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.record import record_bytes
from kvcache.cache.cache import Cache
from kvcache.cache.factory import POLICIES
from kvcache.index.cost_classes import ModelShape
from kvcache.index.index import Index
from kvcache.index.mrc import CAPACITY_FACTORS, MAX_LABELS, MAX_PENDING_REQUESTS, OTHER_LABEL, MissRatioCurve
from kvcache.os_env import InlineExecutor, OsEnv
from kvcache.settings.sources import load
from kvcache.trace.formats import Trace, read_trace
from kvcache.trace.simulate import simulate
from tests.trace.test_simulate import traffic

POINTS = 0.02
LAYOUT = kvcache.KVLayout.mha(layers=1, kv_heads=1, head_dim=8, dtype="fp32", block_tokens=16)
SLOT_BYTES = record_bytes(LAYOUT.block_bytes())
TRACES = Path(__file__).parents[2].parent / "shared" / "data" / "traces"


def names_of(trace: Trace) -> list[bytes]:
    return [sha256(b"%s %d" % (trace.name.encode(), block)).digest() for block in range(trace.unique)]


def live(trace: Trace, room: int, policy: str, who: Any = lambda i: {}, **evict: Any) -> dict[str, Any]:
    """The trace served by a cache with so many slots in host alone."""
    names = names_of(trace)
    longest = max(len(chain) for chain in trace)
    tensors: Any = np.zeros((1, 2, longest, 16, 1, 8), np.float32)
    pages = [kvcache.GroupPages.from_tensors(LAYOUT, tensors, axes=("kv", "page", "token", "head", "dim"))]
    settings = load(
        environ={},
        host={"capacity_bytes": room * SLOT_BYTES, "slab_bytes": room * SLOT_BYTES},
        nvme={"enabled": False},
        evict={"policy": policy, **evict},
    )
    with Cache(settings, OsEnv(executor=lambda threads, name: InlineExecutor())) as cache:
        for i, chain in enumerate(trace):
            fields = who(i)
            tenant = fields.pop("tenant", "default")
            with cache.namespace(LAYOUT, model="m", revision="1", tenant=tenant).request(**fields) as r:
                hit = r.match(digests=[names[block] for block in chain])
                r.admit()
                r.store(pages, [list(range(len(chain) - hit.blocks))], first_block=hit.blocks).wait()
        told = cache.curve()
        assert (
            cache.stats()["curve"]["host"]["1"]
            == told["tiers"]["host"]["points"][CAPACITY_FACTORS.index(1)]["hit_rate"]
        )
        return told


def expected(trace: Trace, room: int, policy: str) -> list[float]:
    return [simulate(trace, policy, max(1, int(times * room))).hit_rate for times in CAPACITY_FACTORS]


def rates(told: dict[str, Any], tier: str = "host") -> list[float]:
    return [point["hit_rate"] for point in told["tiers"][tier]["points"]]


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("seed", [1, 2])
def test_the_curve_equals_the_simulator(policy: str, seed: int) -> None:
    trace = traffic(seed, 500)
    told = live(trace, 64, policy)
    assert told["requests"] == sum(len(chain) > 0 for chain in trace)
    assert told["skipped_requests"] == 0
    found, true = rates(told), expected(trace, 64, policy)
    assert max(abs(a - b) for a, b in zip(found, true, strict=True)) <= POINTS
    assert found[-1] > found[0]


def of_trace(trace: Trace, room: int, policy: str, samples: int, block_bytes: int = 1 << 16) -> dict[str, Any]:
    """As a cache would feed it, without its bytes: an index lives the trace for the tables."""
    names = names_of(trace)
    index = Index(["host"], POLICIES[policy]())
    model = ModelShape(("m",), trace.block_tokens, (block_bytes,))
    curve = MissRatioCurve(
        {"host": room * block_bytes}, index.policy, index.values, lambda call: call(), samples=samples, refuses="host"
    )
    from kvcache.index.block_run import BlockRun, pack_shard_key

    space = bytes(32)
    shard_key = pack_shard_key(space, 0, LAYOUT.whole[0])
    for chain in trace:
        packed = b"".join(names[block] for block in chain)
        now = index.tick()
        masks = index.tier_masks(BlockRun(shard_key, packed))
        found = len(masks) if 0 not in masks else masks.index(0)
        index.touch(BlockRun(shard_key, packed).part(0, found), now)
        lacking = len(masks) - found
        free = room - index.resident("host")
        if lacking > free:
            free += len(index.evict("host", lacking - free, before=now, worth=0))
        kept = min(lacking, free)
        parent = packed[32 * found - 32 : 32 * found] if found else space
        index.insert_run(BlockRun(shard_key, packed).part(found, found + kept), parent, "host")
        curve.add(packed, len(chain), model, ("t", "a", "n"))
    return curve.report()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_sampled_curve_is_within_two_points(policy: str) -> None:
    trace, room = traffic(7, 3000, heads=200, longest=30), 4000
    told = of_trace(trace, room, policy, samples=1024)
    tier = told["tiers"]["host"]
    assert tier["sample_bytes"] > 1 << 16  # not each block is looked at
    found, true = rates(told), expected(trace, room, policy)
    assert max(abs(a - b) for a, b in zip(found, true, strict=True)) <= POINTS
    assert tier["by"]["tenant"]["t"]["hit_rates"] == found


@pytest.mark.parametrize(("file", "share"), [("mooncake-conversation", 0.05), ("mooncake-synthetic", 0.2)])
def test_real_traffic_within_two_points(file: str, share: float) -> None:
    path = TRACES / f"{file}.jsonl.gz"
    if not path.exists():
        pytest.skip("the traces are not shipped: ../shared/data/traces is not here")
    trace = read_trace(path, "mooncake").part(0, 3000)
    room = round(share * trace.unique)
    told = of_trace(trace, room, "hazard", samples=2048)
    assert max(abs(a - b) for a, b in zip(rates(told), expected(trace, room, "hazard"), strict=True)) <= POINTS


def test_the_curve_is_split_by_tenant_agent_and_namespace() -> None:
    trace = traffic(3, 300)

    def who(i: int) -> dict[str, Any]:
        return {"tenant": "one" if i % 3 else "two", "agent": f"agent {i % 5}" if i % 5 else None}

    told = live(trace, 64, "hazard", who)
    by = told["tiers"]["host"]["by"]
    asked = told["tiers"]["host"]["asked_tokens"]
    assert set(by["tenant"]) == {"one", "two"}
    assert set(by["agent"]) == {"", *(f"agent {i}" for i in range(1, 5))}
    assert len(by["namespace"]) == 2
    for counts in by.values():
        assert sum(count["asked_tokens"] for count in counts.values()) == asked
        found = sum(count["hit_rates"][2] * count["asked_tokens"] for count in counts.values())
        assert abs(found - asked * rates(told)[2]) < 2


def test_labels_and_pending_requests_are_bounded() -> None:
    index = Index(["host"], POLICIES["lru"]())
    calls: list[Any] = []
    curve = MissRatioCurve({"host": 1 << 30}, index.policy, index.values, calls.append, samples=16)
    model = ModelShape(("m",), 16, (4096,))
    for i in range(MAX_PENDING_REQUESTS + 100):
        curve.add(sha256(b"%d" % i).digest(), 1, model, (f"tenant {i}", "", "n"))
    told = curve.report()
    assert told["skipped_requests"] == 100
    assert len(told["tiers"]["host"]["by"]["tenant"]) == MAX_LABELS + 1
    assert told["tiers"]["host"]["by"]["tenant"][OTHER_LABEL]["asked_tokens"] == 16 * (
        MAX_PENDING_REQUESTS - MAX_LABELS
    )
    assert len(calls) == MAX_PENDING_REQUESTS // 32


def test_blocks_of_two_sizes_stand_for_their_bytes() -> None:
    """A tier filled by small and large blocks in turn, each asked for again after the same while: with twice that room
    all are found, with half of it none, whatever their sizes."""
    index = Index(["host"], POLICIES["lru"]())
    small, large = ModelShape(("a",), 16, (1 << 12,)), ModelShape(("b",), 16, (1 << 16,))
    round_bytes = 2000 * ((1 << 12) + (1 << 16))
    curve = MissRatioCurve({"host": round_bytes}, index.policy, index.values, lambda call: call(), samples=500)
    for _ in range(6):
        for i in range(2000):
            for model in (large, small):
                index.tick()
                curve.add(sha256(f"{model.name} {i}".encode()).digest(), 1, model, ("t", "", model.name[0]))
    tier = curve.report()["tiers"]["host"]
    for name in ("a", "b"):
        found = tier["by"]["namespace"][name]["hit_rates"]
        assert found[0] == found[1] == 0
        assert found[3] == found[4] > 0.75


def test_zero_samples_disable_the_curve() -> None:
    told = live(traffic(1, 20), 64, "lru", mrc_samples=1)
    assert told["tiers"]
    settings = load(environ={}, host={"capacity_bytes": "1MiB"}, nvme={"enabled": False}, evict={"mrc_samples": 0})
    with Cache(settings) as cache:
        assert cache.curve()["tiers"] == {}
        assert cache.stats()["curve"] == {}


def test_each_tier_has_its_own_curve(tmp_path: Path) -> None:
    nvme = {"path": tmp_path, "capacity_bytes": "4MiB", "segment_bytes": "256KiB", "min_free_bytes": 0}
    settings = load(environ={}, host={"capacity_bytes": "1MiB"}, nvme=nvme)
    with Cache(settings, OsEnv(executor=lambda threads, name: InlineExecutor())) as cache:
        bound = cache.namespace(LAYOUT, model="m", revision="1")
        for i in range(80):
            with bound.request() as r:
                r.match(range(16 * (i % 40), 16 * (i % 40) + 160))
                r.admit()
        told = cache.curve()
        assert [tier["capacity_bytes"] for tier in told["tiers"].values()] == [1 << 20, 4 << 20]
        assert rates(told, "nvme")[0] == rates(told, "host")[2]
        assert rates(told, "nvme")[-1] > 0.4

"""Room in a full host tier: what it costs, and that no mix of sizes and tenants can use it up."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import Group, KVLayout
from kvcache.block.record import record_bytes
from kvcache.cache import tier_manager as flow
from kvcache.cache.cache import Cache
from kvcache.os_env import InlineExecutor, OsEnv
from kvcache.settings.sources import load
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import GroupPages
from tests.call_counts import calls
from tests.contract.fake_engine import flushed

KiB = 1 << 10
EXTENT = 96 * KiB
INLINE = OsEnv(executor=lambda threads, name: InlineExecutor())


def layout(head_dim: int, **more: Any) -> KVLayout:
    return KVLayout.mha(layers=1, kv_heads=1, head_dim=head_dim, dtype="fp32", block_tokens=4, **more)


SMALL, MIDDLE, LARGE = layout(64), layout(256), layout(1024)  # records of 8, 12 and 36 KiB


def opened(slabs: int, place: Path | None = None, os_env: OsEnv = INLINE) -> Cache:
    nvme: dict[str, Any] = {"enabled": False}
    if place is not None:
        nvme = {
            "path": place,
            "capacity_bytes": "2MiB",
            "segment_bytes": "192KiB",
            "min_free_bytes": 0,
            "durability": "none",
        }
    host = {"capacity_bytes": slabs * EXTENT, "slab_bytes": EXTENT}
    lru = {"policy": "lru"}  # every block is admitted: this is about room, not about worth
    return Cache(load(host=host, nvme=nvme, evict=lru), os_env)


def pages(of: KVLayout, count: int, value: float = 0) -> list[GroupPages]:
    made = []
    for number, group in enumerate(of.groups):
        tensor = np.full((2, count, of.block_tokens, group.kv_heads, group.head_dim), value, np.float32)
        axes = ("kv", "page", "token", "head", "dim")
        made.append(GroupPages.from_tensors(of, [tensor], axes=axes, group=number))
    return made


def chain(number: int, blocks: int) -> np.ndarray[Any, Any]:
    return np.arange(4 * blocks, dtype=np.uint32) + 1_000_000 * number


def put(cache: Cache, of: KVLayout, number: int, blocks: int, tenant: str = "a") -> int:
    with cache.namespace(of, model="m", revision="r", tenant=tenant).request() as r:
        r.match(chain(number, blocks))
        stored = r.store(pages(of, blocks, number), [list(range(blocks))] * len(of.groups))
        assert stored.wait(60)
        assert set(stored.outcomes) <= {Outcome.DONE, Outcome.DROPPED}
        return stored.blocks


def found(cache: Cache, of: KVLayout, number: int, blocks: int, tenant: str = "a") -> int:
    """How many come back, each with what was stored."""
    into = pages(of, blocks, -1)
    with cache.namespace(of, model="m", revision="r", tenant=tenant).request() as r:
        hit = r.match(chain(number, blocks))
        r.admit()
        loaded = r.load(hit.blocks, into, [list(range(hit.blocks))] * len(of.groups))
        assert loaded.wait(60)
    for part in into:
        assert (part.owner[0][:, : loaded.blocks] == number).all()
    return loaded.blocks


def test_store_cost_does_not_grow_with_the_tiers_size() -> None:
    blocks, costs = 32, {}
    for slabs in (8, 256):
        with closing(opened(slabs)) as cache:
            full = slabs * EXTENT // record_bytes(SMALL.block_bytes())
            for number in range(full // blocks + 2):
                put(cache, SMALL, number, blocks)
            assert cache.host.usage().records == full
            before = cache.counters.get("evicted_blocks")
            costs[slabs] = calls(lambda cache=cache: put(cache, SMALL, 1_000, blocks))  # type: ignore[misc]
            assert cache.counters.get("evicted_blocks") - before == blocks
    few, many = (sum(cost.values()) for cost in costs.values())
    assert abs(many - few) <= 0.02 * few, costs[256] - costs[8]
    assert max(costs[256]["Index.evict"], costs[256]["Flow.slots"]) <= 2, "victims and slots come by the window"


@pytest.mark.parametrize("drive", [False, True], ids=["host", "host+nvme"])
def test_mixed_sizes_and_tenants_leave_no_faults(drive: bool, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whatever came before, the next store finds room: the newest chain is always there, whole."""
    turns = 4000 if request.config.getoption("--long") else 400
    rng = random.Random(drive)
    with closing(opened(6, tmp_path / "nvme" if drive else None)) as cache:
        for turn in range(turns):
            of, tenant = rng.choice([SMALL, MIDDLE, LARGE]), rng.choice("abcde")
            blocks = rng.randrange(1, 1 + (2 * EXTENT) // record_bytes(of.block_bytes()))
            assert put(cache, of, turn, blocks, tenant) == blocks, f"turn {turn}: no room for {blocks} of {of.groups}"
            assert found(cache, of, turn, blocks, tenant) == blocks
            if turn % 20 == 0:
                assert flushed(cache)
                assert cache.check() == []
        if drive:
            assert flushed(cache)
            assert cache.counters.get("written_blocks", tier="nvme") > 0
            assert cache.counters.get("drops") == 0
        assert cache.check() == []


def test_a_burst_of_one_size_spares_used_blocks_of_another() -> None:
    """Victims leave by value, not because their extent was at hand."""
    with closing(opened(8)) as cache:
        put(cache, MIDDLE, 0, 8)
        for number in range(1, 200):
            put(cache, SMALL, number, 6)
            assert found(cache, MIDDLE, 0, 8) == 8, f"after {number} chains of the other size"
        assert cache.check() == []


def test_an_idle_model_releases_all_its_extents() -> None:
    with closing(opened(8)) as cache:
        for number in range(8):
            put(cache, LARGE, number, 2)
        kinds = {slab.slot_bytes for slab in cache.host.arena.slabs()}
        assert kinds == {record_bytes(LARGE.block_bytes())}
        for number in range(100, 300):
            assert put(cache, SMALL, number, 6) == 6
        assert {slab.slot_bytes for slab in cache.host.arena.slabs()} == {record_bytes(SMALL.block_bytes())}
        assert cache.index.resident("host") == 8 * EXTENT // record_bytes(SMALL.block_bytes())


def test_evacuating_an_extent_loses_no_record() -> None:
    """Every second record of one size is old. Room for the other size takes those, and the rest moves together."""
    with closing(opened(4)) as cache:
        for number in range(48):
            put(cache, SMALL, number, 1)
        for number in range(0, 48, 2):
            assert found(cache, SMALL, number, 1) == 1
        moved: list[bytes] = []
        within = cache.host._move

        def spy(slot: Any, target: Any) -> bool:
            moved.append(slot.name)
            return within(slot, target)

        cache.host._move = spy  # type: ignore[method-assign]
        assert put(cache, MIDDLE, 100, 8) == 8
        assert moved, "there was nothing to move"
        assert [found(cache, SMALL, number, 1) for number in range(0, 48, 2)] == [1] * 24
        gone = cache.counters.get("evicted_blocks", tier="host")
        assert 12 <= gone <= 16, "an extent's worth of twelve, taken by eights"
        assert cache.check() == []


def test_a_record_under_read_is_not_moved() -> None:
    with closing(opened(4)) as cache:
        for number in range(48):
            put(cache, SMALL, number, 1)
        borrowed = [cache.host.acquire(address) for address in list(cache.host.scan())[::12]]  # one in each extent
        assert len({held.slot.slab for held in borrowed if held}) == 4
        assert put(cache, MIDDLE, 100, 8) == 0, "no extent can be emptied while each is read"
        for held in borrowed:
            assert held is not None
            assert held.slot.slab.slots[held.slot.i] is held.slot
            cache.host.arena.release(held.slot)
        assert put(cache, MIDDLE, 101, 8) == 8, "and it comes back by itself"
        assert cache.check() == []


def test_groups_of_different_sizes_share_a_full_tier() -> None:
    """A chain of a hybrid model that is longer than the tier keeps its head, and all groups of it."""
    hybrid = KVLayout(
        (
            Group(layers=1, kv_heads=1, head_dim=64, dtype="fp32"),
            Group(layers=1, kv_heads=1, head_dim=256, dtype="fp32", name="wide"),
        ),
        block_tokens=4,
    )
    with closing(opened(6)) as cache:
        kept = put(cache, hybrid, 1, 200)
        assert kept >= 6 * EXTENT // (20 * KiB) - EXTENT // (8 * KiB), "up to an extent may be of the wrong kind"
        assert found(cache, hybrid, 1, 200) == kept
        assert cache.check() == []


def test_extents_of_departed_tenants_are_released() -> None:
    with closing(opened(4)) as cache:
        for number in range(50):
            put(cache, SMALL, number, 4, tenant=f"t{number}")
        assert len(cache.host.arena._slabs) <= 4
        assert len(cache.host.arena._open) <= 4


def test_a_failed_copy_returns_its_slots() -> None:
    """Several windows are under way when the device fails."""

    class Broken:
        def of(self, device: str) -> Any:
            return self

        def mark(self) -> None:
            pass

        def scatter(self, *_: Any, after: Any) -> Any:
            raise OSError("the device is gone")

    with closing(opened(6)) as cache:
        put(cache, LARGE, 1, 8)
        handle = cache.namespace(LARGE, model="m", revision="r", tenant="a")
        handle.copiers = Broken()  # type: ignore[assignment]
        with handle.request() as r:
            assert r.match(chain(1, 8)).blocks == 8
            assert set(r.load(8, pages(LARGE, 8), [list(range(8))]).outcomes) == {kvcache.Outcome.FAILED}
        slots = [slot for slab in cache.host.arena.slabs() for slot in slab.slots.values()]
        assert {slot.references for slot in slots} == {1}
        assert cache.index.held() == 0


OTHER = layout(512)  # of a fourth model: records of 20 KiB


def left(cache: Cache, of: KVLayout) -> int:
    """How many records of a layout are in host."""
    return sum(len(e.slots) for e in cache.host.arena.slabs() if e.slot_bytes == record_bytes(of.block_bytes()))


def in_vain(cache: Cache) -> None:
    """Three full extents of a model each. What is the oldest is more than an extent holds, and leaves none empty: of
    SMALL 6 newer ones stay and of LARGE 1, of MIDDLE 6 that were not used for long: the most bytes."""
    for of, numbers in ((SMALL, range(6)), (LARGE, range(1)), (MIDDLE, range(2)), (MIDDLE, range(2, 8))):
        for number in numbers:
            assert put(cache, of, number, 1) == 1
    for _ in range(300):
        cache.index.tick()
    for of, numbers in ((SMALL, range(6, 12)), (LARGE, range(1, 2))):
        for number in numbers:
            assert put(cache, of, number, 1) == 1
    assert [left(cache, of) for of in (SMALL, MIDDLE, LARGE)] == [12, 8, 2]


asked = pytest.mark.parametrize("asked", [flow.MAX_SAMPLED_RECORDS, 3], ids=["all", "one of each extent"])


@asked
def test_the_least_valuable_extent_is_evacuated(asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MAX_SAMPLED_RECORDS", asked)
    monkeypatch.setattr(flow, "MIN_SAMPLED_RECORDS", 1)
    with closing(opened(3)) as cache:
        in_vain(cache)
        assert put(cache, OTHER, 100, 1) == 1
        assert found(cache, OTHER, 100, 1) == 1
        assert [left(cache, of) for of in (SMALL, MIDDLE, LARGE)] == [6, 0, 1]
        assert [found(cache, MIDDLE, number, 1) for number in range(8)] == [0] * 8
        assert [found(cache, SMALL, number, 1) for number in range(6, 12)] == [1] * 6
        assert found(cache, LARGE, 1, 1) == 1
        assert cache.check() == []


@asked
@pytest.mark.parametrize("number", range(2, 8))
def test_an_extent_with_held_records_is_not_evacuated(number: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MAX_SAMPLED_RECORDS", asked)
    monkeypatch.setattr(flow, "MIN_SAMPLED_RECORDS", 1)
    with closing(opened(3)) as cache:
        in_vain(cache)
        with cache.namespace(MIDDLE, model="m", revision="r", tenant="a").request() as r:
            assert r.match(chain(number, 1)).blocks == 1
            r.admit()
            assert put(cache, OTHER, 100, 1) == 1
        assert [found(cache, MIDDLE, number, 1) for number in range(2, 8)] == [1] * 6
        assert found(cache, OTHER, 100, 1) == 1
        assert cache.check() == []


def test_choosing_an_extent_samples_a_bounded_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "MAX_SAMPLED_RECORDS", 48)
    monkeypatch.setattr(flow, "MIN_SAMPLED_RECORDS", 4)
    told: list[int] = []
    with closing(opened(40)) as cache:
        for number in range(40):
            assert put(cache, SMALL, number, 12) == 12
        worth = cache.cost_classes.worth
        monkeypatch.setattr(
            cache.cost_classes, "worth", lambda tier, there: told.append(len(there)) or worth(tier, there)
        )
        chosen = set()
        for _ in range(40):
            cache.index.tick()
            chosen.update(e.number for e in cache.tier_manager._cheapest_slabs(record_bytes(LARGE.block_bytes()), "a"))
            assert 0 < sum(told) <= 48
            told.clear()
    assert len(chosen) == 40, "another time others are asked"

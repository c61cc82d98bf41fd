"""Quotas and least shares of tenants, and what a byte is worth: kept under every policy, in host and on the drive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcache.block.record import record_bytes
from kvcache.cache.cache import Cache
from kvcache.cache.factory import POLICIES
from kvcache.errors import ConfigError
from kvcache.evict.quotas import UNLIMITED, Quota, Quotas
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.cost_classes import MAX_CLASSES, CostClass, CostClasses, ModelShape
from kvcache.index.index import Index
from kvcache.settings.sources import load
from tests.cache.test_reclaim import EXTENT, INLINE, LARGE, SMALL, found, put

KiB = 1 << 10
SLOT = record_bytes(SMALL.block_bytes())
policies = pytest.mark.parametrize("policy", sorted(POLICIES))


@contextmanager
def opened(policy: str, tenants: dict[str, Any], place: Path | None = None, slabs: int = 4) -> Iterator[Cache]:
    nvme: dict[str, Any] = {"enabled": False}
    if place is not None:
        nvme = {"path": place, "capacity_bytes": "2MiB", "segment_bytes": "192KiB", "min_free_bytes": 0}
        nvme["durability"] = "none"
    host = {"capacity_bytes": slabs * EXTENT, "slab_bytes": EXTENT}
    cache = Cache(load(environ={}, host=host, nvme=nvme, evict={"policy": policy, "tenants": tenants}), INLINE)
    with cache:
        yield cache
        assert cache.check() == []


def used(cache: Cache, tier: str) -> dict[str, int]:
    return cache.cost_classes.used_bytes(tier)


@policies
def test_a_greedy_tenant_leaves_others_their_host_share(policy: str) -> None:
    with opened(policy, {"small": {"host_guaranteed_bytes": 10 * SLOT}}) as cache:
        for i in range(3):
            assert put(cache, SMALL, i, 5, "small") == 5
        for i in range(40):  # the tier has 48 slots
            put(cache, SMALL, 100 + i, 8, "greedy")
            for again in range(3):  # and what it has is used much more often
                found(cache, SMALL, 100 + i - again, 8, "greedy")
            assert used(cache, "host")["small"] >= 10 * SLOT
        assert sum(found(cache, SMALL, i, 5, "small") for i in range(3)) >= 10


@policies
def test_a_tenant_below_its_share_evicts_any_block(policy: str) -> None:
    with opened(policy, {"late": {"host_guaranteed_bytes": 20 * SLOT}}) as cache:
        for turn in range(6):
            for i in range(6):
                put(cache, SMALL, i, 8, "early")
                found(cache, SMALL, i, 8, "early")
            assert turn < 1 or used(cache, "host")["early"] == 48 * SLOT
        for i in range(4):
            put(cache, SMALL, i, 5, "late")
        assert used(cache, "host")["late"] == 20 * SLOT


@policies
def test_a_host_quota_is_never_exceeded(policy: str) -> None:
    with opened(policy, {"bounded": {"host_quota_bytes": 12 * SLOT}}) as cache:
        for i in range(2):
            put(cache, SMALL, i, 5, "other")
        for i in range(10):
            put(cache, SMALL, i, 8, "bounded")
            assert used(cache, "host")["bounded"] <= 12 * SLOT
            assert cache.host.arena.spare_bytes("bounded") >= 0
        assert used(cache, "host") == {"other": 10 * SLOT, "bounded": 12 * SLOT}  # half of the tier is free
        assert put(cache, SMALL, 50, 13, "bounded") == 12  # none of its own may leave for itself


@policies
def test_quotas_and_shares_hold_on_the_drive(policy: str, tmp_path: Path) -> None:
    size = record_bytes(SMALL.block_bytes())
    tenants = {"small": {"nvme_guaranteed_bytes": 40 * size}, "bounded": {"nvme_quota_bytes": 24 * size}}
    with opened(policy, tenants, tmp_path) as cache:
        for i in range(6):
            put(cache, SMALL, i, 8, "small")
        for i in range(40):
            put(cache, SMALL, 100 + i, 8, "greedy")
            put(cache, SMALL, 300 + i, 4, "bounded")
            now = used(cache, "nvme")
            assert now["small"] >= 40 * size
            assert now.get("bounded", 0) <= 24 * size
        assert cache.counters.get("evicted_blocks", tier="nvme") > 100
        assert used(cache, "nvme")["bounded"] == 24 * size
        assert found(cache, SMALL, 339, 4, "bounded") == 4


def test_other_block_sizes_respect_a_share(tmp_path: Path) -> None:
    """Where a whole extent or segment would go to make room for another size, a share keeps it."""
    tenants = {"small": {"host_guaranteed_bytes": 10 * SLOT, "nvme_guaranteed_bytes": 30 * SLOT}}
    with opened("lru", tenants, tmp_path) as cache:
        for i in range(6):
            put(cache, SMALL, i, 6, "small")
        for i in range(40):
            put(cache, LARGE, 100 + i, 2, "greedy")
            assert used(cache, "host")["small"] >= 10 * SLOT
            assert used(cache, "nvme")["small"] >= 30 * SLOT
        assert used(cache, "nvme")["greedy"] > 0


def test_a_share_can_be_changed_at_run_time() -> None:
    with opened("lru", {}) as cache:
        put(cache, SMALL, 0, 10, "small")
        cache.quotas.set("small", "host", Quota(guaranteed_bytes=10 * SLOT))
        for i in range(12):
            put(cache, SMALL, 10 + i, 8, "greedy")
        assert used(cache, "host")["small"] == 10 * SLOT
        cache.quotas.set("small", "host", Quota())
        for i in range(12):
            put(cache, SMALL, 30 + i, 8, "greedy")
        assert "small" not in used(cache, "host") or used(cache, "host")["small"] == 0


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        ({"a": {"host_guaranteed_bytes": "1MiB"}}, r"evict.tenants = 1 MiB: more than host.capacity_bytes"),
        ({"a": {"host_quota_bytes": 10, "host_guaranteed_bytes": 11}}, "host_quota_bytes"),
        ({"a": {"host_quotum": 10}}, "evict.tenants.a.host_quotum"),
    ],
)
def test_limits_that_make_no_sense_are_refused_at_start(tenants: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        opened("lru", tenants).__enter__()


def test_limits_are_read_from_a_file_and_from_a_variable(tmp_path: Path) -> None:
    path = tmp_path / "kvcache.toml"
    path.write_text('[evict.tenants.acme]\nhost_quota_bytes = "8GiB"\n', encoding="utf-8")
    assert load(path, environ={}).evict.tenants["acme"].host_quota_bytes == 8 << 30
    environ = {"KVCACHE_EVICT__TENANTS": '{"acme": {"nvme_guaranteed_bytes": "1GiB"}}'}
    assert load(environ=environ).evict.tenants["acme"].nvme_guaranteed_bytes == 1 << 30
    with pytest.raises(ConfigError, match=r"KVCACHE_EVICT__TENANTS"):
        load(environ={"KVCACHE_EVICT__TENANTS": "no JSON"})


# what a byte is worth

LIGHT, DEAR, UNKNOWN = (ModelShape((name,), 16, (16 * KiB,)) for name in ("light", "dear", "unknown"))
SPACES = {model: bytes([i]) * 32 for i, model in enumerate((LIGHT, DEAR, UNKNOWN))}


def weighed(
    policy: str, paces: dict[ModelShape, float], tenants: Sequence[str] = ("t", "t", "t")
) -> tuple[Index, CostClasses]:
    index = Index(["host"], POLICIES[policy]())
    cost_classes = CostClasses(index, ["host"], Quotas())
    for (model, space), tenant in zip(SPACES.items(), tenants, strict=True):
        cost_classes.bind(CostClass(tenant, model, model.block_bytes), pack_shard_key(space, 0, SMALL.whole[0]))
    for tenant, model in zip(tenants, SPACES, strict=True):
        if model in paces:
            cost_classes.computed(tenant, model, 1000, 1000 * paces[model])
    return index, cost_classes


def come(index: Index, model: ModelShape, number: int) -> None:
    space = SPACES[model]
    signature = Random(f"{model.name} {number}").randbytes(32)
    index.insert_run(BlockRun(pack_shard_key(space, 0, SMALL.whole[0]), signature), space, "host")


@policies
def test_the_block_cheaper_to_compute_is_evicted(policy: str) -> None:
    index, cost_classes = weighed(policy, {LIGHT: 1e-5, DEAR: 1e-3})
    for i in range(20):
        for model in SPACES:
            come(index, model, i)
    for model in (LIGHT, UNKNOWN, DEAR):
        assert {victim.namespace for victim in cost_classes.evict("host", 20, tenant="t")} == {SPACES[model]}
    assert index.check() == []


def test_models_that_cost_about_the_same_are_ranked_by_use_alone() -> None:
    index, cost_classes = weighed("lru", {LIGHT: 1.00e-4, DEAR: 1.05e-4})
    for i in range(10):
        index.tick()
        for model in (DEAR, LIGHT):
            come(index, model, i)
    assert cost_classes.weights("host") == [1.0] * 4
    oldest = cost_classes.evict("host", 10, tenant="t")
    assert len({v.namespace for v in oldest}) == 2


def test_a_block_twice_as_large_is_worth_half_a_byte() -> None:
    index = Index(["host"], POLICIES["lru"]())
    cost_classes = CostClasses(index, ["host"], Quotas())
    small, large = ModelShape(("a",), 16, (1000,)), ModelShape(("b",), 16, (4000,))
    for i, model in enumerate((small, large)):
        cost_classes.bind(CostClass("t", model, model.block_bytes), pack_shard_key(bytes([i]) * 32, 0, SMALL.whole[0]))
        cost_classes.computed("t", model, 1000, 1.0)
    _, one, other = cost_classes.weights("host")
    assert one / other == 4
    assert one * other == 1


CLAIMS = st.tuples(
    st.sampled_from(["a", "b"]),
    st.sampled_from(list(SPACES)),
    st.integers(-(2**63), 2**63 + 1) | st.sampled_from([1, 1000, 2**31, 2**63, 10**400]),
    st.floats() | st.sampled_from([5e-324, 1e-9, 1.0, 1e300, 10**400]),
)


@given(st.lists(CLAIMS, max_size=12))
@example([("a", LIGHT, 2**63, 5e-324), ("a", DEAR, 1, 1e300)])
@example([("a", LIGHT, 1000, 1e-6), ("a", DEAR, 1, 1e3)])
def test_compute_claims_do_not_change_other_weights(
    claims: list[tuple[str, ModelShape, int, float]],
) -> None:
    index, cost_classes = weighed("lru", {LIGHT: 1e-5, DEAR: 1e-3}, ["c", "c", "a"])
    before = cost_classes.weights("host")
    for tenant, model, tokens, seconds in claims:
        cost_classes.computed(tenant, model, tokens, seconds)
        weights = cost_classes.weights("host")
        assert weights[:3] == before[:3], "what a tenant claims moved another's"
        assert all(2**-8 <= weight <= 2**8 for weight in weights)
    cost_classes.bind(CostClass("b", LIGHT, LIGHT.block_bytes), pack_shard_key(b"b" * 32, 0, SMALL.whole[0]))
    assert len(cost_classes.weights("host")) == 5
    for model in SPACES:
        come(index, model, 0)
    assert len(cost_classes.evict("host", 3, tenant="b")) == 3


def test_stores_continue_after_an_absurd_compute_claim() -> None:
    with opened("lru", {}) as cache:
        handle = cache.namespace(SMALL, model="claimed", revision="r", tenant="mad")
        for tokens, seconds in ((2**63, 5e-324), (1, 1e300), (1, 1e-300), (1000, 0.5)):
            handle.computed(tokens, seconds)
            for i in range(10):  # the tier has 48 slots
                assert put(cache, SMALL, i, 8, "other") == 8
                assert found(cache, SMALL, i, 8, "other") == 8


@given(
    has=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    least=st.lists(st.integers(0, 12), min_size=3, max_size=3),
    wants=st.integers(0, 2),
    count=st.integers(1, 50),
    own=st.booleans(),
)
def test_eviction_never_takes_a_tenant_below_its_share(
    has: list[int], least: list[int], wants: int, count: int, own: bool
) -> None:
    names = ["a", "b", "c"]
    index, cost_classes = weighed("hazard", {}, names)
    size = 16 * KiB
    for name, model, blocks, share in zip(names, SPACES, has, least, strict=True):
        cost_classes.quotas.set(name, "host", Quota(guaranteed_bytes=share * size))
        for i in range(blocks):
            come(index, model, i)
            index.tick()
    taken = 0
    while taken < count and (victims := cost_classes.evict("host", count - taken, tenant=names[wants], own=own)):
        taken += len(victims)
    now = cost_classes.used_bytes("host")
    may = 0
    for i, name in enumerate(names):
        floor = 0 if i == wants else has[i] if own else min(has[i], least[i])
        assert now[name] >= floor * size
        may += has[i] - floor
    assert taken == min(count, may)


def test_many_models_do_not_bypass_a_share(caplog: pytest.LogCaptureFixture) -> None:
    index = Index(["host"], POLICIES["lru"]())
    cost_classes = CostClasses(index, ["host"], Quotas())
    for i in range(MAX_CLASSES + 10):
        space = i.to_bytes(32, "little")
        cost_classes.bind(
            CostClass("t", ModelShape((str(i),), 16, (100,)), (100,)), pack_shard_key(space, 0, SMALL.whole[0])
        )
    for i in (0, MAX_CLASSES - 1, MAX_CLASSES + 9):
        space = i.to_bytes(32, "little")
        index.insert_run(BlockRun(pack_shard_key(space, 0, SMALL.whole[0]), bytes([i % 251]) * 32), space, "host")
    assert cost_classes.used_bytes("host") == {"t": 300}
    assert sum("kinds of blocks" in record.getMessage() for record in caplog.records) == 1
    cost_classes.bind(
        CostClass("late", LIGHT, (100,)), pack_shard_key(b"l" * 32, 0, SMALL.whole[0])
    )  # nothing to count it by
    assert len(cost_classes.evict("host", 3, tenant="late")) == 3


def test_limits_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ValueError, match="to the quota"):
        Quota(quota_bytes=1, guaranteed_bytes=2)
    quotas = Quotas()
    quotas.set("a", "host", Quota(5))
    quotas.set("a", "host", Quota())
    assert quotas.all("host") == {}
    assert quotas.evictable("a", "host", 7, to="b") == UNLIMITED

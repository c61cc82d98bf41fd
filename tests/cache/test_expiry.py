"""What a request or a namespace gave an end is a miss in every tier from then on, and leaves. On a clock that is
turned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.cache import expiry
from kvcache.cache.cache import Cache
from kvcache.errors import RequestError
from kvcache.os_env import OsEnv, SystemClock
from kvcache.settings.sources import load as load_settings
from kvcache.testing.naive_cache import NaiveCache
from kvcache.testing.tier import chain
from kvcache.tier.tier import Outcome, Ticket
from tests.cache.deferred_executor import DeferredExecutor
from tests.cache.test_object_tier import final_match, load
from tests.contract.fake_engine import FULL, HYBRID, Engine, bind, store
from tests.peer.redis_server import MISSING, empty

MiB = 1 << 20
TOKENS = list(range(40))  # ten blocks
PAGES = list(range(10))


class Clock(SystemClock):
    """Deadlines are real; what is written down for expiry stands still until it is turned."""

    ahead_s = 0.0

    def __init__(self) -> None:
        self._began = super().wall()

    def wall(self) -> float:
        return self._began + self.ahead_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Cache]]:
    """Opens caches on host and these tiers, all on one clock."""
    caches: list[Cache] = []

    def open_cache(
        *tiers: str, encrypted: bool = False, host_bytes: int = 8 * MiB, nvme: Any = None, **more: Any
    ) -> Cache:
        (tmp_path / "keys").write_text("11" * 32)
        settings = load_settings(
            None,
            host={"capacity_bytes": host_bytes},
            nvme={
                **(nvme or {}),
                "enabled": "nvme" in tiers,
                "path": tmp_path / "nvme",
                "capacity_bytes": 64 * MiB,
                "min_free_bytes": 0,
            },
            redis={"enabled": "redis" in tiers, "url": empty(tmp_path).unix if "redis" in tiers else "redis://h:1/0"},
            object={"enabled": "object" in tiers, "url": f"file://{tmp_path}/objects"},
            flow={"lookup_timeout_s": 30, "deadline_s": 30},
            encryption={"key_file": str(tmp_path / "keys") if encrypted else ""},
            control={"enabled": False},
            **more,
        )
        caches.append(Cache(settings, OsEnv(clock=clock)))
        return caches[-1]

    yield open_cache
    for cache in caches:
        if not cache._closed:
            assert cache.flush(30)
            assert cache.check() == []
            cache.close()


def kept(handle: Any, seed: int, *, ttl_s: float | None = None, first: int = 0, end: int = 10) -> list[bytes]:
    """Store these blocks; the bytes of all."""
    engine = Engine(handle.layout)
    engine.fill(seed, PAGES)
    with handle.request(ttl_s=ttl_s) as r:
        r.match(TOKENS)
        transfer = r.store(engine.described, engine.ids(list(range(first, end))), first_block=first)
        assert transfer.wait(30)
    return [engine.block(page) for page in PAGES]


def found(handle: Any) -> int:
    with handle.request() as r:
        return int(final_match(r, TOKENS).blocks)


def test_the_naive_cache_expires_blocks(clock: Clock) -> None:
    """The model: a dict that forgets."""
    cache = NaiveCache(clock)
    kept(bind(cache), 1, ttl_s=60)
    assert found(bind(cache)) == 10
    clock.ahead_s = 61
    assert found(bind(cache)) == 0
    assert cache.blocks == {}


@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["full", "hybrid"])
def test_a_block_is_a_hit_until_its_ttl_ends(opened: Any, clock: Clock, layout: Any) -> None:
    cache = opened("nvme")
    handle = bind(cache, layout)
    expected = kept(handle, 1, ttl_s=60)
    assert cache.flush(30)
    clock.ahead_s = 59
    assert load(handle, Engine(layout))[1] == expected
    clock.ahead_s = 61
    with handle.request() as r:
        hit = r.match(TOKENS)
        assert (hit.blocks, hit.reason) == (0, "expired")
    assert cache.flush(30)
    assert [tier.usage().records for tier in (cache.host, *cache.lower_tiers)] == [0, 0]
    assert cache.counters.get("expired_blocks", tier="host") == 10 * len(layout.groups)
    assert cache.counters.get("expired_blocks", tier="nvme") == 10 * len(layout.groups)
    assert found(handle) == 0
    kept(handle, 2)
    clock.ahead_s = 1e6
    assert found(handle) == 10


def test_a_requests_ttl_overrides_the_namespaces(opened: Any, clock: Clock) -> None:
    cache = opened()
    handle = cache.namespace(FULL, model="m", revision="1", ttl_s=600)
    same = cache.namespace(FULL, model="m", revision="1")
    assert handle.id == same.id
    kept(handle, 1, ttl_s=60, end=4)
    clock.ahead_s = 30
    kept(handle, 1, first=4, end=7)
    kept(same, 1, first=7)
    assert found(same) == 10
    clock.ahead_s = 61
    assert found(same) == 0  # what is behind the end has no head
    kept(same, 1, end=4)
    assert found(same) == 10
    clock.ahead_s = 700
    assert found(same) == 4


def test_a_block_stored_again_without_ttl_stays(opened: Any, clock: Clock) -> None:
    cache = opened()
    handle = bind(cache)
    kept(handle, 1, ttl_s=60)
    handle.clear()
    expected = kept(handle, 2)
    clock.ahead_s = 100
    assert load(handle, Engine(FULL))[1] == expected


def out_of_host(cache: Cache) -> None:
    """As if others had needed the room."""
    cache.host.remove([victim.address for victim in cache.index.evict(cache.host.name, 10)])


def test_the_last_store_decides_a_blocks_ttl(opened: Any, clock: Clock) -> None:
    """Also where only the drive has it, which no caller asks for its end."""
    cache = opened("nvme")
    handle = bind(cache)
    kept(handle, 1, ttl_s=60)
    assert cache.flush(30)
    handle.clear()
    expected = kept(handle, 2)
    assert cache.flush(30)
    out_of_host(cache)
    clock.ahead_s = 61
    assert load(handle, Engine(FULL)) == ({"nvme": 10}, expected)


def test_a_failed_removal_is_tried_again(opened: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened("nvme")
    handle = bind(cache)
    kept(handle, 1, ttl_s=60)
    assert cache.flush(30)
    (drive,) = cache.lower_tiers
    submit = drive.submit

    def full(op: Any, addresses: Any, *parts: Any, on_outcome: Any = None, **more: Any) -> Any:
        if op != "remove":
            return submit(op, addresses, *parts, on_outcome=on_outcome, **more)
        ticket = Ticket(len(addresses), on_outcome)
        taken = submit(op, addresses[::2], **more)
        assert taken.wait(30)
        for i in range(len(addresses)):
            ticket.settle(i, Outcome.DROPPED if i % 2 else taken.outcomes[i // 2])
        return ticket

    clock.ahead_s = 61
    with monkeypatch.context() as patched:
        patched.setattr(drive, "submit", full)
        found(handle)
        assert cache.flush(30)
    assert drive.usage().records == cache.index.resident("nvme") == 5
    assert cache.check() == []
    assert cache.counters.get("expired_blocks", tier="nvme") == 5
    clock.ahead_s = 63
    assert cache.flush(30)
    assert drive.usage().records == cache.index.resident("nvme") == 0
    assert cache.counters.get("expired_blocks", tier="nvme") == 10


def test_expired_blocks_miss_before_a_sweep_removes_them(
    opened: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = opened("nvme")
    handle = bind(cache)
    kept(handle, 1, ttl_s=60)
    assert cache.flush(30)
    monkeypatch.setattr(expiry, "MAX_SWEEP_RECORDS", 4)
    clock.ahead_s = 61
    assert found(handle) == 6  # tails left first
    assert cache.host.usage().records == 6
    with handle.request() as r:
        r.match(TOKENS)
        r.admit()
        engine = Engine(FULL)
        transfer = r.load(2, engine.described, engine.ids([0, 1]))
        assert transfer.wait(30)
        assert transfer.blocks == 0
    assert cache.flush(30)
    assert [tier.usage().records for tier in (cache.host, *cache.lower_tiers)] == [0, 0]


def noted(cache: Cache) -> int:
    return sum(len(run.addresses) for run in cache.expiry._ends)


def test_expiry_notes_are_bounded(opened: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened("nvme")
    handle = bind(cache)
    kept(handle, 1, ttl_s=60)
    assert cache.flush(30)
    for _ in range(3):
        out_of_host(cache)
        assert load(handle, Engine(FULL))[0] == {"nvme": 10}
        assert noted(cache) == 10
    monkeypatch.setattr(expiry, "MIN_COMPACT_RECORDS", 15)
    for i in range(8):
        other = bind(cache, model=f"m{i}")
        kept(other, 1, ttl_s=60)
        assert cache.flush(30)
        other.clear()
    assert noted(cache) == cache.expiry._noted <= 2 * 20 + 10
    assert len(cache.expiry._expiry_by_name) <= noted(cache)
    assert found(handle) == 10


@pytest.mark.parametrize("meanwhile", ["forgotten", "over"])
def test_a_block_demoted_from_host_keeps_its_ttl(
    opened: Any, clock: Clock, monkeypatch: pytest.MonkeyPatch, meanwhile: str
) -> None:
    """No tier has it while its copy waits to be written, and what is noted of ends is looked through then, or the end
    comes."""
    cache = opened("nvme", host_bytes=512 << 10, nvme={"write": "write_back"})
    handle, (lane,) = bind(cache), cache.tier_manager.write_back_queues
    kept(handle, 1, ttl_s=60)
    later, lane._executor = lane._executor, DeferredExecutor()
    try:
        for seed in range(40):
            store(handle, Engine(FULL), [1000 + seed, *range(39)], PAGES)
        assert found(handle) == 0
        waiting = lane._executor
        monkeypatch.setattr(expiry, "MIN_COMPACT_RECORDS", 0)
        if meanwhile == "forgotten":
            cache.expiry._compact()
            assert noted(cache) == 0
        else:
            clock.ahead_s = 61
            assert not cache.expiry.sweep()
        waiting.run()
    finally:
        lane._executor = later
    clock.ahead_s = 61
    assert found(handle) == 0
    assert cache.flush(30)
    there = {address.signature for address in cache.lower_tiers[0].scan()}
    with handle.request() as r:
        r.match(TOKENS)
        assert there & set(r.signatures) == set()


def test_close_stops_the_expiry_scan(opened: Any) -> None:
    cache = opened()
    asked = []

    def tell() -> Iterator[Any]:
        for i in range(10):
            asked.append(i)
            if i == 3:
                cache.close()
            yield chain(1)[0], 1

    cache.expiry.learn(tell)
    assert asked == [0, 1, 2, 3]


_REDIS = pytest.param("redis", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize(
    "tier", ["nvme", "object", pytest.param("redis", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING))]
)
def test_another_process_reads_the_ttl(opened: Any, clock: Clock, tier: str, encrypted: bool) -> None:
    """After a restart, or on another machine: what comes near keeps its end."""
    cache = opened(tier, encrypted=encrypted)
    expected = kept(bind(cache), 1, ttl_s=60)
    assert cache.flush(30)
    cache.close()
    clock.ahead_s = 30
    cache = opened(tier, encrypted=encrypted)
    handle = bind(cache)
    assert load(handle, Engine(FULL)) == ({tier: 10}, expected)
    with handle.request() as r:
        assert r.match(TOKENS).by_tier == {"host": 10}
    clock.ahead_s = 61
    assert load(handle, Engine(FULL))[1] == []
    assert cache.flush(30)
    assert cache.host.usage().records == 0
    cache.close()
    cache = opened(tier, encrypted=encrypted)
    assert load(bind(cache), Engine(FULL))[1] == []
    if tier != "redis":  # a server goes by its own clock, which the test does not turn
        assert found(bind(cache)) == 0


def test_after_a_restart_the_drive_removes_expired_blocks(opened: Any, clock: Clock) -> None:
    """Nobody asks for it: the journal says which records have an end."""
    cache = opened("nvme")
    kept(bind(cache), 1, ttl_s=60)
    other = bind(cache, model="other")
    expected = kept(other, 2)
    assert cache.flush(30)
    cache.close()
    clock.ahead_s = 61
    cache = opened("nvme")
    (drive,) = cache.lower_tiers
    assert drive.usage().records == 20
    for future in cache.ttl_scans:
        future.result()
    assert cache.flush(30)
    assert drive.usage().records == 10
    assert load(bind(cache, model="other"), Engine(FULL))[1] == expected


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_server_expires_its_keys(opened: Any, tmp_path: Path) -> None:
    cache = opened("redis")
    handle = bind(cache)
    kept(handle, 1, ttl_s=600, end=5)
    kept(handle, 1, first=5)
    assert cache.flush(30)
    client = empty(tmp_path).client
    lives = sorted(client.ttl(name) for name in client.scan_iter() if not name.endswith(b":owner"))
    assert lives[:5] == [-1] * 5
    assert all(500 < life <= 600 for life in lives[5:])
    assert len(lives) == 10


@pytest.mark.parametrize("ttl_s", [0, -1, float("nan"), float("inf"), "soon"])
def test_a_ttl_that_is_not_positive_is_refused(opened: Any, ttl_s: Any) -> None:
    cache = opened()
    with pytest.raises(RequestError, match="ttl_s"):
        bind(cache).request(ttl_s=ttl_s)
    with pytest.raises(RequestError, match="ttl_s"):
        cache.namespace(FULL, model="m", revision="1", ttl_s=ttl_s)


def test_blocks_without_ttl_never_expire(opened: Any, clock: Clock) -> None:
    cache = opened("nvme", "object")
    handle = bind(cache)
    engine = Engine(FULL)
    store(handle, engine, TOKENS, PAGES)
    assert cache.flush(30)
    clock.ahead_s = 1e9
    assert found(handle) == 10
    assert cache.counters.get("expired_blocks") == 0

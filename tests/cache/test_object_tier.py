"""A cache whose last tier is an object store: what is in no tier before it comes from there, within the deadline."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from tests.contract.fake_engine import FULL, HYBRID, Engine, bind, store, wait_background
from tests.peer.redis_server import MISSING, RedisServer, empty

MiB = 1 << 20
TOKENS = list(range(40))  # ten blocks
Open = Callable[..., Any]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    caches: list[Any] = []

    def open_cache(nvme: str = "", redis: RedisServer | None = None, flow: Any = None, **given: Any) -> Any:
        caches.append(
            kvcache.open(
                host={"capacity_bytes": 8 * MiB},
                nvme={
                    "enabled": bool(nvme),
                    "path": tmp_path / nvme,
                    "capacity_bytes": 64 * MiB,
                    "min_free_bytes": 0,
                },
                redis={"enabled": redis is not None, "url": redis.unix if redis else "redis://127.0.0.1:9/0"},
                object={"enabled": True, "url": f"file://{tmp_path}/objects", **given},
                flow={"lookup_timeout_s": 30, "deadline_s": 30, **(flow or {})},
                control={"enabled": False},
            )
        )
        return caches[-1]

    yield open_cache
    for cache in caches:
        assert cache.flush(30)
        assert cache.check() == []
        cache.close()


def final_match(r: Any, tokens: Any = TOKENS) -> Any:
    hit = r.match(tokens)
    while hit.pending:
        threading.Event().wait(0.001)
        hit = r.match()
    return hit


def load(handle: Any, engine: Engine, tokens: Any = TOKENS) -> tuple[dict[str, int], list[bytes]]:
    """By tier what a match finds, and the bytes of what a load brings."""
    engine.poison()
    with handle.request() as r:
        hit = final_match(r, tokens)
        r.admit()
        transfer = r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks))))
        assert transfer.wait(30)
        return dict(hit.by_tier), [engine.block(page) for page in range(transfer.blocks)]


@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["full", "hybrid"])
def test_another_process_loads_and_promotes_stored_blocks(opened: Open, layout: Any) -> None:
    one, other, engine = opened(), opened("nvme"), Engine(layout)
    engine.fill(1, list(range(10)))
    expected = [engine.block(page) for page in range(10)]
    store(bind(one, layout), engine, TOKENS, list(range(10)))
    assert one.flush(30)
    handle = bind(other, layout)
    assert load(handle, Engine(layout)) == ({"object": 10}, expected)
    assert other.counters.get("promoted_blocks", tier="object") > 0
    with handle.request() as r:
        assert r.match(TOKENS).by_tier == {"host": 10}


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_redis_is_asked_before_the_object_store(opened: Open, tmp_path: Path) -> None:
    """The first half is in Redis too, the rest only in the store."""
    server, engine = empty(tmp_path), Engine(FULL)
    engine.fill(2, list(range(10)))
    expected = [engine.block(page) for page in range(10)]
    store(bind(both := opened(redis=server)), engine, TOKENS[:20], list(range(5)))
    assert both.flush(30)
    store(bind(alone := opened()), engine, TOKENS, list(range(10)))
    assert alone.flush(30)
    reader = opened(redis=server)
    assert load(bind(reader), Engine(FULL)) == ({"redis": 5, "object": 5}, expected)
    assert reader.counters.get("promoted_blocks", tier="redis") == 5
    assert reader.counters.get("promoted_blocks", tier="object") == 5


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_blocks_evicted_from_redis_load_from_the_store(opened: Open, tmp_path: Path) -> None:
    """It was promised from there: the load asks the next tier, and the prefix is as long as it was."""
    server, engine = empty(tmp_path), Engine(FULL)
    engine.fill(3, list(range(10)))
    expected = [engine.block(page) for page in range(10)]
    store(bind(one := opened(redis=server)), engine, TOKENS, list(range(10)))
    assert one.flush(30)
    reader = opened(redis=server)
    with bind(reader).request() as r:
        assert final_match(r).by_tier == {"redis": 10}
        server.client.flushall()
        r.admit()
        page = Engine(FULL)
        transfer = r.load(10, page.described, page.ids(list(range(10))))
        assert transfer.wait(30)
        assert [page.block(i) for i in range(transfer.blocks)] == expected


@pytest.mark.parametrize("mode", ["write_through", "on_second_use", "off"])
def test_write_modes_decide_when_blocks_reach_the_store(opened: Open, tmp_path: Path, mode: str) -> None:
    cache, engine = opened(write=mode), Engine(FULL)
    store(bind(cache), engine, TOKENS, list(range(10)))
    assert cache.flush(30)
    there = bind(opened())
    with there.request() as r:
        assert final_match(r).blocks == (10 if mode == "write_through" else 0)
    load(bind(cache), engine)
    assert cache.flush(30)
    with bind(opened()).request() as r:
        assert final_match(r).blocks == (0 if mode == "off" else 10)


def test_concurrent_stores_leave_one_copy(opened: Open, tmp_path: Path) -> None:
    caches, engine = [opened() for _ in range(3)], Engine(FULL)
    engine.fill(5, list(range(10)))
    threads = [threading.Thread(target=store, args=(bind(cache), engine, TOKENS, list(range(10)))) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cache.flush(30) for cache in caches)
    assert [cache.counters.get("write_failures") for cache in caches] == [0, 0, 0]
    reader = opened()
    objects = next(tier for tier in reader.lower_tiers if tier.name == "object")
    assert objects.usage().records == 10
    assert sum(len(pack.table.rows) for pack in objects.inspector.packs()) == 10


def test_an_emptied_store_is_a_miss(opened: Open, tmp_path: Path) -> None:
    one, other, engine = opened(), opened(), Engine(FULL)
    store(bind(one), engine, TOKENS, list(range(10)))
    assert one.flush(30)
    with bind(other).request() as r:
        assert final_match(r).blocks == 10
        for cache in (one, other):
            wait_background(cache)  # no cache writes there meanwhile
        shutil.rmtree(tmp_path / "objects")
        r.admit()
        transfer = r.load(10, engine.described, engine.ids(list(range(10))))
        assert transfer.wait(30)
        assert transfer.blocks == 0
    with bind(other).request() as r:
        assert final_match(r).blocks == 0

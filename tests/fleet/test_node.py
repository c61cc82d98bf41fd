"""A cache as a node of its fleet: what one node's requests find, another has near before anyone asks it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import kvcache
from kvcache.errors import ConfigError
from kvcache.fleet.popularity import HALF_LIFE_S
from tests.contract.fake_engine import FULL, HYBRID, Engine, bind, store
from tests.peer.redis_server import RedisServer
from tests.peer.redis_topology import until

KIB = 1 << 10
BLOCK = FULL.block_tokens
PROMPTS = [[1000 * p + t for t in range(8 * BLOCK)] for p in range(4)]


@pytest.fixture
def fleet(server: RedisServer) -> Iterator[Any]:
    with ExitStack() as stack:

        def node(**warm: Any) -> Any:
            settings = {"host": {"capacity_bytes": 1024 * KIB, "slab_bytes": 64 * KIB}, "nvme": {"enabled": False}}
            redis = {"enabled": True, "url": server.tcp}
            options = {"popularity_interval_s": 0.02, **warm}
            opened = kvcache.open(**settings, redis=redis, warm=options, control={"enabled": False})
            return stack.enter_context(opened)

        yield node


def use(handle: Any, tokens: list[int]) -> None:
    with handle.request() as r:
        r.match(tokens)
        r.admit()


def near(cache: Any, handle: Any, tokens: list[int]) -> int:
    """Blocks that are in the cache's own host memory."""
    with handle.request() as r:
        return int(r.match(tokens).by_tier.get("host", 0))


def heated(server: RedisServer, *uses: int) -> None:
    """Wait until the fleet has received chains that were used so often: all of it, since a part would look alike."""

    def told() -> list[int]:
        found = [server.client.zrange(key, 0, -1, withscores=True) for key in server.client.keys("*:heat")]
        now = time.time() / HALF_LIFE_S
        return sorted(round(2 ** (score - now)) for chains in found for _, score in chains)

    until(lambda: told() == sorted(uses), "the fleet was told")


@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["one group", "groups of three rules"])
def test_a_node_prefetches_prefixes_used_by_another(fleet: Any, server: RedisServer, layout: Any) -> None:
    first = fleet()
    handle, engine = bind(first, layout), Engine(layout)
    for prompt in PROMPTS:
        store(handle, engine, prompt, list(range(8)))
    for prompt, uses in zip(PROMPTS, (1, 4, 0, 3), strict=True):
        for _ in range(uses):
            use(handle, prompt)
    assert first.flush(30)
    heated(server, 1, 4, 3)
    second = fleet(hot=2, before_ready=True)
    assert second.ready(), "nothing is bound yet: nothing is waited for"
    mine = bind(second, layout)
    until(second.ready, "it has fetched")
    lookup = [near(second, mine, prompt) for prompt in PROMPTS]
    assert [bool(blocks) for blocks in lookup] == [False, True, False, True]
    if layout is FULL:
        assert lookup == [0, 8, 0, 8]
    told = second.control_handlers["warm"]({})
    assert (told["done"], told["chains"], told["whole"], told["fault"]) == (True, 2, 2, "")
    assert second.check() == []


def test_prefetched_blocks_equal_the_stored_ones(fleet: Any, server: RedisServer) -> None:
    first = fleet()
    handle, engine = bind(first), Engine(FULL)
    engine.fill(7, list(range(8)))
    expected = [engine.block(page) for page in range(8)]
    store(handle, engine, PROMPTS[0], list(range(8)))
    use(handle, PROMPTS[0])
    assert first.flush(30)
    heated(server, 1)
    second = fleet(hot=1)
    mine = bind(second)
    until(lambda: second.control_handlers["warm"]({})["done"], "it has fetched")
    server.client.flushall()  # it must be here
    engine.poison()
    with mine.request() as r:
        hit = r.match(PROMPTS[0])
        assert hit.by_tier == {"host": 8}
        r.admit()
        assert r.load(8, engine.described, engine.ids(list(range(8)))).wait(30)
    assert [engine.block(page) for page in range(8)] == expected


def test_a_limit_on_bytes_keeps_the_head(fleet: Any, server: RedisServer) -> None:
    first = fleet()
    handle, engine = bind(first), Engine(FULL)
    for prompt in PROMPTS:
        store(handle, engine, prompt, list(range(8)))
        use(handle, prompt)
    assert first.flush(30)
    heated(server, 1, 1, 1, 1)
    second = fleet(hot=4, max_bytes=2 * 8 * FULL.block_bytes())
    mine = bind(second)
    until(lambda: second.control_handlers["warm"]({})["done"], "it has fetched")
    told = second.control_handlers["warm"]({})
    assert (told["whole"], told["blocks"], told["full"]) == (2, 16, True)
    assert sorted(near(second, mine, prompt) for prompt in PROMPTS) == [0, 0, 8, 8]


def test_an_operator_can_trigger_a_prefetch(fleet: Any, server: RedisServer) -> None:
    first, second = fleet(), fleet()
    handle, engine = bind(first), Engine(FULL)
    store(handle, engine, PROMPTS[0], list(range(8)))
    use(handle, PROMPTS[0])
    assert first.flush(30)
    heated(server, 1)
    assert second.control_handlers["warm"]({}) == {"done": True}
    with pytest.raises(ConfigError, match="no engine"):
        second.control_handlers["warm"]({"hot": 1})
    mine = bind(second)
    for wrong in ({"hot": 0}, {"hot": True}, {"hot": "many"}, {"hot": 257}, {"hot": 1, "max_bytes": -1}):
        with pytest.raises(ConfigError, match=r"hot|max_bytes"):
            second.control_handlers["warm"](wrong)
    second.control_handlers["warm"]({"hot": 1})
    until(lambda: second.control_handlers["warm"]({})["done"], "it has fetched")
    assert near(second, mine, PROMPTS[0]) == 8


def test_chains_missing_on_the_server_are_no_fault(fleet: Any, server: RedisServer) -> None:
    first = fleet(report_popularity=True)
    handle, engine = bind(first), Engine(FULL)
    store(handle, engine, PROMPTS[0], list(range(8)))
    use(handle, PROMPTS[0])
    assert first.flush(30)
    heated(server, 1)
    for key in server.client.keys("kvcache:k1*"):
        server.client.delete(key)
    second = fleet(hot=5)
    bind(second)
    until(lambda: second.control_handlers["warm"]({})["done"], "it has looked")
    told = second.control_handlers["warm"]({})
    assert (told["chains"], told["whole"], told["blocks"], told["fault"]) == (1, 0, 0, "")


def test_the_byte_limit_covers_all_namespaces(fleet: Any, server: RedisServer) -> None:
    first, engine = fleet(), Engine(FULL)
    for revision in "ab":
        handle = bind(first, revision=revision)
        store(handle, engine, PROMPTS[0], list(range(8)))
        use(handle, PROMPTS[0])
    assert first.flush(30)
    heated(server, 1, 1)
    second = fleet(hot=1, max_bytes=12 * FULL.block_bytes())
    both = []
    for revision in "ab":
        both.append(bind(second, revision=revision))
        until(lambda: second.control_handlers["warm"]({})["done"], "it has fetched")
    assert [near(second, handle, PROMPTS[0]) for handle in both] == [8, 0]


def test_erase_removes_a_namespaces_popularity(fleet: Any, server: RedisServer) -> None:
    cache, engine = fleet(), Engine(FULL)
    spaces = [bind(cache, cache_salt=salt) for salt in "ab"]
    for handle in spaces:
        store(handle, engine, PROMPTS[0], list(range(8)))
        use(handle, PROMPTS[0])
    assert cache.flush(30)
    heated(server, 1, 1)
    erased = cache.erasure.erase(cache_salt="a")
    assert (erased.namespaces, erased.incomplete) == ([spaces[0].id], {})
    (left,) = server.client.keys("*:heat")
    assert spaces[1].id[:16].hex().encode() in left
    assert len(server.client.keys("*:chains")) == 1


def test_warm_without_a_fleet_is_refused() -> None:
    with kvcache.open(host={"capacity_bytes": 256 * KIB}, nvme={"enabled": False}, control={"enabled": False}) as cache:
        with pytest.raises(ConfigError, match=r"redis\.enabled"):
            cache.control_handlers["warm"]({"hot": 1})  # type: ignore[attr-defined]
        assert cache.ready()  # type: ignore[attr-defined]


def test_an_unreachable_server_delays_no_node(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"host": {"capacity_bytes": 256 * KIB}, "nvme": {"enabled": False}, "control": {"enabled": False}}
    away = {"enabled": True, "url": "redis://127.0.0.1:1/0", "timeout_s": 0.2}
    warm = {"hot": 3, "before_ready": True, "popularity_interval_s": 0.01}
    with kvcache.open(**settings, redis=away, warm=warm) as cache:
        handle, engine = bind(cache), Engine(FULL)
        store(handle, engine, PROMPTS[0], list(range(8)))
        use(handle, PROMPTS[0])
        until(cache.ready, "it is ready")  # type: ignore[attr-defined]
        assert cache.control_handlers["warm"]({})["fault"]  # type: ignore[attr-defined]


def test_readiness_waits_at_most_its_limit(fleet: Any, server: RedisServer) -> None:
    cache = fleet(hot=1, before_ready=True, deadline_s=0.2)
    server.pause()
    try:
        bind(cache)
        until(cache.ready, "its time is over")
    finally:
        server.go_on()


def test_popularity_can_be_disabled(fleet: Any, server: RedisServer) -> None:
    first = fleet(report_popularity=False)
    handle, engine = bind(first), Engine(FULL)
    store(handle, engine, PROMPTS[0], list(range(8)))
    use(handle, PROMPTS[0])
    assert first.close()
    assert server.client.keys("*:heat") == []

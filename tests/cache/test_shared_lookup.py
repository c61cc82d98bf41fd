"""Caches that share a server: what one stored the other finds, by asking in the background; a server that is away is a
miss and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

import kvcache
from kvcache.cache import factory
from kvcache.cache.api import TierFlush
from kvcache.cache.shared_lookup import MAX_PENDING_LOOKUPS, SharedLookup
from kvcache.errors import ClosedError
from kvcache.index.block_run import ALL_BLOCKS
from kvcache.os_env import InlineExecutor, OsEnv
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.keys import KeyNames
from kvcache.tier.tier import Outcome
from tests.contract.test_cache import FULL, HYBRID, Engine, bind, store
from tests.peer.redis_proxy import RedisProxy
from tests.peer.redis_server import MISSING, RedisServer, empty

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

MiB = 1 << 20
TOKENS = list(range(40))  # ten blocks
Open = Callable[..., Any]


@pytest.fixture
def server(tmp_path_factory: pytest.TempPathFactory) -> RedisServer:
    return empty(tmp_path_factory.mktemp("shared"))


@pytest.fixture
def opened(server: RedisServer) -> Iterator[Open]:
    """Opens caches on the shared server; each is flushed, audited and closed at the end."""
    caches: list[Any] = []

    away: list[Any] = []  # whose server takes nothing

    def open_cache(url: str = "", flow: Any = None, *, serves: bool = True, **redis: Any) -> Any:
        caches.append(
            kvcache.open(
                host={"capacity_bytes": 8 * MiB},
                nvme={"enabled": False},
                redis={"enabled": True, "url": url or server.unix, **redis},
                flow={"lookup_timeout_s": 20, "deadline_s": 20, **(flow or {})},
                control={"enabled": False},
            )
        )
        away.extend([] if serves else caches[-1:])
        return caches[-1]

    yield open_cache
    for cache in caches:
        assert bool(cache.flush(30)) is (cache not in away)
        assert cache.check() == []
        cache.close()


def final_match(r: Any, tokens: Any = TOKENS) -> Any:
    """The hit that stands once no tier is asked any more: as an engine polls, its step in between."""
    hit = r.match(tokens)
    while hit.pending:
        threading.Event().wait(0.001)
        hit = r.match()
    return hit


def load(handle: Any, engine: Engine, blocks: int, tokens: Any = TOKENS) -> tuple[int, list[bytes]]:
    """What a load brings, and the bytes of it."""
    engine.poison()
    with handle.request() as r:
        assert final_match(r, tokens).blocks == blocks
        r.admit()
        transfer = r.load(blocks, engine.described, engine.ids(list(range(blocks))))
        assert transfer.wait(30)
        return transfer.blocks, [engine.block(page) for page in range(transfer.blocks)]


def test_a_lookup_older_than_a_clear_is_ignored(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened()
    handle, go, asked, waits = bind(cache), threading.Event(), threading.Event(), threading.Event()
    store(handle, Engine(FULL), TOKENS, list(range(10)))
    assert cache.flush(30)
    assert cache._context.shared_lookup.wait(60)  # what was asked before it was stored
    (tier,) = cache.lower_tiers
    for address in tier.scan():
        cache.index.discard(address, tier.name)  # as a process that has not seen it yet
        cache.index.discard(address, "host")
        cache.host.remove([address])
    match_prefix, wait = tier.match_prefix, cache._context.shared_lookup.wait

    def answer(*arguments: Any, **more: Any) -> Any:
        found = match_prefix(*arguments, **more)
        found.result(30)
        asked.set()
        assert go.wait(60)
        return found

    monkeypatch.setattr(tier, "match_prefix", answer)
    monkeypatch.setattr(cache._context.shared_lookup, "wait", lambda timeout_s: waits.set() or wait(60))
    with handle.request() as r:
        assert r.match(TOKENS).pending
        assert asked.wait(60)
        clears = threading.Thread(target=handle.clear)
        clears.start()
        assert waits.wait(60)
        go.set()
        clears.join(60)
    assert cache.index.resident("redis") == 0


def test_another_process_finds_and_promotes_stored_blocks(opened: Open) -> None:
    one, other = opened(), opened()
    engine = Engine(FULL)
    engine.fill(1, list(range(10)))
    expected = [engine.block(page) for page in range(10)]
    store(bind(one), engine, TOKENS, list(range(10)))
    assert one.flush(30)
    handle = bind(other)
    with handle.request() as r:
        first = r.match(TOKENS)
        assert first.pending or first.blocks == 10
        assert final_match(r).by_tier == {"redis": 10}
        r.admit()
    assert load(handle, Engine(FULL), 10) == (10, expected)
    assert other.counters.get("promoted_blocks", tier="redis") == 10
    assert other.counters.get("lookups", answer="found") == 1
    with handle.request() as r:
        hit = r.match(TOKENS)
        assert (hit.pending, hit.by_tier) == (False, {"host": 10})


def test_a_longer_prompt_looks_up_only_the_rest(opened: Open, server: RedisServer) -> None:
    one, other = opened(), opened()
    engine = Engine(FULL)
    engine.fill(2, list(range(10)))
    store(bind(other), engine, TOKENS[:20], list(range(5)))
    store(bind(one), engine, TOKENS, list(range(10)))
    assert one.flush(30)
    assert other.flush(30)
    with bind(other).request() as r:
        assert final_match(r, TOKENS + [7] * 20).by_tier == {"host": 5, "redis": 5}


def test_groups_of_every_rule_are_looked_up(opened: Open) -> None:
    one, other = opened(), opened()
    engine = Engine(HYBRID)
    ids = list(range(10))
    engine.fill(3, ids)
    expected = [[engine.block(page, group) for page in ids] for group in range(3)]
    store(bind(one, HYBRID), engine, TOKENS, ids)
    assert one.flush(30)
    reader = Engine(HYBRID)
    reader.poison()
    with bind(other, HYBRID).request() as r:
        assert final_match(r).blocks == 10
        r.admit()
        transfer = r.load(10, reader.described, reader.ids(ids))
        assert transfer.wait(30)
        assert transfer.blocks == 10
    assert [reader.block(page) for page in ids] == expected[0]
    assert [reader.block(page, 1) for page in ids[-2:]] == expected[1][-2:]
    assert reader.block(9, 2) == expected[2][9]


@pytest.mark.parametrize("gone", [0, 3, 9])
def test_blocks_evicted_from_the_server_shorten_the_hit(opened: Open, server: RedisServer, gone: int) -> None:
    """Knowledge of it is never trusted: the load brings what is there, and the next match knows."""
    one, other = opened(), opened()
    engine = Engine(FULL)
    engine.fill(4, list(range(10)))
    expected = [engine.block(page) for page in range(10)]
    store(bind(one), engine, TOKENS, list(range(10)))
    assert one.flush(30)
    handle = bind(other)
    with handle.request() as r:
        assert final_match(r).blocks == 10
        place = KeyNames("kvcache")
        chain = r._chains()[0]
        assert server.client.delete(place.record(chain[gone])) == 1
    assert load(handle, Engine(FULL), 10) == (gone, expected[:gone])
    with handle.request() as r:
        assert final_match(r).blocks == gone


def test_remembered_lookups_are_bounded(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    one = opened()
    monkeypatch.setattr(factory, "MAX_KNOWN_BLOCKS", 64)
    other = opened()
    engine = Engine(FULL, pages=50)
    for seed in range(8):
        store(bind(one), engine, [seed, *range(199)], list(range(50)))
    assert one.flush(30)
    for seed in range(8):
        with bind(other).request() as r:
            assert final_match(r, [seed, *range(199)]).blocks in range(1, 51)
        assert other.index.resident("redis") <= 64


def test_concurrent_stores_leave_one_copy(opened: Open, server: RedisServer) -> None:
    caches = [opened() for _ in range(3)]
    engine = Engine(FULL)
    engine.fill(5, list(range(10)))
    threads = [threading.Thread(target=store, args=(bind(cache), engine, TOKENS, list(range(10)))) for cache in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(cache.flush(30) for cache in caches)
    assert [cache.counters.get("write_failures") for cache in caches] == [0, 0, 0]
    assert sum(map(KeyNames("kvcache").is_record, server.client.scan_iter())) == 10


# a server that is away


def test_an_unreachable_server_is_a_miss(opened: Open) -> None:
    cache = opened("unix:///nowhere/at-all?db=0", serves=False)
    handle, engine = bind(cache), Engine(FULL)
    for _ in range(20):
        with handle.request() as r:
            assert final_match(r).blocks == 0
    assert store(handle, engine, TOKENS, list(range(10))).blocks == 10
    assert cache.flush(30).tiers["redis"] == TierFlush(refused=10)
    lost = cache.counters.get("write_failures", tier="redis") + cache.counters.get("drops", reason="orphan")
    assert lost == 10
    with handle.request() as r:
        assert r.match(TOKENS).by_tier == {"host": 10}


def test_a_hung_server_delays_no_match_past_the_deadline(opened: Open, server: RedisServer) -> None:
    proxy = RedisProxy(server.port)
    try:
        cache = opened(proxy.url, flow={"lookup_timeout_s": 0.5}, timeout_s=0.5, serves=False)
        handle, engine = bind(cache), Engine(FULL)
        proxy.hang = True
        with handle.request() as r:
            assert r.match(TOKENS).pending
            assert final_match(r).blocks == 0
        assert store(handle, engine, TOKENS, list(range(10))).blocks == 10
        assert cache.flush(30).tiers["redis"] == TierFlush(refused=10)
    finally:
        proxy.end()


def test_a_server_lost_during_a_read_is_a_miss(opened: Open, server: RedisServer) -> None:
    one = opened()
    engine = Engine(FULL)
    engine.fill(6, list(range(10)))
    store(bind(one), engine, TOKENS, list(range(10)))
    assert one.flush(30)
    proxy = RedisProxy(server.port)
    try:
        other = opened(proxy.url)
        handle = bind(other)
        with handle.request() as r:
            assert final_match(r).blocks == 10
            proxy.drop = True
            r.admit()
            transfer = r.load(10, engine.described, engine.ids(list(range(10))))
            assert transfer.wait(30)
            assert Outcome.DONE not in transfer.outcomes
    finally:
        proxy.end()


def test_lookups_beyond_the_limit_use_known_answers(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened()
    gate = threading.Event()
    lead = RedisTier.match_prefix

    def slow(tier: RedisTier, *arguments: Any, **keywords: Any) -> Any:
        gate.wait(30)
        return lead(tier, *arguments, **keywords)

    monkeypatch.setattr(RedisTier, "match_prefix", slow)
    handle = bind(cache)
    requests = [handle.request() for _ in range(MAX_PENDING_LOOKUPS + 3)]
    try:
        pending = [r.match([i, *range(30)]).pending for i, r in enumerate(requests)]
        assert pending == [True] * MAX_PENDING_LOOKUPS + [False] * 3
    finally:
        gate.set()
    for r in requests:
        while r.match().pending:
            threading.Event().wait(0.001)
        r.admit()
        r.close()
    assert cache.counters.get("lookups", answer="dropped") == 3


def test_closing_a_tier_during_a_lookup_is_no_fault(caplog: pytest.LogCaptureFixture) -> None:
    class Closed:
        name = "far"

        def match_prefix(self, addresses: Any, *, deadline: float | None = None) -> Any:
            raise ClosedError("far tier: it was closed")

    os_env = OsEnv(executor=lambda threads, name: InlineExecutor())
    tiers: Any = [Closed()]
    ask = SharedLookup(tiers, index=cast(Any, None), os_env=os_env, max_known_blocks=1, deadline_s=20)
    chains: Any = [[object()]]
    question = ask.begin(chains, [ALL_BLOCKS], 0, os_env.clock.now() + 1e6)
    assert question is not None
    assert (question.pending, question.answer) == (False, "nothing")
    assert caplog.records == []
    ask.close()

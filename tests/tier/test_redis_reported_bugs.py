"""What users of other caches over Redis have reported, each as a test of what should happen instead.

The numbers are those of the list of reports that this project keeps: hangs, wrong bytes, no way back, slow questions.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.block.record import read_header
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis import tier as module
from kvcache.tier.redis.keys import KeyNames
from kvcache.tier.redis.wire import RespConnection
from kvcache.tier.tier import Outcome
from tests.cache.test_shared_lookup import final_match
from tests.contract.test_cache import FULL, Engine, bind, store
from tests.peer.redis_proxy import RedisProxy
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.redis_topology import until
from tests.tier.blocks import buffer, chain, record
from tests.tier.test_redis_cluster import MISS, read, write

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

ROOT = Path(__file__).parents[2]
DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
KEY = KeyNames("kvcache").record


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    yield server
    server.end()


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    server.client.config_set("maxmemory", 64 << 20)
    server.client.flushall()
    tier = RedisTier(RedisSettings(url=server.tcp, timeout_s=20))
    yield tier
    tier.close()


def calls(server: RedisServer) -> int:
    return int(server.client.info("stats")["total_commands_processed"])


def test_17_an_absent_key_leaves_the_connection_usable(tier: RedisTier) -> None:
    blocks, absent = chain(8), chain(8, seed=1)
    write(tier, blocks)
    for _ in range(20):  # more than there are connections and threads
        assert read(tier, absent) == (NOT_FOUND,) * 8
    assert read(tier, blocks) == (DONE,) * 8


@pytest.mark.parametrize("size", [1, 4096, 8191, 8193, 100_000])
def test_18_a_value_of_another_size_is_a_miss(tier: RedisTier, server: RedisServer, size: int) -> None:
    """Memory that held another block before must not come back as this one."""
    one, other = chain(1), chain(1, seed=1)
    write(tier, one)
    into = buffer()
    assert tier.read(one, [into]) == (DONE,)
    server.client.set(KEY(other[0]), (bytes(server.client.get(KEY(one[0]))) * 9)[:size])
    (outcome,) = tier.read(other, [into])
    assert outcome is not DONE


def test_18_a_record_of_other_sizes_is_a_miss(tier: RedisTier) -> None:
    (address,) = chain(1)
    tier.write([address], [record(address, 8192)])
    assert tier.read([address], [buffer(2048)]) == (Outcome.FAILED,)
    into = buffer(16_384)
    tier.read([address], [into])
    assert read_header(into[0]).decoded_bytes == 8192, "which the hierarchy compares with what its pages hold"


def test_19_a_server_restart_fails_no_call(tier: RedisTier, server: RedisServer) -> None:
    for seed in range(3):
        server.stop()
        server.start()
        blocks = chain(5, seed=seed)
        assert write(tier, blocks) == (DONE,) * 5
        assert read(tier, blocks) == (DONE,) * 5


@pytest.mark.parametrize("state", ["well", "hung", "gone"])
def test_21_close_returns_in_any_state(server: RedisServer, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.05)
    proxy = RedisProxy(server.port)
    tier = RedisTier(RedisSettings(url=proxy.url, timeout_s=300))
    blocks = chain(4)
    write(tier, blocks)
    proxy.hang = state == "hung"
    ticket = tier.submit("contains", blocks)
    if state == "gone":
        proxy.drop = True
    closing = threading.Thread(target=tier.close)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert ticket.done
    proxy.end()


def test_22_a_lookup_of_512_keys_is_one_round_trip(tier: RedisTier, server: RedisServer) -> None:
    """Counted in what is sent, since time on a busy machine says little: one piece of work, one write to the socket."""
    blocks = chain(512)
    write(tier, blocks)
    sent: list[int] = []
    send = RespConnection.send

    def counted(wire: RespConnection, pieces: Any) -> None:
        sent.append(len(pieces))
        send(wire, pieces)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RespConnection, "send", counted)
        assert tier.contains(blocks) == (DONE,) * 512
        assert sent == [1]
        before = calls(server)
        assert tier.match_prefix(blocks).result(20) == 512
        assert calls(server) - before < 60


def test_22_a_stalled_server_times_out_and_opens_the_breaker(server: RedisServer) -> None:
    tier = RedisTier(RedisSettings(url=server.tcp, timeout_s=0.1))
    blocks = chain(2)
    write(tier, blocks)
    server.pause()
    try:
        for _ in range(8):
            assert set(tier.contains(blocks)) <= MISS
        assert tier.breaker == "open"
    finally:
        server.go_on()
        tier.close()


def test_24_ten_thousand_cycles_leave_no_keys(server: RedisServer, request: pytest.FixtureRequest) -> None:
    """Host slots, references, keys, connections: all as before. A tenth of them unless `--long`."""
    cycles = 10_000 if request.config.getoption("--long") else 1_000
    server.client.flushall()
    settings = {"host": {"capacity_bytes": 2 << 20}, "nvme": {"enabled": False}, "control": {"enabled": False}}
    with kvcache.open(redis={"enabled": True, "url": server.tcp}, **settings) as cache:
        bound, engine = bind(cache), Engine(FULL)
        for cycle in range(cycles // 10):
            store(bound, engine, [cycle, *range(39)], list(range(10)))
        assert cache.flush(60)
        assert cache.check() == []
        arena = cache.host.arena
        held = cache.host.usage().records
        assert sum(len(slab.slots) for slabs in arena._slabs.values() for slab in slabs) == held
        assert cache.index.held() == 0
        (tier,) = cache.lower_tiers
        assert tier.counters["connects"] <= 8
    until(lambda: server.client.info("clients")["connected_clients"] <= 2, "the server has seen that they hung up")


def test_25_another_process_and_hash_seed_hits(tier: RedisTier, server: RedisServer) -> None:
    program = """
import sys, kvcache
from tests.contract.test_cache import FULL, Engine, bind, store
from tests.cache.test_shared_lookup import final_match
with kvcache.open(host__capacity_bytes="8MiB", nvme__enabled=False, control__enabled=False,
                  redis={"enabled": True, "url": sys.argv[1]}) as cache:
    with bind(cache, facts={"b": 1, "a": [2, "x"]}).request() as r:
        found = final_match(r, range(40)).blocks
    if not found:
        store(bind(cache, facts={"a": [2, "x"], "b": 1}), Engine(FULL), range(40), list(range(10)))
    cache.flush()
    print(found)
"""
    said = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", program, server.tcp]
        said.append(subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip())
    assert said == ["0", "10"]


def test_26_a_full_server_evicts_and_accepts_writes(tier: RedisTier, server: RedisServer) -> None:
    server.client.config_set("maxmemory", 6 << 20)
    blocks = chain(400)
    for first in range(0, 400, 50):
        assert write(tier, blocks[first : first + 50]) == (DONE,) * 50
    outcomes = read(tier, blocks)
    assert {DONE, NOT_FOUND} == set(outcomes)
    assert server.client.info("stats")["evicted_keys"] > 0


def test_26b_one_failed_write_is_counted_and_is_a_miss(server: RedisServer) -> None:
    full = RedisServer("--maxmemory", "3mb", "--maxmemory-policy", "noeviction")
    tier = RedisTier(RedisSettings(url=full.tcp))
    try:
        large = chain(2)
        outcomes = [tier.write([address], [record(address, 900_000)])[0] for address in large]
        failed = [address for address, outcome in zip(large, outcomes, strict=True) if outcome is not DONE]
        assert failed
        assert tier.counters["refused_OOM"] == len(failed)
        assert set(tier.contains(failed)) == {NOT_FOUND}
    finally:
        tier.close()
        full.end()


@pytest.mark.parametrize("seed", range(3))
def test_27_failed_reads_shorten_the_prefix(server: RedisServer, seed: int) -> None:
    """A tenth of the records is gone for one of two ranks: each loads a prefix without a hole, and ends."""
    server.client.flushall()
    settings = {"host": {"capacity_bytes": 8 << 20}, "nvme": {"enabled": False}, "control": {"enabled": False}}
    redis = {"enabled": True, "url": server.tcp}
    tokens, engine = list(range(120)), Engine(FULL)
    engine.fill(seed, list(range(30)))
    expected = [engine.block(page) for page in range(30)]
    with kvcache.open(redis=redis, **settings) as writer:
        store(bind(writer), engine, tokens, list(range(30)))
        assert writer.flush(30)
    with kvcache.open(redis=redis, flow={"lookup_timeout_s": 20}, **settings) as reader:
        bound = bind(reader)
        with bound.request() as r:
            found = final_match(r, tokens).blocks
            gone = [(7 * i + seed) % 30 for i in range(3)]
            (blocks,) = r._chains()
            server.client.delete(*[KEY(blocks[i]) for i in gone])
            r.admit()
            engine.poison()
            transfer = r.load(found, engine.described, engine.ids(list(range(found))))
            assert transfer.wait(30)
            assert transfer.blocks == min(gone)
            assert [engine.block(page) for page in range(min(gone))] == expected[: min(gone)]


def test_a_missing_block_never_shifts_later_ones(tier: RedisTier, server: RedisServer) -> None:
    blocks = chain(20)
    write(tier, blocks)
    server.client.delete(*[KEY(blocks[i]) for i in (0, 5, 6, 19)])
    assert read(tier, blocks) == tuple(NOT_FOUND if i in {0, 5, 6, 19} else DONE for i in range(20))

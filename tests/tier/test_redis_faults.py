"""A server that is away, slow, hung, full, read-only or lying: always a miss, a count, a line, and back by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import RedisSettings
from kvcache.testing.tier import Clock
from kvcache.tier.redis import RedisTier, pool
from kvcache.tier.redis import tier as module
from kvcache.tier.tier import Outcome
from tests.peer.redis_proxy import RedisProxy
from tests.peer.redis_server import MISSING, RedisServer
from tests.tier.blocks import buffer, chain, holds, record
from tests.tier.tier_files import read

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

DONE, NOT_FOUND, TIMED_OUT, FAILED = Outcome.DONE, Outcome.NOT_FOUND, Outcome.TIMED_OUT, Outcome.FAILED


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.end()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(server: RedisServer, clock: Clock) -> Iterator[RedisTier]:
    server.client.flushall()
    tier = RedisTier(RedisSettings(url=server.tcp, timeout_s=3), os_env=OsEnv(clock=clock))
    yield tier
    tier.close()


@pytest.fixture
def proxy(server: RedisServer) -> Iterator[RedisProxy]:
    server.client.flushall()
    proxy = RedisProxy(server.port)
    yield proxy
    proxy.end()


@pytest.fixture
def behind(proxy: RedisProxy, clock: Clock) -> Iterator[RedisTier]:
    tier = RedisTier(RedisSettings(url=proxy.url, timeout_s=3, connections=1), os_env=OsEnv(clock=clock))
    yield tier
    tier.close()


def until_open(tier: RedisTier, address: Any) -> set[Outcome]:
    """What reads end as, until the breaker is open."""
    outcomes = set()
    for _ in range(3):
        assert tier.breaker == "closed"
        outcomes.add(read(tier, address))
    assert tier.breaker == "open"
    return outcomes


def test_a_hung_server_times_out(
    server: RedisServer, tier: RedisTier, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call ends by its deadline; then none is tried; one probe brings it back."""
    blocks = chain(2)
    tier.write(blocks, [record(address) for address in blocks])
    server.pause()
    try:
        ticket = tier.submit("contains", blocks, deadline=clock.now() + 0.05)
        assert ticket.wait(20)
        assert ticket.outcomes == (TIMED_OUT, TIMED_OUT)
        assert tier.match_prefix(blocks, deadline=clock.now() + 0.05).result(20) == 0
        assert tier.write(chain(1, seed=1), [record(chain(1, seed=1)[0])]) == (TIMED_OUT,)
        assert tier.breaker == "open"
        assert [read(tier, address) for address in blocks * 50] == [FAILED] * 100
        assert (tier.usage().records, tier.free_slots(1), list(tier.scan())) == (0, 0, [])
        assert len(tier.check()) == 1
    finally:
        server.go_on()
    assert read(tier, blocks[0]) is FAILED
    clock.seconds += 1
    assert read(tier, blocks[0]) is DONE
    assert tier.breaker == "closed"
    assert tier.counters["faults_timeout"] == 3
    assert tier.counters["breaker_opened"] == 1
    assert [r.levelno for r in caplog.records] == [logging.WARNING]


def test_a_tiny_deadline_does_not_open_the_breaker(tier: RedisTier, clock: Clock) -> None:
    (address,) = chain(1)
    for _ in range(20):
        ticket = tier.submit("read", [address], [buffer()], deadline=clock.now() + 1e-9)
        assert ticket.wait(20)
        assert ticket.outcomes[0] in {TIMED_OUT, NOT_FOUND}
    assert tier.breaker == "closed"


def test_close_does_not_wait_for_a_hung_server(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CLOSE_S", 0.05)
    server.client.flushall()
    tier = RedisTier(RedisSettings(url=server.tcp, timeout_s=200, connections=2))
    blocks = chain(600)
    assert set(tier.contains(blocks)) == {NOT_FOUND}
    server.pause()
    try:
        ticket = tier.submit("contains", blocks)
        tier.close()
        assert ticket.done
        assert set(ticket.outcomes) == {FAILED}
    finally:
        server.go_on()


def test_a_restarted_server_fails_no_call(server: RedisServer, tier: RedisTier) -> None:
    """Old connections are found dead and replaced within the call: no call fails."""
    blocks = chain(4)
    for _ in range(3):
        assert tier.write(blocks, [record(address) for address in blocks]) == (DONE,) * 4
        assert tier.contains(blocks) == (DONE,) * 4
        server.stop()
        server.start()
        assert [read(tier, address) for address in blocks] == [NOT_FOUND] * 4
    assert tier.breaker == "closed"


def test_an_unreachable_server_is_a_miss_until_it_returns(server: RedisServer, tier: RedisTier, clock: Clock) -> None:
    (address,) = chain(1)
    tier.write([address], [record(address)])
    server.stop()
    try:
        assert until_open(tier, address) == {FAILED}
        clock.seconds += 1
        assert read(tier, address) is FAILED
    finally:
        server.start()
    clock.seconds += 10
    assert read(tier, address) is NOT_FOUND
    assert tier.breaker == "closed"
    assert tier.counters["faults_ConnectionRefusedError"] == 4


def test_a_full_server_drops_writes(clock: Clock) -> None:
    """Writes find no room, are counted, stop for a while; reads go on; room lets them in again."""
    server = RedisServer("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    tier = RedisTier(RedisSettings(url=server.tcp, connections=1), os_env=OsEnv(clock=clock))
    try:
        blocks = chain(40)
        outcomes = [tier.write([address], [record(address, 300_000)])[0] for address in blocks]
        written = outcomes.count(DONE)
        assert 0 < written < 40
        assert set(outcomes[:written]) == {DONE}
        assert outcomes[written : written + 4] == [Outcome.NO_CAPACITY] * 3 + [FAILED]
        assert tier.counters["refused_OOM"] == 3
        assert tier.counters["write_no_room"] == 3
        assert tier.breaker == "closed"
        assert read(tier, blocks[0], 300_000) is DONE
        assert tier.free_slots(300_000) < 8
        server.client.flushall()
        clock.seconds += 1
        assert tier.write(blocks[:3], [record(address, 300_000) for address in blocks[:3]]) == (DONE,) * 3
    finally:
        tier.close()
        server.end()


def test_a_long_record_that_does_not_fit_leaves_no_part(clock: Clock) -> None:
    server = RedisServer("--maxmemory", "4mb", "--maxmemory-policy", "noeviction")
    tier = RedisTier(RedisSettings(url=server.tcp, part_bytes=256 << 10), os_env=OsEnv(clock=clock))
    try:
        (address,) = chain(1)
        assert tier.write([address], [record(address, 8 << 20)]) == (Outcome.NO_CAPACITY,)
        assert server.client.keys() == []
    finally:
        tier.close()
        server.end()


def test_server_evictions_are_misses() -> None:
    server = RedisServer("--maxmemory", "6mb", "--maxmemory-policy", "allkeys-random")
    tier = RedisTier(RedisSettings(url=server.unix, part_bytes=256 << 10))
    try:
        blocks = chain(16)
        for address in blocks:
            assert tier.write([address], [record(address, 700_000)]) == (DONE,)
            outcomes = {read(tier, other, 700_000) for other in blocks}
            assert outcomes <= {DONE, NOT_FOUND}
        assert outcomes == {DONE, NOT_FOUND}
        assert tier.check() == []
        assert tier.free_slots(700_000) > 0
    finally:
        tier.close()
        server.end()


def test_a_read_only_server_is_still_read(server: RedisServer, tier: RedisTier, clock: Clock) -> None:
    here, new = chain(1), chain(5, seed=1)
    tier.write(here, [record(here[0])])
    server.client.replicaof("127.0.0.1", "1")
    try:
        assert [tier.write([a], [record(a)])[0] for a in new] == [FAILED] * 5
        assert tier.counters["refused_READONLY"] == 3
        assert tier.counters["writes_stopped"] == 1
        assert read(tier, here[0]) is DONE
        assert tier.remove(here) == (FAILED,)
        assert tier.breaker == "closed"
    finally:
        server.client.replicaof("NO", "ONE")
    clock.seconds += 1
    assert tier.write(new, [record(a) for a in new]) == (DONE,) * 5


def test_a_replica_without_its_master_is_a_miss(server: RedisServer, tier: RedisTier, clock: Clock) -> None:
    (address,) = chain(1)
    tier.write([address], [record(address)])
    server.client.config_set("replica-serve-stale-data", "no")
    server.client.replicaof("127.0.0.1", "1")
    try:
        assert until_open(tier, address) == {FAILED}
        assert tier.counters["faults_MASTERDOWN"] == 3
    finally:
        server.client.replicaof("NO", "ONE")
        server.client.config_set("replica-serve-stale-data", "yes")
    clock.seconds += 1
    assert read(tier, address) is DONE


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b"-LOADING the data set is being loaded\r\n", "LOADING"),
        (b"-MOVED 3999 127.0.0.1:6381\r\n", "MOVED"),
        (b"-ASK 3999 127.0.0.1:6381\r\n", "ASK"),
        (b"-CLUSTERDOWN the cluster is down\r\n", "CLUSTERDOWN"),
        (b"-BUSY a script runs\r\n", "BUSY"),
        (b"-NOPERM not allowed\r\n", "NOPERM"),
    ],
)
def test_error_replies_are_misses(proxy: RedisProxy, behind: RedisTier, clock: Clock, reply: bytes, code: str) -> None:
    (address,) = chain(1)
    assert behind.write([address], [record(address)]) == (DONE,)
    proxy.answer = reply
    assert until_open(behind, address) == {FAILED}
    assert behind.counters[f"refused_{code}"] == 3
    assert behind.counters[f"faults_{code}"] == 3
    proxy.clear_faults()
    clock.seconds += 1
    assert read(behind, address) is DONE
    assert behind.breaker == "closed"
    assert proxy.connections == 1


@pytest.mark.parametrize(
    "reply", [b"nonsense\r\n", b"$x\r\n", b":5\r\n", b"*1\r\n$1\r\na\r\n", b"$3\r\nabcde", b"$-1\r\n$-1\r\n", b"\r\n"]
)
def test_replies_of_another_protocol_are_misses(
    proxy: RedisProxy, behind: RedisTier, clock: Clock, reply: bytes
) -> None:
    """Whatever it says, nothing is DONE, and a connection that is out of step is not used again."""
    (address,) = chain(1)
    behind.write([address], [record(address)])
    proxy.answer = reply
    for _ in range(4):
        assert read(behind, address) is not DONE
    proxy.clear_faults()
    clock.seconds += 10
    outcomes = [read(behind, address) for _ in range(3)]
    assert outcomes[-1] is DONE
    assert behind.contains([address]) == (DONE,)


@pytest.mark.parametrize("cut", [1, 5, 9, 100, 150, 5_000, 12_100])
def test_a_connection_closed_in_a_reply_is_a_miss(proxy: RedisProxy, behind: RedisTier, cut: int) -> None:
    (address,) = chain(1)
    behind.write([address], [record(address)])
    proxy.cut = cut
    assert read(behind, address) is FAILED
    proxy.clear_faults()
    assert read(behind, address) is DONE


def test_a_connection_closed_in_a_batch_loses_only_the_rest(proxy: RedisProxy, behind: RedisTier) -> None:
    """What came before is there, what comes behind is a miss, nothing is in the wrong place."""
    blocks = chain(10)
    behind.write(blocks, [record(address) for address in blocks])
    proxy.cut = 50_000
    into = [buffer() for _ in blocks]
    outcomes = behind.read(blocks, into)
    there = outcomes.count(DONE)
    assert 0 < there < 10
    assert outcomes == (DONE,) * there + (FAILED,) * (10 - there)
    assert all(holds(into[i], blocks[i]) for i in range(there))


def test_a_reply_that_stalls_times_out(proxy: RedisProxy, behind: RedisTier) -> None:
    (address,) = chain(1)
    behind.write([address], [record(address)])
    proxy.hang = True
    assert read(behind, address) is TIMED_OUT
    proxy.clear_faults()
    assert read(behind, address) is DONE


def test_a_slow_reply_times_out_by_deadline(proxy: RedisProxy, behind: RedisTier, clock: Clock) -> None:
    """What comes too late is a miss by its deadline; who has the time gets it."""
    (address,) = chain(1)
    behind.write([address], [record(address)])
    proxy.delay_s = 0.08
    into = buffer()
    ticket = behind.submit("read", [address], [into], deadline=clock.now() + 0.04)
    assert ticket.wait(20)
    assert ticket.outcomes == (TIMED_OUT,)
    assert read(behind, address) is DONE
    proxy.delay_s = 0.0
    assert read(behind, address) is DONE


def test_a_connection_closed_at_once_is_a_miss(proxy: RedisProxy, behind: RedisTier, clock: Clock) -> None:
    (address,) = chain(1)
    behind.write([address], [record(address)])
    proxy.drop = True
    assert until_open(behind, address) == {FAILED}
    proxy.clear_faults()
    clock.seconds += 1
    assert read(behind, address) is DONE


def test_tls_to_a_plain_server_is_a_miss(server: RedisServer, clock: Clock) -> None:
    tier = RedisTier(
        RedisSettings(url=server.tcp.replace("redis:", "rediss:"), timeout_s=0.5), os_env=OsEnv(clock=clock)
    )
    assert until_open(tier, chain(1)[0]) <= {FAILED, TIMED_OUT}
    tier.close()


def test_faults_are_logged_every_few_seconds(tier: RedisTier, server: RedisServer, clock: Clock, caplog: Any) -> None:
    server.stop()
    try:
        for _ in range(20):
            clock.seconds += 1
            read(tier, chain(1)[0])
        assert 2 <= len(caplog.records) <= 5
        assert "ConnectionRefusedError" in caplog.text
    finally:
        server.start()


def test_an_unexpected_error_is_a_failed_outcome(tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool.ConnectionPool, "run", lambda *_: 1 / 0)
    assert read(tier, chain(1)[0]) is FAILED
    assert tier.counters["defects"] == 1

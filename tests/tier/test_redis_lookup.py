"""What lookups remember: bounded, told by the server when it changes, void when the connection is another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import RedisSettings
from kvcache.testing.tier import Clock
from kvcache.tier.redis import RedisTier, lookup
from kvcache.tier.redis.keys import KeyNames
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.redis_topology import until
from tests.tier.blocks import chain, record

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

BLOCKS = chain(40)
NAMES = [KeyNames("kvcache").record(address) for address in BLOCKS]


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
    tier = RedisTier(RedisSettings(url=server.tcp), os_env=OsEnv(clock=clock))
    yield tier
    tier.close()


def asked(server: RedisServer) -> int:
    return int(server.client.info("commandstats").get("cmdstat_getrange", {}).get("calls", 0))


def put(server: RedisServer, first: int, end: int) -> None:
    """By another client."""
    for address, name in zip(BLOCKS[first:end], NAMES[first:end], strict=True):
        head, body = record(address, 1)
        server.client.set(name, bytes(head).rstrip(b"\0") + bytes(body[:1]))


def match_prefix(tier: RedisTier) -> int:
    return tier.match_prefix(BLOCKS).result(20)


def told(tier: RedisTier, held: int) -> None:
    """The server answers who changed something before it tells those who look: there is a moment between."""
    until(lambda: match_prefix(tier) == held, f"{held} are seen")


def test_a_remembered_lookup_is_not_repeated(server: RedisServer, tier: RedisTier) -> None:
    put(server, 0, 25)
    assert match_prefix(tier) == 25
    before = asked(server)
    assert [match_prefix(tier) for _ in range(10)] == [25] * 10
    assert asked(server) == before


def test_invalidations_cover_removed_and_added_keys(server: RedisServer, tier: RedisTier) -> None:
    put(server, 0, 10)
    told(tier, 10)
    put(server, 10, 11)
    told(tier, 11)
    server.client.delete(NAMES[0])
    told(tier, 0)
    put(server, 0, 1)
    told(tier, 11)
    server.client.flushall()
    told(tier, 0)


def test_an_expired_key_is_invalidated(server: RedisServer, tier: RedisTier) -> None:
    put(server, 0, 3)
    told(tier, 3)
    server.client.pexpire(NAMES[2], 1)
    while server.client.exists(NAMES[2]):
        pass
    told(tier, 2)


def test_another_connection_remembers_nothing(server: RedisServer, tier: RedisTier) -> None:
    put(server, 0, 10)
    told(tier, 10)
    server.stop()
    server.start()
    told(tier, 0)


def test_without_tracking_lookups_are_remembered_briefly(server: RedisServer, clock: Clock) -> None:
    server.client.flushall()
    server.client.execute_command("ACL", "SETUSER", "plain", "on", "nopass", "~*", "+@all", "-client")
    tier = RedisTier(RedisSettings(url=server.tcp, username="plain"), os_env=OsEnv(clock=clock))
    try:
        told(tier, 0)
        put(server, 0, 10)
        before = asked(server)
        assert match_prefix(tier) == 0
        assert asked(server) == before
        clock.seconds += 1
        told(tier, 10)
    finally:
        tier.close()
        server.client.execute_command("ACL", "DELUSER", "plain")


def test_remembered_lookups_are_bounded(server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup.HeadCache.__init__, "__defaults__", (8,))
    put(server, 0, 40)
    assert [match_prefix(tier) for _ in range(3)] == [40] * 3
    assert [len(memory) <= 8 for memory in tier._lookup._head_caches.values()] == [True]


@given(steps=st.lists(st.tuples(st.sampled_from(["put", "delete", "ask"]), st.integers(0, 40), st.integers(0, 40))))
def test_lookups_always_equal_the_servers_answer(server: RedisServer, steps: list[tuple[str, int, int]]) -> None:
    """Against a plain set: as long as there is no hole, the end is exact; what is remembered never shows."""
    server.client.flushall()
    tier: Any = TIERS.setdefault(server.port, RedisTier(RedisSettings(url=server.unix)))
    held = 0
    for what, at, _ in steps:
        if what == "put" and at > held:
            put(server, held, at)
            held = at
        elif what == "delete" and at < held:
            server.client.delete(*NAMES[at:held])
            held = at
        told(tier, held)


TIERS: dict[int, RedisTier] = {}

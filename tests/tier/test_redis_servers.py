"""The same work against every server that can be found here: Redis 6.2, Redis 7.0, Valkey 9."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.keys import KeyNames
from kvcache.tier.tier import Outcome
from tests.peer.redis_server import MISSING, RedisServer, servers
from tests.peer.redis_topology import until
from tests.tier.blocks import buffer, chain, holds, record
from tests.tier.test_redis_cluster import read, write

DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
FOUND = servers()
LONG = 1 << 20

pytestmark = pytest.mark.skipif(not FOUND, reason=MISSING)


@pytest.fixture(params=list(FOUND), scope="module")
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    server = RedisServer(binary=FOUND[request.param])
    yield server
    server.end()


@pytest.mark.parametrize("way", ["tcp", "unix"])
def test_every_operation_works_on_each_server(server: RedisServer, way: str) -> None:
    server.client.flushall()
    tier = RedisTier(RedisSettings(url=getattr(server, way), part_bytes=256 << 10))
    blocks = chain(40)
    large = chain(2, seed=1)
    into = [buffer(LONG) for _ in large]
    assert write(tier, blocks[:30]) == (DONE,) * 30
    assert write(tier, blocks[:30]) == (DONE,) * 30
    assert tier.write(large, [record(address, LONG) for address in large]) == (DONE,) * 2
    assert read(tier, blocks) == (DONE,) * 30 + (NOT_FOUND,) * 10
    assert tier.read(large, into) == (DONE,) * 2
    assert all(holds(segments, address, LONG) for segments, address in zip(into, large, strict=True))
    assert tier.contains(blocks) == (DONE,) * 30 + (NOT_FOUND,) * 10
    assert tier.match_prefix(blocks).result(10) == 30
    assert set(tier.scan()) == {*blocks[:30], *large}
    assert tier.check() == []
    assert tier.usage().records == 38
    assert tier.free_slots(1 << 20) > 0
    name = KeyNames("kvcache").record(blocks[3])
    server.client.setrange(name, 200, b"damaged")
    assert read(tier, blocks[:5]) == (DONE, DONE, DONE, Outcome.DAMAGED, DONE)
    assert server.client.exists(name) == 0
    assert tier.remove([*blocks, *large]) == (DONE,) * 3 + (NOT_FOUND,) + (DONE,) * 26 + (NOT_FOUND,) * 10 + (DONE,) * 2
    assert server.client.dbsize() == 0
    tier.close()


def test_each_server_sends_invalidations(server: RedisServer) -> None:
    """Client tracking, which all of them have: a hole that is filled is seen at once, though it was remembered."""
    server.client.flushall()
    asking, writing = RedisTier(RedisSettings(url=server.unix)), RedisTier(RedisSettings(url=server.tcp))
    blocks = chain(20)
    until(lambda: asking.match_prefix(blocks).result(10) == 0, "it was told")
    write(writing, blocks[:7])
    until(lambda: asking.match_prefix(blocks).result(10) == 7, "it was told")
    write(writing, blocks)
    until(lambda: asking.match_prefix(blocks).result(10) == 20, "it was told")
    writing.remove(blocks[12:])
    until(lambda: asking.match_prefix(blocks).result(10) == 12, "it was told")
    assert all(memory._wire is not None and memory._wire.tracked for memory in asking._lookup._head_caches.values())
    asking.close()
    writing.close()

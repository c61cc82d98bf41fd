"""Counts of a fleet's chains: against a plain dict of uses, each halved as time goes by."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from kvcache.fleet.coordination import Coordination
from kvcache.fleet.popularity import MAX_CHAIN_BLOCKS, Popularity
from tests.peer.redis_server import RedisServer

HALF_LIFE_S = 100.0
START_S = 1_800_000_000.0  # what a wall clock says


def chain(number: int, blocks: int = 3) -> bytes:
    return b"".join(bytes([number, block]) * 16 for block in range(blocks))


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(uses=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(0, 120)), max_size=40))
def test_chains_are_ordered_by_decayed_counts(
    make_coordination: Callable[[], Coordination], server: RedisServer, uses: Any
) -> None:
    server.client.flushall()
    popularity, now = Popularity(make_coordination(), half_life_s=HALF_LIFE_S), START_S
    counts: dict[int, list[tuple[int, float]]] = {}
    for number, count, later_s in uses:
        now += later_s
        popularity.add(b"n" * 32, chain(number), count, now)
        counts.setdefault(number, []).append((count, now))
    worth = {n: sum(c * 0.5 ** ((now - at) / HALF_LIFE_S) for c, at in some) for n, some in counts.items()}
    found = [packed[0] for packed in popularity.hottest(b"n" * 32, 10)]
    assert sorted(found) == sorted(worth)
    for hot, cold in pairwise(found):
        assert worth[hot] >= worth[cold] * (1 - 1e-4)
    for member, score in server.client.zrange(server.client.keys("*:heat")[0], 0, -1, withscores=True) if uses else ():
        decayed = 2 ** (score - now / HALF_LIFE_S)
        assert math.isclose(decayed, worth[member[0]], rel_tol=1e-4)


def test_the_least_popular_chain_is_dropped(coordination: Coordination, server: RedisServer) -> None:
    popularity = Popularity(coordination, half_life_s=HALF_LIFE_S, chains=3)
    for number, uses in ((1, 5), (2, 1), (3, 4), (4, 9), (5, 2)):
        popularity.add(b"n" * 32, chain(number), uses, START_S)
    assert [packed[0] for packed in popularity.hottest(b"n" * 32, 10)] == [4, 1, 5], "new ones stay at first"
    (held,) = server.client.keys("*:chains")
    assert server.client.hlen(held) == 3
    assert all(server.client.ttl(key) > 0 for key in server.client.scan_iter())


def test_popularity_decays_with_time(coordination: Coordination) -> None:
    popularity = Popularity(coordination, half_life_s=HALF_LIFE_S)
    popularity.add(b"n" * 32, chain(1), 1000, START_S)
    popularity.add(b"n" * 32, chain(2), 1, START_S + 20 * HALF_LIFE_S)
    assert [packed[0] for packed in popularity.hottest(b"n" * 32, 2)] == [2, 1]


def test_chains_are_bounded_per_namespace(coordination: Coordination) -> None:
    popularity = Popularity(coordination)
    popularity.add(b"n" * 32, chain(1, 9), 1, START_S)
    popularity.add(b"m" * 32, b"\7" * 32 * (MAX_CHAIN_BLOCKS + 5), 1, START_S)
    assert popularity.hottest(b"n" * 32, 5) == [chain(1, 9)]
    assert [len(packed) for packed in popularity.hottest(b"m" * 32, 5)] == [MAX_CHAIN_BLOCKS * 32]
    assert popularity.hottest(b"o" * 32, 5) == []


def test_invalid_entries_in_the_server_are_skipped(coordination: Coordination, server: RedisServer) -> None:
    popularity = Popularity(coordination)
    popularity.add(b"n" * 32, chain(1), 9, START_S)
    popularity.add(b"n" * 32, chain(2), 5, START_S)
    (held,) = server.client.keys("*:chains")
    server.client.hset(held, chain(1)[-32:], b"odd")
    assert popularity.hottest(b"n" * 32, 5) == [chain(2)]
    server.client.delete(held)
    assert popularity.hottest(b"n" * 32, 5) == []

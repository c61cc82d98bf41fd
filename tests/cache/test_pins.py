"""Pins: a prefix that an operator keeps, how much of it, and for how long."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.cache.cache import Cache
from kvcache.cache.pins import MAX_PIN_S, PIN_DIVISOR
from kvcache.errors import ConfigError
from kvcache.os_env import OsEnv
from kvcache.settings.sources import load
from tests.cache.test_usage import Clock
from tests.daemon.daemon_process import LAYOUT, bound_to, store

BLOCKS = 64
"""Records that fit into host: 12 KiB each."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def cache(clock: Clock) -> Iterator[Cache]:
    settings = load(None, host={"capacity_bytes": "768KiB", "slab_bytes": "192KiB"}, nvme__enabled=False)
    with Cache(settings, OsEnv(clock=clock)) as made:
        yield made
        assert made.check() == []


def tokens(seed: int, blocks: int) -> list[int]:
    return [seed * 10_000 + i for i in range(blocks * LAYOUT.block_tokens)]


def packed(handle: Any, ids: list[int]) -> bytes:
    with handle.request() as r:
        r.match(ids)
        return bytes(r.chain.packed)


def there(handle: Any, ids: list[int]) -> int:
    with handle.request() as r:
        return int(r.match(ids).blocks)


def pinned(cache: Cache) -> int:
    return int(cache.stats()["tiers"]["host"]["pinned_bytes"])


def flood(handle: Any, first: int, times: int = 8) -> None:
    """Store more than fits, a prompt at a time."""
    for seed in range(first, first + times):
        store(handle, tokens(seed, 16), seed)


def test_a_pinned_prefix_stays_until_the_pin_ends(cache: Cache, clock: Clock) -> None:
    handle = bound_to(cache)
    ids = tokens(1, 6)
    store(handle, ids, 1)
    pin = cache.pins.pin(handle, packed(handle, ids), 60)
    assert (pin.blocks, pin.wanted, pin.by_tier) == (6, 6, {"host": 6})
    assert pin.ends == clock.wall() + 60
    assert pinned(cache) == 6 * 12 * 1024
    flood(handle, 10)
    assert there(handle, ids) == 6
    clock.time += 59
    flood(handle, 20)
    assert there(handle, ids) == 6
    clock.time += 1
    flood(handle, 30)
    assert there(handle, ids) == 0
    assert (cache.pins.all(), pinned(cache), cache.index.held()) == ([], 0, 0)


def test_an_unpinned_prefix_is_evicted_normally(cache: Cache) -> None:
    handle = bound_to(cache)
    store(handle, tokens(1, 4), 1)
    pin = cache.pins.pin(handle, packed(handle, tokens(1, 4)), 60)
    assert cache.pins.unpin(pin.id)
    assert not cache.pins.unpin(pin.id)
    flood(handle, 10)
    assert there(handle, tokens(1, 4)) == 0


def test_pins_are_bounded_in_bytes(cache: Cache) -> None:
    handle = bound_to(cache)
    store(handle, tokens(1, 16), 1)
    share = BLOCKS // PIN_DIVISOR
    first = cache.pins.pin(handle, packed(handle, tokens(1, 16)), 60)
    assert (first.blocks, first.wanted, first.by_tier) == (share, 16, {"host": share})
    store(handle, tokens(2, 2), 2)
    with pytest.raises(ConfigError, match="no capacity"):
        cache.pins.pin(handle, packed(handle, tokens(2, 2)), 60)
    cache.pins.unpin(first.id)
    assert cache.pins.pin(handle, packed(handle, tokens(2, 2)), 60).blocks == 2
    assert pinned(cache) == 2 * 12 * 1024


def test_pins_are_bounded_in_number(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.cache.pins.MAX_PINS", 2)
    handle = bound_to(cache)
    store(handle, tokens(1, 1), 1)
    made = [cache.pins.pin(handle, packed(handle, tokens(1, 1)), 60) for _ in range(2)]
    with pytest.raises(ConfigError, match="the limit"):
        cache.pins.pin(handle, packed(handle, tokens(1, 1)), 60)
    assert cache.pins.all() == made
    assert all(cache.pins.unpin(pin.id) for pin in made)
    assert cache.index.held() == 0


def test_invalid_pins_are_refused(cache: Cache) -> None:
    handle = bound_to(cache)
    with pytest.raises(ConfigError, match="no block of this prefix"):
        cache.pins.pin(handle, packed(handle, tokens(1, 4)), 60)
    store(handle, tokens(1, 4), 1)
    for seconds in (0.0, -1.0, MAX_PIN_S + 1, float("nan")):
        with pytest.raises(ConfigError, match="expected more than 0"):
            cache.pins.pin(handle, packed(handle, tokens(1, 4)), seconds)
    assert cache.index.held() == 0


def test_clear_removes_a_pinned_namespace(cache: Cache) -> None:
    handle = bound_to(cache)
    store(handle, tokens(1, 4), 1)
    pin = cache.pins.pin(handle, packed(handle, tokens(1, 4)), 60)
    handle.clear()
    assert there(handle, tokens(1, 4)) == 0
    assert cache.pins.unpin(pin.id)
    assert cache.index.held() == 0


def test_a_usage_report_counts_each_namespace_and_is_cached(cache: Cache, clock: Clock) -> None:
    one, other = bound_to(cache), bound_to(cache, tenant="other")
    store(one, tokens(1, 3), 1)
    store(other, tokens(1, 2), 1)
    counted = {space: dict(held) for space, held in cache.namespace_usage.take().items()}
    assert counted == {one.id: {"host": (3, 3 * 12 * 1024)}, other.id: {"host": (2, 2 * 12 * 1024)}}
    store(one, tokens(2, 1), 2)
    assert cache.namespace_usage.take()[one.id]["host"].records == 3
    assert cache.namespace_usage.take(anew=True)[one.id]["host"].records == 4
    store(one, tokens(3, 1), 3)
    clock.time += 60
    assert cache.namespace_usage.take()[one.id]["host"].records == 5

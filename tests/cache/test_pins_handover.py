"""Pins of a process, in the one that takes its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvcache.cache.cache import Cache
from kvcache.os_env import OsEnv
from kvcache.settings.sources import load as load_settings
from tests.cache.test_pins import flood, packed, pinned, there, tokens
from tests.cache.test_usage import Clock
from tests.cache.test_warm_restart import changed, left, taken
from tests.daemon.daemon_process import bound_to, store

EXTENT = 192 << 10
"""Sixteen records."""


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make(clock: Clock) -> Iterator[Callable[..., Cache]]:
    caches: list[Cache] = []

    def open_cache(extents: int = 4) -> Cache:
        host = {"capacity_bytes": extents * EXTENT, "slab_bytes": EXTENT}
        caches.append(Cache(load_settings(None, host=host, nvme__enabled=False), OsEnv(clock=clock), shared=True))
        return caches[-1]

    yield open_cache
    faults = [cache.check() for cache in caches if not cache.on_quiesced]  # one that left its memory has none to check
    for cache in caches:
        cache.close()
    assert faults == [[]] * len(faults)


def kept(cache: Cache, *seeds: int, seconds: float = 60) -> None:
    """Prompts of four blocks, each stored and pinned."""
    handle = bound_to(cache)
    for seed in seeds:
        store(handle, tokens(seed, 4), seed)
        cache.pins.pin(handle, packed(handle, tokens(seed, 4)), seconds)


def told(cache: Cache) -> list[dict[str, Any]]:
    return [pin.describe() for pin in cache.pins.all()]


def test_pins_keep_their_numbers_and_end_after_a_handover(make: Callable[..., Cache], clock: Clock) -> None:
    old = make()
    kept(old, 1)
    kept(old, 2, seconds=600)
    old.pins.unpin(1)
    before = told(old)
    clock.time += 30
    successor = make()
    assert taken(successor, *left(old)) == 8
    assert told(successor) == before
    assert pinned(successor) == 4 * 12288
    handle = bound_to(successor)
    flood(handle, 10)
    assert (there(handle, tokens(1, 4)), there(handle, tokens(2, 4))) == (0, 4)
    kept(successor, 3)
    assert [pin["pin"] for pin in told(successor)] == [2, 3]
    clock.time += 569
    assert [pin["pin"] for pin in told(successor)] == [2]
    clock.time += 1
    assert (told(successor), successor.index.held()) == ([], 0)
    flood(handle, 20)
    assert there(handle, tokens(2, 4)) == 0


def test_an_ended_or_empty_pin_is_not_taken_over(make: Callable[..., Cache], clock: Clock) -> None:
    old = make()
    kept(old, 1, seconds=10)
    flood(bound_to(old), 10, times=2)
    kept(old, 2)
    table, descriptors = left(old)
    clock.time += 10
    successor = make(extents=1)  # the extent that was used last, of which pins keep two blocks at most
    assert taken(successor, table, descriptors) == 8
    (pin,) = told(successor)
    assert (pin["pin"], pin["tokens"], pin["wanted_tokens"]) == (2, 2 * 4, 4 * 4)
    assert successor.index.held() == 2
    last = make(extents=1)
    assert taken(last, *left(successor)) == 8
    assert told(last) == [pin]


def test_pinned_blocks_are_handed_over_first(make: Callable[..., Cache]) -> None:
    old = make()
    handle = bound_to(old)
    store(handle, tokens(1, 2), 1)
    old.pins.pin(handle, packed(handle, tokens(1, 2)), 60)
    flood(handle, 10, times=2)
    before = told(old)
    successor = make(extents=1)
    taken(successor, *left(old))
    assert told(successor) == before
    assert there(bound_to(successor), tokens(1, 2)) == 2


@pytest.mark.parametrize(("extents", "kept_on"), [(1, 8), (4, 16)])
def test_a_partly_lost_pin_is_logged(
    make: Callable[..., Cache], extents: int, kept_on: int, caplog: pytest.LogCaptureFixture
) -> None:
    old = make()
    kept(old, 1)
    successor = make(extents=extents)
    taken(successor, *left(old))
    assert [pin["tokens"] for pin in told(successor)] == [kept_on]
    assert ("pin 1: previous process held 16 tokens, 8 continue" in caplog.text) == (kept_on < 16)


def test_a_fully_lost_pin_is_logged(make: Callable[..., Cache], caplog: pytest.LogCaptureFixture) -> None:
    old = make()
    kept(old, 1)
    table, descriptors = left(old)
    successor = make()
    assert taken(successor, changed(table, lambda told: told["extents"][0].update(slot_bytes=1)), descriptors) == 0
    assert told(successor) == []
    assert "pin 1: previous process held 16 tokens, 0 continue" in caplog.text


def test_pin_numbers_are_not_reused_after_a_handover(make: Callable[..., Cache]) -> None:
    old = make()
    kept(old, 1, 2)
    old.pins.unpin(2)
    successor = make()
    taken(successor, *left(old))
    kept(successor, 3)
    assert [pin["pin"] for pin in told(successor)] == [1, 3]
    successor.pins.unpin(3)
    last = make()
    taken(last, *left(successor))
    kept(last, 4)
    assert [pin["pin"] for pin in told(last)] == [1, 4]


@pytest.mark.parametrize("change", [{}, {"last_pin": "many"}, {"last_pin": -1}])
def test_a_bad_last_pin_number_loses_no_pins(make: Callable[..., Cache], change: dict[str, Any]) -> None:
    old = make()
    kept(old, 1)
    table, descriptors = left(old)
    successor = make()

    def other(told: dict[str, Any]) -> None:
        del told["last_pin"]
        told.update(change)

    assert taken(successor, changed(table, other), descriptors) == 4
    kept(successor, 2)
    assert [pin["pin"] for pin in told(successor)] == [1, 2]


def test_a_table_without_pins_is_accepted(make: Callable[..., Cache]) -> None:
    old = make()
    kept(old, 1)
    table, descriptors = left(old)
    successor = make()
    assert taken(successor, changed(table, lambda told: told.pop("pins")), descriptors) == 4
    assert (told(successor), successor.index.held()) == ([], 0)


@pytest.mark.parametrize(
    "change",
    [
        {"pin": 0},
        {"pin": "1"},
        {"blocks": -1},
        {"ends": "soon"},
        {"ends": float("nan")},
        {"ends": 1e300},
        {"runs": []},
        {"runs": [[b"", bytes(32), 8192]]},
        {"runs": [[bytes(42), bytes(31), 8192]]},
        {"runs": [[bytes(42), bytes(32), 0]]},
        {"runs": [[bytes(42), bytes(32), 8192]]},
        {"signature": None},
    ],
)
def test_an_invalid_pin_is_dropped_without_losing_records(make: Callable[..., Cache], change: dict[str, Any]) -> None:
    old = make()
    kept(old, 1, 2)
    table, descriptors = left(old)
    successor = make()
    assert taken(successor, changed(table, lambda told: told["pins"][1].update(change)), descriptors) == 8
    assert [pin["pin"] for pin in told(successor)] == [1]
    assert successor.index.held() == 4
    kept(successor, 3)
    assert len(told(successor)) == 2

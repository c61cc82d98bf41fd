"""What an operator orders of a running cache: how much of a prefix is brought near to be pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.block.record import record_bytes
from kvcache.cache.cache import Cache
from kvcache.cache.pins import MAX_PIN_S, PIN_DIVISOR
from kvcache.daemon.server.control import pin
from kvcache.errors import ConfigError
from kvcache.index.block_run import wanted
from kvcache.settings.sources import load as load_settings
from tests.contract.fake_engine import HYBRID, Engine, bind
from tests.daemon.daemon_process import LAYOUT, bound_to, store

FITS = 64 // PIN_DIVISOR
"""Blocks that pins may hold in host memory: 64 records of 12 KiB are what it has."""
BLOCKS = 2 * FITS
TOKENS = list(range(BLOCKS * LAYOUT.block_tokens))


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[[], Cache]]:
    """Each has what the one before left on the drive, and nothing in host memory."""
    with ExitStack() as last:

        def make() -> Cache:
            last.close()
            settings = load_settings(
                None,
                host={"capacity_bytes": "768KiB", "slab_bytes": "192KiB"},
                nvme={"enabled": True, "path": str(tmp_path), "capacity_bytes": "64MiB", "min_free_bytes": 0},
                control={"enabled": False},
            )
            return last.enter_context(Cache(settings))

        yield make


@pytest.fixture
def far(opened: Callable[[], Cache]) -> Cache:
    """A cache that has TOKENS on its drive alone."""
    cache = opened()
    store(bound_to(cache), TOKENS, 1)
    assert cache.flush(60)
    cache = opened()
    assert tiers(bound_to(cache)) == {"nvme": BLOCKS}
    return cache


def tiers(handle: Any, tokens: list[int] = TOKENS) -> dict[str, int]:
    with handle.request() as r:
        return dict(r.match(tokens).by_tier)


def pinned(cache: Cache, seconds: float = 60, blocks: int = BLOCKS) -> dict[str, Any]:
    ids = np.array(TOKENS[: blocks * LAYOUT.block_tokens], "<u4").tobytes()
    return dict(pin(cache, {"ids": ids, "seconds": seconds})["made"])


def test_a_pin_promotes_at_most_its_budget(far: Cache) -> None:
    rest = (BLOCKS - FITS) * LAYOUT.block_tokens
    assert pinned(far)["by_tier"] == {"host": FITS * LAYOUT.block_tokens, "nvme": rest}
    assert tiers(bound_to(far)) == {"host": FITS, "nvme": BLOCKS - FITS}
    assert far.check() == []


def test_resident_blocks_count_in_the_pin_budget(far: Cache) -> None:
    handle, engine = bound_to(far), Engine(LAYOUT)
    near = TOKENS[: FITS // 2 * LAYOUT.block_tokens]
    with handle.request() as r:
        r.match(near)
        r.admit()
        assert r.load(FITS // 2, engine.described, engine.ids(list(range(FITS // 2)))).wait(60)
    assert tiers(handle) == {"host": FITS // 2, "nvme": BLOCKS - FITS // 2}
    pinned(far)
    assert tiers(handle) == {"host": FITS, "nvme": BLOCKS - FITS}


def test_other_pins_count_in_the_pin_budget(far: Cache) -> None:
    pinned(far, blocks=FITS - 2)
    pinned(far)
    assert tiers(bound_to(far)) == {"host": FITS - 2, "nvme": BLOCKS - FITS + 2}


@pytest.mark.parametrize("seconds", [-1.0, 0.0, MAX_PIN_S + 1])
def test_an_invalid_pin_promotes_nothing(far: Cache, seconds: float) -> None:
    with pytest.raises(ConfigError, match="a pin of"):
        pinned(far, seconds)
    assert tiers(bound_to(far)) == {"nvme": BLOCKS}


def test_a_pin_beyond_the_limit_promotes_nothing(far: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.cache.pins.MAX_PINS", 1)
    pinned(far, blocks=1)
    with pytest.raises(ConfigError, match="the limit"):
        pinned(far)
    assert tiers(bound_to(far)) == {"host": 1, "nvme": BLOCKS - 1}


@pytest.mark.parametrize("layout", [LAYOUT, HYBRID], ids=["one part", "several"])
@pytest.mark.parametrize("blocks", [0, 1, 7, 8, 9, 1000])
def test_a_block_fits_if_all_its_records_fit(opened: Callable[[], Cache], layout: Any, blocks: int) -> None:
    cache = opened()
    handle = bind(cache, layout)

    def size(blocks: int) -> int:
        need = wanted(layout, blocks)
        return sum(len(need[place.group]) * record_bytes(place.payload_bytes) for place in handle.all_shards)

    room = cache.host.usage().capacity_bytes // PIN_DIVISOR
    assert cache.pins.pinnable_blocks(handle, blocks) == max(n for n in range(blocks + 1) if size(n) <= room)

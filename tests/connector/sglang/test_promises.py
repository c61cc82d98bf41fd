"""A lookup promises what can be loaded for certain: in host memory, held, and no longer than somebody wants it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.connector.sglang import promises
from kvcache.connector.sglang.device import describe_device
from kvcache.connector.sglang.pool import Ranks
from kvcache.connector.sglang.promises import Promises
from kvcache.errors import LayoutError
from tests.connector.sglang.drives import Drive
from tests.connector.sglang.test_depot import chain, depot, opened, pool


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.001  # whoever waits makes time pass
        return self.seconds


def kept(place: Path, count: int, drive: Drive | None = None) -> Any:
    with opened(place) as cache:
        depot(cache, pool(1)).keep(chain(count), range(count))
    return opened(place, drive)


def test_what_lies_in_memory_is_promised_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        store = depot(cache, pool(1))
        keys = chain(9)
        store.keep(keys[:6], range(6))
        told = Promises(store.bound, 0.0)
        assert told.pages("a", keys) == 6
        assert told.pages("a", keys) == 6
        assert told.pages("b", keys[2:4]) == 2
        assert told.pages("c", chain(3, seed=9)) == 0
        request = told.take("a", keys[:6])
        assert request is not None
        request.close()
        assert told.take("a", keys[:6]) is None, "a promise is kept once"
        assert told.take("b", keys[:2]) is None, "of other pages nothing was promised"
        told.clear()
        assert len(told) == 0
        assert cache.stats()["tiers"]["host"]["held_bytes"] == 0


def test_a_hung_drive_is_not_waited_for_and_never_promised(tmp_path: Path) -> None:
    drive, clock = Drive(), Clock()
    cache = kept(tmp_path, 20, drive)
    drive.hang()
    told = Promises(depot(cache, pool()).bound, 0.05, clock)
    assert told.pages("a", chain(20)) == 0
    assert clock.seconds < 0.2
    waited = clock.seconds
    assert told.pages("a", chain(20)) == 0
    assert clock.seconds - waited < 0.05, "only the first lookup waits"
    assert told.take("a", chain(20)) is None
    drive.go()
    told.clear()
    cache.close()


def test_what_comes_up_is_promised_later(tmp_path: Path) -> None:
    with kept(tmp_path, 20) as cache:
        told = Promises(depot(cache, pool()).bound, 30.0)
        assert told.pages("a", chain(20)) == 20
        assert cache.stats()["tiers"]["host"]["records"] == 20
        told.clear()


def test_what_is_promised_does_not_leave(tmp_path: Path) -> None:
    """While others are stored until the memory has been filled many times over."""
    with opened(tmp_path, host_bytes=256 << 10) as cache:
        host, keys = pool(1), chain(4)
        store = depot(cache, host)
        assert store.keep(keys, range(4)) == [True] * 4
        told = Promises(store.bound, 0.0)
        promised = told.pages("a", keys)
        assert promised
        for seed in range(1, 20):
            store.keep(chain(40, seed=seed), range(40))
        request = told.take("a", keys[:promised])
        assert request is not None
        other = pool()
        transfer = request.load(promised, depot(cache, other).described.pages, [list(range(50, 50 + promised))])
        assert transfer.wait(30)
        assert transfer.blocks == promised
        for page in range(promised):
            assert torch.equal(other.page(50 + page), host.page(page))
        request.close()


def test_old_promises_are_given_back(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        store, clock = depot(cache, pool(1)), Clock()
        store.keep(chain(4), range(4))
        told = Promises(store.bound, 0.0, clock)
        assert told.pages("a", chain(4)) == 4
        clock.seconds += promises.LONGEST_S
        assert told.pages("b", chain(4)) == 4
        assert len(told) == 1
        assert told.take("a", chain(4)) is None
        told.clear()


def test_a_device_pool_is_told_by_its_buffers() -> None:
    class Pool:
        k_buffer = tuple(torch.randn(64, 2, 8) for _ in range(3))
        v_buffer = tuple(torch.randn(64, 2, 8) for _ in range(3))

    class Latent:
        kv_buffer = tuple(torch.randn(64, 1, 12) for _ in range(3))

    class Uneven(Pool):
        v_buffer = tuple(torch.randn(64, 2, 4) for _ in range(3))

    described = describe_device(Pool(), 16, Ranks(1, 2))
    [group], [shard], [there] = described.layout.groups, described.shards, described.pages
    assert (group.kind, group.kv_heads, shard.first_head, there.pages) == ("mha", 4, 2, 4)
    assert described.page_bytes == 3 * 2 * 16 * 2 * 8 * 4
    assert describe_device(Latent(), 16, Ranks(1, 2)).layout.groups[0].kind == "mla"
    for wrong in (Uneven(), object()):
        with pytest.raises(LayoutError, match=type(wrong).__name__):
            describe_device(wrong, 16, Ranks())

"""A lookup promises what can be loaded for certain: in host memory, held, and no longer than somebody wants it."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from kvcache.connector.sglang import lookup_leases as promises
from kvcache.connector.sglang.device_pools import describe_device
from kvcache.connector.sglang.host_pools import Ranks, describe_pool
from kvcache.connector.sglang.lookup_leases import LookupLeases
from kvcache.connector.sglang.pool_store import lengths_with_last_pages
from kvcache.errors import LayoutError
from tests.connector.sglang.faulty_disk import FaultyDisk
from tests.connector.sglang.test_pool_store import chain, opened, pool, pool_store


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 0.001  # each wait makes time pass
        return self.seconds


def length(told: LookupLeases, rid: str, keys: list[str]) -> int:
    ends = told.loadable_lengths(rid, keys)
    assert ends == list(range(1, len(ends) + 1))
    return len(ends)


def kept(place: Path, count: int, drive: FaultyDisk | None = None) -> Any:
    with opened(place) as cache:
        pool_store(cache, pool(1)).store(chain(count), range(count))
    return opened(place, drive)


def test_blocks_in_host_memory_are_leased_at_once(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        store = pool_store(cache, pool(1))
        keys = chain(9)
        store.store(keys[:6], range(6))
        told = LookupLeases({"kv": store.handle}, 0.0)
        assert length(told, "a", keys) == 6
        assert length(told, "a", keys) == 6
        assert length(told, "b", keys[2:4]) == 2
        assert length(told, "c", chain(3, seed=9)) == 0
        request = (told.claim("a", {"kv": keys[:6]}) or {}).get("kv")
        assert request is not None
        request.close()
        assert told.claim("a", {"kv": keys[:6]}) is None, "a promise is kept once"
        assert told.claim("b", {"kv": keys[:2]}) is None, "of other pages nothing was promised"
        told.clear()
        assert len(told) == 0
        assert cache.stats()["tiers"]["host"]["held_bytes"] == 0


def test_blocks_on_a_hung_drive_are_never_leased(tmp_path: Path) -> None:
    drive, clock = FaultyDisk(), Clock()
    cache = kept(tmp_path, 20, drive)
    drive.hang()
    told = LookupLeases({"kv": pool_store(cache, pool()).handle}, 0.05, clock)
    assert length(told, "a", chain(20)) == 0
    assert clock.seconds < 0.2
    waited = clock.seconds
    assert length(told, "a", chain(20)) == 0
    assert clock.seconds - waited < 0.05, "only the first lookup waits"
    assert told.claim("a", {"kv": chain(20)}) is None
    drive.go()
    told.clear()
    cache.close()


def test_promoted_blocks_are_leased_at_a_later_lookup(tmp_path: Path) -> None:
    with kept(tmp_path, 20) as cache:
        told = LookupLeases({"kv": pool_store(cache, pool()).handle}, 30.0)
        assert length(told, "a", chain(20)) == 20
        assert cache.stats()["tiers"]["host"]["records"] == 20
        told.clear()


def test_leased_blocks_are_not_evicted(tmp_path: Path) -> None:
    """While others are stored until the memory has been filled many times over."""
    with opened(tmp_path, host_bytes=256 << 10) as cache:
        host, keys = pool(1), chain(4)
        store = pool_store(cache, host)
        assert store.store(keys, range(4)) == [True] * 4
        told = LookupLeases({"kv": store.handle}, 0.0)
        promised = length(told, "a", keys)
        assert promised
        for seed in range(1, 20):
            store.store(chain(40, seed=seed), range(40))
        request = (told.claim("a", {"kv": keys[:promised]}) or {}).get("kv")
        assert request is not None
        other = pool()
        transfer = request.load(promised, pool_store(cache, other).described.pages, [list(range(50, 50 + promised))])
        assert transfer.wait(30)
        assert transfer.blocks == promised
        for page in range(promised):
            assert torch.equal(other.page(50 + page), host.page(page))
        request.close()


def test_expired_leases_are_released(tmp_path: Path) -> None:
    with opened(tmp_path) as cache:
        store, clock = pool_store(cache, pool(1)), Clock()
        store.store(chain(4), range(4))
        told = LookupLeases({"kv": store.handle}, 0.0, clock)
        assert length(told, "a", chain(4)) == 4
        clock.seconds += promises.MAX_LEASE_S
        assert length(told, "b", chain(4)) == 4
        assert len(told) == 1
        assert told.claim("a", {"kv": chain(4)}) is None
        told.clear()


def test_a_device_pool_is_described_by_its_buffers() -> None:
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


def test_a_windowed_pool_is_leased_with_its_full_window(tmp_path: Path) -> None:
    """Against every end looked at by hand, over pages with holes between."""
    rng = Random(7)
    with opened(tmp_path) as cache:
        for turn in range(12):
            keys, window = chain(12, seed=100 + turn), rng.randint(1, 4)
            whole = pool_store(cache, pool(1), facts={"pool": f"kv {turn}"})
            last = pool_store(cache, pool(2), facts={"pool": f"swa {turn}"})
            count = rng.randint(0, 12)
            whole.store(keys[:count], range(count))
            here = [rng.random() < 0.7 for _ in keys]
            for i in range(12):
                if here[i]:
                    last.store(keys[i : i + 1], [i])
            told = LookupLeases({"kv": whole.handle, "swa": last.handle}, 0.0)
            right = sorted(lengths_with_last_pages(here[:count], window))
            ends = told.loadable_lengths("a", keys, {"swa": window})
            assert ends == right[-promises.MAX_ENDS :], (here, count, window)
            assert told.loadable_lengths("a", keys, {"swa": window}) == ends
            if not ends:
                assert told.claim("a", {"kv": keys[:1], "swa": keys[:1]}) is None
                continue
            end = rng.choice(ends)
            wanted = {"kv": keys[:end], "swa": keys[max(0, end - window) : end]}
            requests = told.claim("a", wanted)
            assert requests is not None
            for store, name in ((whole, "kv"), (last, "swa")):
                other, moved = pool(), wanted[name]
                target = describe_pool(other, Ranks()).pages
                transfer = requests[name].load(len(moved), target, [list(range(40, 40 + len(moved)))])
                assert transfer.wait(30)
                assert transfer.blocks == len(moved)
                source = pool(1 if name == "kv" else 2)
                for i, key in enumerate(moved):
                    assert torch.equal(other.page(40 + i), source.page(keys.index(key)))
                requests[name].close()
                assert store.handle.id
            assert len(told) == 0
        assert cache.stats()["tiers"]["host"]["held_bytes"] == 0


def test_a_window_on_the_drive_is_leased_once_promoted(tmp_path: Path) -> None:
    keys = chain(20)
    with opened(tmp_path) as cache:
        for name in ("kv", "swa"):
            pool_store(cache, pool(1), facts={"pool": name}).store(keys, range(20))
    drive = FaultyDisk()
    with opened(tmp_path, drive) as cache:
        drive.hang()
        handles = {name: pool_store(cache, pool(), facts={"pool": name}).handle for name in ("kv", "swa")}
        hung = LookupLeases(handles, 0.0).loadable_lengths("a", keys, {"swa": 4})
        drive.go()
        assert hung == []
        assert LookupLeases(handles, 30.0).loadable_lengths("a", keys, {"swa": 4}) == [17, 18, 19, 20]

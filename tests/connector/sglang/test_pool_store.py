"""One pool over a real cache: contiguous answers, truth about what is kept, and an end to every call."""

from __future__ import annotations

import errno
import hashlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcache.cache.cache import Cache
from kvcache.connector.sglang.host_pools import Ranks, describe_pool
from kvcache.connector.sglang.pool_store import PoolStore
from kvcache.os_env import OsEnv
from kvcache.settings.sources import load
from kvcache.testing.faulty_cache import FaultyCache
from kvcache.testing.naive_cache import NaiveCache
from tests.connector.sglang.fake_host_pools import MHATokenToKVPoolHost
from tests.connector.sglang.faulty_disk import FaultyDisk

PAGES = 64


def chain(count: int, seed: int = 0) -> list[str]:
    """Digests as SGLang writes them, each of the one before."""
    keys = [hashlib.sha256(seed.to_bytes(4, "little")).hexdigest()]
    while len(keys) < count:
        keys.append(hashlib.sha256(bytes.fromhex(keys[-1])).hexdigest())
    return keys


def pool(seed: int | None = None) -> MHATokenToKVPoolHost:
    made = MHATokenToKVPoolHost("page_first_direct", pages=PAGES)
    if seed is not None:
        made.fill(seed)
    return made


def pool_store(cache: Any, host: Any, ranks: Ranks | None = None, **named: Any) -> PoolStore:
    described = describe_pool(host, ranks or Ranks())
    fields = {"model": "m", "revision": "r"} | named
    handle = cache.namespace(described.layout, shards=described.shards, **fields)
    return PoolStore(handle, described, 30.0)


def opened(place: Path, drive: FaultyDisk | None = None, host_bytes: int = 8 << 20) -> Cache:
    settings = load(
        host={"capacity_bytes": host_bytes, "slab_bytes": min(host_bytes // 4, 1 << 20)},
        nvme={"path": place / "nvme", "capacity_bytes": 64 << 20, "min_free_bytes": 0, "segment_bytes": 1 << 20},
        control={"enabled": False},
    )
    return Cache(settings, OsEnv(disk=drive or FaultyDisk()))


@pytest.fixture(params=["naive", "tiers"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made: Any = NaiveCache() if request.param == "naive" else opened(tmp_path)
    yield made
    assert made.flush(30)
    assert made.check() == []
    made.close()


def test_stored_pages_load_into_other_pages(cache: Any) -> None:
    first, second, keys = pool(1), pool(), chain(9)
    assert pool_store(cache, first).store(keys, range(9)) == [True] * 9
    store = pool_store(cache, second)
    assert store.match_prefix(keys) == 9
    assert store.load(keys, range(20, 29)) == [True] * 9
    for i in range(9):
        assert torch.equal(second.page(20 + i), first.page(i))
    assert not second.kv_buffer[:, 9:20].any(), "a page that was not named was written"


def test_hits_are_a_contiguous_prefix(tmp_path: Path) -> None:
    host, keys = pool(2), chain(12)
    cache = opened(tmp_path)
    store = pool_store(cache, host)
    assert store.store(keys[:3], range(3), []) == [True] * 3
    assert store.store(keys[6:8], range(6, 8), keys[:6]) == [False] * 2, "a tail without its head would never be found"
    assert store.store(keys[6:8], range(6, 8)) == [True] * 2, "unless the caller does not say that it has none"
    assert store.match_prefix(keys, []) == 3
    assert store.match_prefix(keys[6:], keys[:6]) == 2
    assert store.match_prefix(keys[3:], keys[:3]) == 0
    assert store.present(keys) == [True] * 3 + [False] * 3 + [True] * 2 + [False] * 4
    assert store.load(keys, range(12), []) == [True] * 3 + [False] * 9
    cache.close()


def test_a_chain_may_be_given_in_parts(cache: Any) -> None:
    """SGLang asks about what it lacks: each call begins where its own cache ends."""
    host, other, keys = pool(3), pool(), chain(40)
    store = pool_store(cache, host)
    for first in range(0, 40, 8):
        part = keys[first : first + 8]
        before = None if first % 16 else keys[:first]
        assert store.store(part, range(first, first + 8), before) == [True] * 8
    for first in (0, 5, 17, 39):
        assert store.match_prefix(keys[first:], keys[:first] if first % 2 else None) == 40 - first
        assert all(pool_store(cache, other).load(keys[first:], range(first, 40), None))
    for page in range(40):
        assert torch.equal(other.page(page), host.page(page))


@pytest.mark.parametrize(
    "named", [{"revision": "s"}, {"model": "n"}, {"tenant": "t"}, {"cache_salt": "x"}, {"facts": {"a": 1}}]
)
def test_keys_of_another_model_are_a_miss(cache: Any, named: dict[str, Any]) -> None:
    """SGLang's keys know nothing of weights, types or tenants."""
    keys = chain(4)
    pool_store(cache, pool(4)).store(keys, range(4))
    store = pool_store(cache, pool(), **named)
    assert store.match_prefix(keys) == 0
    assert store.load(keys, range(4)) == [False] * 4


def test_another_dtype_layout_or_page_size_is_a_miss(cache: Any) -> None:
    keys = chain(4)
    pool_store(cache, pool(5)).store(keys, range(4))
    for host in (
        MHATokenToKVPoolHost("page_first_direct", dtype=torch.float8_e4m3fn),
        MHATokenToKVPoolHost("page_first_direct", dtype=torch.float16),
        MHATokenToKVPoolHost("page_first"),
        MHATokenToKVPoolHost("page_first_direct", page=8),
        MHATokenToKVPoolHost("page_first_direct", layers=2),
    ):
        store = pool_store(cache, host)
        assert store.match_prefix(keys) == 0
        assert store.load(keys, range(4)) == [False] * 4


def test_each_rank_has_its_own_part(cache: Any) -> None:
    keys, hosts = chain(5), [pool(6), pool(7)]
    stores = [pool_store(cache, host, Ranks(rank, 2)) for rank, host in enumerate(hosts)]
    assert stores[0].store(keys, range(5)) == [True] * 5
    assert stores[1].match_prefix(keys) == 0
    assert stores[1].store(keys, range(5)) == [True] * 5
    for rank, host in enumerate(hosts):
        other = pool()
        assert pool_store(cache, other, Ranks(rank, 2)).load(keys, range(5)) == [True] * 5
        assert torch.equal(other.kv_buffer[:, :5], host.kv_buffer[:, :5])


def test_concurrent_threads_load_their_own_pages(cache: Any) -> None:
    faults: list[str] = []

    def work(seed: int) -> None:
        host, other, keys = pool(seed), pool(), chain(16, seed)
        store, reader = pool_store(cache, host), pool_store(cache, other)
        for _ in range(5):
            store.store(keys, range(16))
            came = reader.load(keys, range(16, 32))
            wrong = [i for i in range(came.count(True)) if not torch.equal(other.page(16 + i), host.page(i))]
            faults.extend(f"{seed}: page {i}" for i in wrong)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []


def test_pages_load_from_the_drive_after_a_restart(tmp_path: Path) -> None:
    host, keys = pool(8), chain(20)
    with opened(tmp_path) as cache:
        pool_store(cache, host).store(keys, range(20))
    with opened(tmp_path) as cache:
        other = pool()
        store = pool_store(cache, other)
        assert store.match_prefix(keys) == 20
        assert store.load(keys, range(20)) == [True] * 20
        assert torch.equal(other.kv_buffer[:, :20], host.kv_buffer[:, :20])


def test_calls_over_a_hung_drive_end_and_write_nothing_later(tmp_path: Path) -> None:
    host, keys, drive = pool(9), chain(20), FaultyDisk()
    with opened(tmp_path) as cache:
        pool_store(cache, host).store(keys, range(20))
    cache = opened(tmp_path, drive)
    other = pool()
    store = pool_store(cache, other)
    store.deadline_s = 0.3
    drive.hang()
    start = time.monotonic()
    assert store.match_prefix(keys) == 20, "the index is in memory"
    assert store.load(keys, range(20)) == [False] * 20
    store.deadline_s = 30.0
    assert store.store(chain(4, seed=1), range(40, 44)) == [True] * 4, "what is stored goes to memory first"
    assert time.monotonic() - start < 10, "SGLang cannot stop its threads any more after ten seconds"
    kept = other.kv_buffer.clone()
    drive.go()
    assert cache.flush(30)
    assert torch.equal(other.kv_buffer, kept), "SGLang has given these pages to others by now"
    assert store.load(keys, range(20)) == [True] * 20
    cache.close()


def test_a_full_drive_keeps_what_fits_in_memory(tmp_path: Path) -> None:
    host, drive = pool(10), FaultyDisk()
    cache = opened(tmp_path, drive)
    drive.error = errno.ENOSPC
    store, keys = pool_store(cache, host), chain(10)
    assert store.store(keys, range(10)) == [True] * 10
    assert not cache.flush(30), "not everything is where it was meant to be"
    other = pool()
    assert pool_store(cache, other).load(keys, range(10)) == [True] * 10
    drive.error = None
    cache.close()


def test_a_host_tier_that_is_too_small_is_reported(tmp_path: Path) -> None:
    """A page that was not kept must never be said to be: SGLang would believe it for ever."""
    with opened(tmp_path, host_bytes=64 << 10) as cache:
        host, other, keys = pool(11), pool(), chain(60)
        kept = pool_store(cache, host).store(keys, range(60))
        assert cache.flush(30)
        count = kept.count(True)
        assert kept == [True] * count + [False] * (60 - count)
        came = pool_store(cache, other).load(keys, range(60))
        for i in range(came.count(True)):
            assert torch.equal(other.page(i), host.page(i))


@pytest.mark.parametrize("fault", ["asking", "gone", "damaged", "hung", "full"])
def test_cache_faults_raise_no_error(fault: Any) -> None:
    cache = FaultyCache()
    host, keys = pool(12), chain(8)
    pool_store(cache, host).store(keys, range(8))
    cache.fault = fault
    other = pool()
    store = pool_store(cache, other)
    store.deadline_s = 1.0 if fault in {"asking", "hung"} else 30.0  # both take all of it
    assert store.match_prefix(keys) == (0 if fault == "asking" else 8)
    came = store.load(keys, range(8))
    assert came == [True] * came.count(True) + [False] * came.count(False)
    assert came.count(True) == {"gone": 0, "damaged": 4, "hung": 0}.get(fault, 8)
    for i in range(came.count(True)):
        assert torch.equal(other.page(i), host.page(i))
    assert store.store(chain(3, seed=2), range(3)) == [fault != "full"] * 3


def test_a_closed_cache_is_a_miss(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    store, keys = pool_store(cache, pool(13)), chain(4)
    cache.close()
    assert store.match_prefix(keys) == 0
    assert store.load(keys, range(4)) == [False] * 4
    assert store.store(keys, range(4)) == [False] * 4
    assert store.match_prefix(["no digest"]) == 0

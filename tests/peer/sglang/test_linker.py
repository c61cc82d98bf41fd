"""The linker on SGLang's device pool: what was offloaded is loaded, byte for byte, and no promise is broken."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.peer.sglang.device_pools import DIM, HEADS, LAYERS, PAGE

PAGES = 64

pytestmark = pytest.mark.usefixtures("sglang_in_process")


def chain(count: int) -> list[str]:
    keys = [hashlib.sha256(b"first").hexdigest()]
    while len(keys) < count:
        keys.append(hashlib.sha256(bytes.fromhex(keys[-1])).hexdigest())
    return keys


class Bench:
    def __init__(self, place: Path, **ours: Any) -> None:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        from kvcache.connector.sglang import KVCacheLinker

        nvme = {"path": str(place / "nvme"), "capacity_bytes": 64 << 20, "min_free_bytes": 0}
        given = {"revision": "1", "host": {"capacity_bytes": 32 << 20}, "nvme": nvme, "control": {"enabled": False}}
        self.pool = MHATokenToKVPool((PAGES - 1) * PAGE, PAGE, torch.bfloat16, HEADS, DIM, LAYERS, "cpu", False)
        params = SimpleNamespace(
            page_size=PAGE, token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: self.pool)
        )
        served = SimpleNamespace(model_path="tiny")
        self.linker = KVCacheLinker(served, params, extra_config={"kvcache": given | ours})

    def fill(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.copy_(torch.randn(buffer.shape, generator=made))

    def page(self, number: int) -> torch.Tensor:
        at = slice(number * PAGE, (number + 1) * PAGE)
        return torch.stack([buffer[at] for buffer in (*self.pool.k_buffer, *self.pool.v_buffer)])

    def transfer(self, keys: list[str], pages: list[int] | None = None) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

        places = None
        if pages is not None:
            places = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
        return [PoolTransfer(name=PoolName.KV, keys=keys, device_indices=places)]

    def offload(self, keys: list[str], pages: list[int]) -> bool:
        assert self.linker.offload(self.transfer(keys, pages))
        wait(lambda: self.linker.num_completed_offloads() == 1)
        return bool(self.linker.pop_completed_offload())

    def lookup(self, keys: list[str], rid: str = "r") -> int:
        lengths = self.linker.lookup(rid, self.transfer(keys))
        assert lengths == list(range(1, len(lengths) + 1))
        return len(lengths)

    def load(self, keys: list[str], pages: list[int], rid: str = "r") -> bool | None:
        """None where it was refused, which SGLang computes; False is an error to the request."""
        if not self.linker.load(rid, self.transfer(keys, pages)):
            return None
        index = self.linker.start_layer_wise_loading()
        for layer in range(LAYERS):
            self.linker.layer_done_counter.set_consumer(index)
            self.linker.layer_done_counter.wait_until(layer)
        return bool(self.linker.finish_layer_wise_loading(index))


def wait(until: Callable[[], Any], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    assert made.linker.cache.flush(20)
    assert made.linker.cache.check() == []
    made.linker.close()


def test_offloaded_pages_load_into_other_pages(bench: Bench) -> None:
    bench.fill(1)
    keys, there = chain(9), list(range(1, 10))
    before = [bench.page(page) for page in there]
    assert bench.lookup(keys) == 0
    assert bench.offload(keys, there)
    assert bench.lookup(keys) == 9
    assert bench.lookup(keys[3:], "tail") == 6
    bench.fill(2)
    untouched = bench.page(40)
    assert bench.load(keys, list(range(20, 29))) is True
    assert all(torch.equal(bench.page(20 + i), page) for i, page in enumerate(before))
    assert torch.equal(bench.page(40), untouched)
    assert bench.load(keys[3:5], [50, 51], "tail") is True
    assert torch.equal(bench.page(51), before[4])
    assert bench.linker.start_layer_wise_loading() == -1


def test_pages_on_the_drive_are_leased_at_a_later_lookup(tmp_path: Path) -> None:
    first, keys = Bench(tmp_path), chain(20)
    first.fill(3)
    pages = [first.page(page) for page in range(1, 21)]
    assert first.offload(keys, list(range(1, 21)))
    first.linker.close()
    second = Bench(tmp_path)
    start = time.monotonic()
    promised = second.lookup(keys)
    assert time.monotonic() - start < 1.0, "a lookup is on the scheduler's thread"
    assert promised < 20 or second.linker.cache.stats()["tiers"]["host"]["records"] == 20
    wait(lambda: second.lookup(keys) == 20)
    assert second.load(keys, list(range(30, 50))) is True
    assert all(torch.equal(second.page(30 + i), page) for i, page in enumerate(pages))
    second.linker.close()


def test_an_unreadable_drive_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcache import os_env as port

    first, keys = Bench(tmp_path), chain(20)
    first.fill(4)
    assert first.offload(keys, list(range(1, 21)))
    first.linker.close()
    second = Bench(tmp_path)

    def broken(self: Any, offset: int, buffers: Any) -> int:
        raise OSError(5, "said the test")

    monkeypatch.setattr(port.LocalFile, "read", broken)
    outcomes = []
    for turn in range(20):
        promised = second.lookup(keys, f"r{turn}")
        if promised:
            outcomes.append(second.load(keys[:promised], list(range(30, 30 + promised)), f"r{turn}"))
    assert False not in outcomes, "SGLang answers this with an error"
    monkeypatch.undo()
    second.linker.close()


def test_a_request_that_never_loads_releases_its_lease(bench: Bench) -> None:
    from kvcache.connector.sglang import lookup_leases as promises

    bench.fill(5)
    keys = chain(4)
    assert bench.offload(keys, [1, 2, 3, 4])
    for i in range(2 * promises.MAX_LEASES):
        assert bench.lookup(keys, f"r{i}") == 4
    assert len(bench.linker._leases) == promises.MAX_LEASES
    assert bench.linker.load("r511", bench.transfer(keys, [10, 11, 12, 13]))
    assert bench.linker.cancel_queued_load("r511")
    assert not bench.linker.cancel_queued_load("r511")
    assert bench.linker.start_layer_wise_loading() == -1
    bench.linker.reset()
    assert bench.linker.cache.stats()["tiers"]["host"]["held_bytes"] == 0


def test_a_load_of_lost_pages_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.fill(6)
    keys = chain(4)
    assert bench.offload(keys, [1, 2, 3, 4])
    assert bench.lookup(keys) == 4
    assert bench.load([*keys[:2], "ff" * 32], [5, 6, 7]) is None, "another prompt's pages"
    assert bench.lookup(keys) == 4
    bench.linker.cache.close()
    assert bench.load(keys, [5, 6, 7, 8]) is not True
    bench.linker.close()


def test_an_unsupported_server_is_refused_at_start(tmp_path: Path) -> None:
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    from kvcache.connector.sglang import KVCacheLinker
    from kvcache.errors import ConfigError

    for name in ("pp_size", "attn_cp_size"):
        with pytest.raises(ConfigError, match=f"{name} = 2"):
            KVCacheLinker(SimpleNamespace(), SimpleNamespace(**{name: 2}), extra_config={})
    pool = SimpleNamespace(page_size=PAGE)
    params = SimpleNamespace(page_size=PAGE, token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool))
    for components in ({ComponentType.FULL, ComponentType.MAMBA}, {ComponentType.FULL, ComponentType.SWA}):
        with pytest.raises(ConfigError, match=r"No matching HiCache strategy.*use the storage backend"):
            KVCacheLinker(SimpleNamespace(), params, components=components, extra_config={})

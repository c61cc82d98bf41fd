"""Pages on a device, within a whole cache: the shipped kernels on a device that does nothing before it is waited for,
and in an order drawn by lot. A copy that does not wait for what it must moves the wrong bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvcache
from kvcache.block.layout import Group, KVLayout
from kvcache.cache.cache import Cache
from kvcache.os_env import Executor, InlineExecutor, OsEnv
from kvcache.settings.sources import load
from kvcache.transfer.copier import CopierRegistry
from kvcache.transfer.cuda.copier import CudaCopier
from kvcache.transfer.cuda.crossover import NEVER, Crossover
from kvcache.transfer.pages import GroupPages
from tests.cache.deferred_executor import DeferredExecutor
from tests.transfer.cuda_on_cpu import HostDevice, LazyHostDevice

LAYOUT = KVLayout.mha(layers=4, kv_heads=2, head_dim=8, dtype="fp32", block_tokens=4)  # 2 KiB a block
HYBRID = KVLayout(
    (
        Group(layers=2, kv_heads=2, head_dim=8, dtype="fp32"),
        Group(layers=3, kv_heads=1, head_dim=8, dtype="fp32", rule="window", window_tokens=8, name="sliding"),
    ),
    block_tokens=4,
)
PAGES = 24
COMPUTE = 0  # the engine's stream
KiB = 1 << 10


class Engine:
    """Writes its pages by work on a stream of the device, and so reads them."""

    def __init__(self, device: HostDevice, layout: KVLayout) -> None:
        self.device = device
        self.memory = [
            np.zeros((g.layers, 2, PAGES, layout.block_tokens, g.kv_heads, g.head_dim), np.float32)
            for g in layout.groups
        ]
        self.pages = []
        for number, group in enumerate(layout.groups):
            there = GroupPages.from_tensors(
                layout, list(self.memory[number]), axes=("kv", "page", "token", "head", "dim"), group=number
            )
            self.pages.append(on_gpu(there))
            assert there.shard == group.whole

    def compute(self, ids: list[int], value: float, layer: int | None = None) -> None:
        def write() -> None:
            for memory in self.memory:
                memory[slice(None) if layer is None else layer, :, ids] = value

        self.device.put(COMPUTE, write)

    def finish(self) -> None:
        self.device.record(COMPUTE).synchronize()


def on_gpu(pages: GroupPages) -> GroupPages:
    names = ("layout", "group", "shard", "bases", "pages", "page_stride", "token_stride", "head_stride", "owner")
    return GroupPages(**{name: getattr(pages, name) for name in names}, device="cuda:0")


@contextmanager
def opened(
    device: HostDevice, place: Path | None = None, *, copies: Executor | None = None, **copier: Any
) -> Iterator[Cache]:
    os_env = OsEnv(executor=lambda threads, name: copies if copies and name == "copy" else InlineExecutor())
    nvme: dict[str, Any] = {"enabled": False}
    if place is not None:
        nvme = {"path": place, "capacity_bytes": "4MiB", "segment_bytes": "192KiB", "min_free_bytes": 0}
    cache = Cache(load(environ={}, host={"capacity_bytes": 256 * KiB, "slab_bytes": 64 * KiB}, nvme=nvme), os_env)
    options = {"crossover": Crossover(NEVER, NEVER), "staging_bytes": 4096, "run_bytes": 64, **copier}
    cache.copiers._make = lambda index: CudaCopier(device, compute_stream=COMPUTE, **options)  # type: ignore[assignment]
    try:
        yield cache
        assert cache.flush(30)
        assert cache.check() == []
        assert cache.index.held() == 0
    finally:
        cache.close()


def handle(cache: Cache, layout: KVLayout = LAYOUT) -> Any:
    return cache.namespace(layout, model="m", revision="r")


def ids(layout: KVLayout, first: int, count: int) -> list[list[int]]:
    return [list(range(first, first + count))] * len(layout.groups)


@pytest.mark.parametrize("layout", [LAYOUT, HYBRID], ids=["one", "hybrid"])
@given(seed=st.integers(0, 1 << 32), blocks=st.integers(1, 10), drive=st.booleans())
@settings(max_examples=25)
def test_stores_and_loads_wait_for_the_engines_stream(
    layout: KVLayout, seed: int, blocks: int, drive: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The engine goes on with its stream as soon as `store` and `load` return."""
    device, later = LazyHostDevice(seed), DeferredExecutor()
    place = tmp_path_factory.mktemp("drive") if drive else None
    with opened(device, place, copies=later) as cache:
        engine = Engine(device, layout)
        with handle(cache, layout).request() as r:
            r.match(range(4 * blocks))
            engine.compute(list(range(blocks)), 1.0)
            stored = r.store(engine.pages, ids(layout, 0, blocks))
            later.run()
            assert stored.wait(30)
            assert stored.blocks == blocks
            engine.compute(list(range(blocks)), 2.0)  # the pages are the engine's again
            engine.compute(list(range(12, 12 + blocks)), 3.0)  # the target's last reader so far
            assert r.match().blocks == blocks
            r.admit()
            loaded = r.load(blocks, engine.pages, ids(layout, 12, blocks))
            later.run()
            assert loaded.wait(30)
            assert loaded.blocks == blocks
        engine.finish()
        for memory, need in zip(engine.memory, (blocks, 2), strict=False):
            back = memory[:, :, 12 : 12 + blocks]
            wanted = min(blocks, need)
            assert (back[:, :, blocks - wanted :] == 1.0).all()


def test_wait_layer_returns_before_the_load_ends() -> None:
    device, later = LazyHostDevice(7), DeferredExecutor()
    with opened(device, copies=later) as cache:
        engine = Engine(device, LAYOUT)
        with handle(cache).request() as r:
            r.match(range(32))
            engine.compute(list(range(8)), 5.0)
            stored = r.store(engine.pages, ids(LAYOUT, 0, 8))
            later.run()
            assert stored.blocks == 8
            seen: list[tuple[int, bool, bool]] = []

            def look(copies: Any) -> None:  # while the load's thread waits for the last layer
                for layer in range(4):
                    assert loaded.wait_layer(layer)
                    there = (engine.memory[0][layer, :, 10:18] == 5.0).all()
                    seen.append((layer, bool(there), loaded.done))

            loaded = r.load(8, engine.pages, ids(LAYOUT, 10, 8))
            within = loaded.begun
            loaded.begun = lambda end, copies: (within(end, copies), look(copies))[0]  # type: ignore[method-assign]
            assert not loaded.wait_layer(0, 0), "nothing has begun"
            later.run()
            assert loaded.blocks == 8
        assert [layer for layer, _, _ in seen] == [0, 1, 2, 3]
        assert all(there and not done for _, there, done in seen)


def test_wait_layer_ends_if_the_load_fails() -> None:
    device, later = HostDevice(), DeferredExecutor()
    with opened(device, copies=later) as cache:
        engine = Engine(device, LAYOUT)
        with handle(cache).request() as r:
            r.match(range(32))
            stored = r.store(engine.pages, ids(LAYOUT, 0, 8))
            later.run()
            assert stored.blocks == 8
            loaded = r.load(8, engine.pages, ids(LAYOUT, 10, 8))
            loaded.cancel()
            later.run()
            assert loaded.wait_layer(0, 30)
            assert loaded.blocks == 0


def test_the_arena_is_pinned_for_a_device_until_it_is_freed() -> None:
    device = HostDevice()
    with opened(device) as cache:
        engine = Engine(device, LAYOUT)
        assert cache.copiers._pinned == set(), "no device, nothing pinned"
        with handle(cache).request() as r:
            r.match(range(32))
            assert r.store(engine.pages, ids(LAYOUT, 0, 8)).blocks == 8
        regions = {id(region.view) for region in cache.host.arena._regions()}
        assert {memory for _, memory in cache.copiers._pinned} == regions
        assert len(cache.copiers._devices[0].pinned._regions) == len(regions)  # type: ignore[attr-defined]
        assert all(pinned for _, pinned in device.copies)
        for tenant in "abcdef":  # extents go and come
            with cache.namespace(LAYOUT, model="m", revision="r", tenant=tenant).request() as r:
                r.match(range(32))
                assert r.store(engine.pages, ids(LAYOUT, 0, 8)).blocks == 8
        regions = {id(region.view) for region in cache.host.arena._regions()}
        assert {memory for _, memory in cache.copiers._pinned} == regions
        copier: Any = cache.copiers._devices[0]
    assert copier.pinned._regions == [], "closing unpins"


def test_unpinnable_memory_is_copied_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    device = HostDevice(pinning=False)
    with caplog.at_level(logging.WARNING, "kvcache"), opened(device) as cache:
        engine = Engine(device, LAYOUT)
        engine.compute([0, 1], 1.0)
        with handle(cache).request() as r:
            r.match(range(8))
            assert r.store(engine.pages, ids(LAYOUT, 0, 2)).blocks == 2
            assert r.load(2, engine.pages, ids(LAYOUT, 5, 2)).blocks == 2
        assert (engine.memory[0][:, :, 5:7] == 1.0).all()
    (said,) = [record.message for record in caplog.records]
    assert "cannot be pinned for cuda:0" in said
    assert "locked-memory limit" in said


def test_each_device_has_its_own_copier() -> None:
    made: list[int] = []

    def make(index: int) -> Any:
        made.append(index)
        return CudaCopier(HostDevice(), crossover=Crossover(NEVER, NEVER))

    copiers = CopierRegistry(lambda call: call(), make=make)
    assert copiers.of("cuda") is copiers.of("cuda:0")
    assert copiers.of("cuda:1") is not copiers.of("cuda:0")
    assert copiers.of("cpu") is copiers.of("cpu")
    assert made == [0, 1]
    for wrong in ("xpu:0", "cuda:x", "mps", ""):
        with pytest.raises(kvcache.LayoutError, match=r"expected cpu or cuda:N"):
            copiers.of(wrong)
    copiers.close()


def test_a_missing_device_copier_fails_the_first_call() -> None:
    with opened(HostDevice()) as cache:

        def make(index: int) -> Any:
            raise kvcache.ConfigError("no GPU for this process")

        cache.copiers._make = make
        engine = Engine(HostDevice(), LAYOUT)
        with handle(cache).request() as r:
            r.match(range(8))
            with pytest.raises(kvcache.ConfigError, match="no GPU"):
                r.store(engine.pages, ids(LAYOUT, 0, 2))
            assert r.match().blocks == 0

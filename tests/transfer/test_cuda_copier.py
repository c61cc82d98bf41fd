"""The CUDA copier with its own kernels, on a device that is this processor: see cuda_on_cpu.py."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.block.layout import CANONICAL_ORDERS, KVLayout, Shard
from kvcache.errors import LayoutError, StoreError
from kvcache.transfer.cuda.copier import CopyPath, CudaCopier
from kvcache.transfer.cuda.crossover import NEVER, Crossover
from tests.transfer.cuda_on_cpu import HostDevice, LazyHostDevice, Point
from tests.transfer.test_copier import HND, NHD, WHOLE_PAGE, Engine, buffers_for, engine, engines

WAYS: list[CopyPath] = ["direct", "staged", "mapped"]
NO_DMA = Crossover(NEVER, NEVER)
ways = pytest.mark.parametrize("way", WAYS)


def copier(device: HostDevice | None = None, **more: Any) -> CudaCopier:
    return CudaCopier(device or HostDevice(), **{"crossover": NO_DMA, "staging_bytes": 512, "run_bytes": 64, **more})


def on_gpu(e: Engine) -> Engine:
    return replace(e, pages=replace(e.pages, device="cuda:0"))


def check_gather(c: CudaCopier, e: Engine, ids: list[int], shift: int) -> Any:
    whole, buffers = buffers_for([e.pages.block_bytes] * len(ids), shift)
    expected_whole, expected = buffers_for([e.pages.block_bytes] * len(ids), shift)
    for page, buffer in zip(ids, expected, strict=True):
        buffer[:] = e.payload(page)
    before = e.memory.copy()
    c.pinned.add(memoryview(whole))
    copy = c.gather(e.pages, ids, buffers)
    assert copy.wait()
    assert copy.done
    c.pinned.close()
    np.testing.assert_array_equal(whole, expected_whole)
    np.testing.assert_array_equal(e.memory, before)
    return copy


def check_scatter(c: CudaCopier, e: Engine, ids: list[int], shift: int) -> Any:
    whole, buffers = buffers_for([e.pages.block_bytes] * len(ids), shift)
    whole[:] = np.random.default_rng(len(ids)).integers(0, 256, len(whole), dtype=np.uint8)
    before, source = e.memory.copy(), whole.copy()
    for page, buffer in zip(ids, buffers, strict=True):
        e.put(page, bytes(buffer))
    expected = e.memory.copy()
    e.memory[:] = before
    c.pinned.add(memoryview(whole))
    copy = c.scatter(e.pages, ids, buffers)
    assert copy.wait(60)
    assert copy.done
    c.pinned.close()
    np.testing.assert_array_equal(e.memory, expected)  # the gaps and the other pages too
    np.testing.assert_array_equal(whole, source)
    return copy


@ways
@settings(max_examples=4 * settings().max_examples)
@given(data=st.data(), e=engines(), shift=st.integers(0, 7))
def test_arbitrary_pages_copy_exactly(way: CopyPath, data: st.DataObject, e: Engine, shift: int) -> None:
    e = on_gpu(e)
    pages = st.integers(0, e.pages.pages - 1)
    c = copier(way=way)
    check_gather(c, e, data.draw(st.lists(pages, max_size=8)), shift)
    check_scatter(c, e, data.draw(st.lists(pages, max_size=8, unique=True)), shift)


@ways
@pytest.mark.parametrize("axes", [HND, WHOLE_PAGE], ids=["hnd", "whole_page"])
@pytest.mark.parametrize("apart", [(), ("layer",), ("layer", "kv")], ids=["one", "layers_apart", "all_apart"])
def test_many_blocks_take_several_launches(way: CopyPath, axes: tuple[str, ...], apart: tuple[str, ...]) -> None:
    """More roots and more blocks than a job holds."""
    layout = KVLayout.mha(layers=70, kv_heads=2, head_dim=8, block_tokens=2)
    e = on_gpu(engine(layout, 0, layout.whole[0], 140, axes=axes, apart=apart))
    ids = list(np.random.default_rng(1).permutation(140))[:135]
    check_gather(copier(way=way, staging_bytes=1 << 16), e, ids, 0)
    check_scatter(copier(way=way, staging_bytes=1 << 16), e, ids, 0)


@pytest.mark.parametrize("order", list(permutations(CANONICAL_ORDERS["mha"])), ids="-".join)
def test_every_payload_order_copies_exactly(order: tuple[str, ...]) -> None:
    layout = KVLayout.mha(layers=3, kv_heads=2, head_dim=8, block_tokens=4, order=order)
    e = on_gpu(engine(layout, 0, Shard(1, 3, 1, 2), 5, axes=HND, gaps=(0, 2, 0, 0, 0)))
    for way in WAYS:
        check_gather(copier(way=way), e, [4, 0, 3], 0)
        check_scatter(copier(way=way), e, [4, 0, 3], 0)


def test_unpinned_memory_is_copied_through_staging() -> None:
    device = HostDevice(pinning=False)
    c = copier(device, crossover=Crossover(1, 1))
    with pytest.raises(StoreError, match=r"cannot be pinned for cuda:0: cudaErrorMemoryAllocation; the locked-memory"):
        c.pinned.add(memoryview(bytearray(64)))
    e = on_gpu(engine(KVLayout.mha(layers=2, kv_heads=1, head_dim=8), 0, Shard(0, 2, 0, 1), 4, axes=NHD))
    buffers = [memoryview(bytearray(e.pages.block_bytes)) for _ in range(3)]
    assert c.gather(e.pages, [3, 0, 1], buffers).ways == ["staged"]
    assert [bytes(b) for b in buffers] == [e.payload(page) for page in (3, 0, 1)]
    expected = [e.payload(page) for page in (3, 0, 1)]
    assert set(c.scatter(e.pages, [0, 1, 2], buffers).ways) == {"staged"}
    assert [e.payload(page) for page in (0, 1, 2)] == expected
    assert not any(pinned for _, pinned in device.copies)


class TestTheWay:
    """A block of 4 layers is 2 KiB; in the pages of one layer K and V are apart, 256 bytes each."""

    def made(self, crossover: Crossover, **more: Any) -> tuple[CudaCopier, Engine, list[memoryview]]:
        layout = KVLayout.mha(layers=4, kv_heads=2, head_dim=8, block_tokens=8)
        e = on_gpu(engine(layout, 0, layout.whole[0], 8, axes=NHD))
        c = copier(crossover=crossover, **more)
        whole, buffers = buffers_for([e.pages.block_bytes] * 4, 0)
        c.pinned.add(memoryview(whole))
        return c, e, buffers

    @pytest.mark.parametrize(
        ("enough", "way"),
        [(256, "direct"), (257, "staged"), (2048, "staged"), (2049, "mapped"), (NEVER, "mapped")],
    )
    def test_the_way_of_a_gather_depends_on_its_size(self, enough: int, way: str) -> None:
        c, e, buffers = self.made(Crossover(gather=enough, scatter=NEVER))
        assert c.gather(e.pages, [0, 1, 2, 3], buffers).ways == [way]

    @pytest.mark.parametrize(("enough", "way"), [(256, "direct"), (257, "staged"), (512, "staged"), (513, "mapped")])
    def test_the_way_of_a_scatter_is_chosen_per_layer_run(self, enough: int, way: str) -> None:
        c, e, buffers = self.made(Crossover(gather=NEVER, scatter=enough), run_bytes=2048)
        copy = c.scatter(e.pages, [4, 5, 6, 7], buffers)
        assert copy.ways == [way] * 4
        assert copy.ends == [1, 2, 3, 4]

    def test_runs_of_layers_have_enough_bytes_each(self) -> None:
        c, e, buffers = self.made(NO_DMA, run_bytes=3000)
        assert c.scatter(e.pages, [4, 5, 6, 7], buffers).ends == [2, 4]
        assert c.scatter(e.pages, [4], buffers[:1]).ends == [4]

    def test_bytes_that_end_beyond_a_region_are_not_pinned(self) -> None:
        c, e, _ = self.made(NO_DMA)
        size = e.pages.block_bytes
        memory = memoryview(bytearray(3 * size))
        c.pinned.add(memory[: 2 * size - 1])
        assert c.gather(e.pages, [0, 1], [memory[:size], memory[size : 2 * size]]).ways == ["staged"]
        assert c.gather(e.pages, [0], [memory[:size]]).ways == ["mapped"]

    def test_kernels_get_device_addresses_of_pinned_memory(self) -> None:
        class Elsewhere(HostDevice):
            def register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
                return address + 1_000_000

        c = copier(Elsewhere())
        memory = memoryview(bytearray(100))
        c.pinned.add(memory)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        assert c.pinned.find(address + 30, 70) == address + 1_000_030
        assert c.pinned.find(address + 30, 71) is None
        assert c.pinned.find(address - 1, 1) is None
        c.pinned.remove(memory)
        assert c.pinned.find(address, 1) is None


@ways
@pytest.mark.parametrize("seed", range(6))
class TestOrder:
    """On a device that does everything as late as it may."""

    @pytest.fixture
    def made(self, way: CopyPath, seed: int) -> tuple[LazyHostDevice, CudaCopier, Engine, list[memoryview]]:
        device = LazyHostDevice(seed)
        layout = KVLayout.mha(layers=4, kv_heads=2, head_dim=8, block_tokens=4)
        e = on_gpu(engine(layout, 0, layout.whole[0], 8, axes=NHD, seed=seed))
        whole, buffers = buffers_for([e.pages.block_bytes] * 4, 0)
        c = copier(device, way=way, staging_bytes=2048)
        c.pinned.add(memoryview(whole))
        return device, c, e, buffers

    def test_a_store_waits_for_the_engines_compute_stream(self, made: Any) -> None:
        device, c, e, buffers = made
        computed = np.random.default_rng(7).integers(0, 256, len(e.memory), dtype=np.uint8)
        device.put(0, lambda: e.memory.__setitem__(slice(None), computed))
        copy = c.gather(e.pages, [5, 2, 7], buffers[:3])
        assert not copy.done
        copy.wait()
        assert [bytes(b) for b in buffers[:3]] == [e.payload(page) for page in (5, 2, 7)]
        np.testing.assert_array_equal(e.memory, computed)

    def test_a_store_accepts_an_earlier_event(self, made: Any) -> None:
        device, c, e, buffers = made
        compute = device.stream()
        computed = np.random.default_rng(7).integers(0, 256, len(e.memory), dtype=np.uint8)
        device.put(compute, lambda: e.memory.__setitem__(slice(None), computed))
        after = c.mark(compute)
        device.follow(compute, Point(device))  # the engine's stream stands still from here on
        assert c.gather(e.pages, [5, 2, 7], buffers[:3], after=after).wait()
        assert [bytes(b) for b in buffers[:3]] == [e.payload(page) for page in (5, 2, 7)]
        assert not c.gather(e.pages, [5], buffers[3:], after=c.mark(compute)).wait(0.001)

    def test_a_load_waits_for_the_engines_reads(self, made: Any) -> None:
        device, c, e, buffers = made
        seen = np.zeros_like(e.memory)
        before = e.memory.copy()
        device.put(0, lambda: seen.__setitem__(slice(None), e.memory))
        c.scatter(e.pages, [1, 3], buffers[:2]).wait()
        np.testing.assert_array_equal(seen, before)

    def test_wait_layer_returns_after_the_layers_copy(self, made: Any) -> None:
        device, c, e, buffers = made
        for buffer in buffers:
            buffer[:] = np.random.default_rng(3).bytes(len(buffer))
        copy = c.scatter(e.pages, [1, 3, 0, 2], buffers)
        assert copy.ends == [1, 2, 3, 4]
        compute, seen = device.stream(), []
        for layer in range(4):
            copy.block_stream(compute, layer)
            device.put(compute, lambda layer=layer: seen.append([v.tobytes() for v in self.layer(e, layer)]))
        copy.wait_layer(2)
        layers_2_and_before = [[v.tobytes() for v in self.layer(e, layer)] for layer in range(3)]
        device.record(compute).synchronize()
        assert [e.payload(page) for page in (1, 3, 0, 2)] == [bytes(b) for b in buffers]
        assert seen == [[v.tobytes() for v in self.layer(e, layer)] for layer in range(4)]
        assert seen[:3] == layers_2_and_before

    @staticmethod
    def layer(e: Engine, layer: int) -> list[Any]:
        return [view[:4] for view in e.views[layer]]

    def test_copies_under_way_do_not_mix(self, made: Any) -> None:
        """Staging is shared: what one copy puts there has gone on before the next one's comes."""
        _, c, e, buffers = made
        expected = [e.payload(page) for page in range(4)]
        loaded = np.random.default_rng(5).bytes(len(buffers[3]))
        buffers[3][:] = loaded
        copies: list[Any] = [c.gather(e.pages, [page], [buffer]) for page, buffer in enumerate(buffers[:3])]
        copies += [c.scatter(e.pages, [page], [buffers[3]]) for page in (5, 6)]
        for copy in reversed(copies):
            copy.wait()
        assert [bytes(b) for b in buffers[:3]] == expected[:3]
        assert [e.payload(page) for page in (5, 6)] == [loaded, loaded]

    def test_close_waits_for_copies(self, made: Any) -> None:
        _, c, e, buffers = made
        copy = c.gather(e.pages, [0, 1, 2, 3], buffers)
        c.close()
        assert copy.done
        assert [bytes(b) for b in buffers] == [e.payload(page) for page in range(4)]


@pytest.mark.parametrize("seed", range(4))
def test_a_copy_that_fails_half_way_is_done(seed: int) -> None:
    """The caller gives its buffers to others at once: nothing may still be copied to them."""

    class Failing(LazyHostDevice):
        def launch(self, launch: Any, stream: int) -> None:
            if len(self.launches) == 2:
                raise MemoryError("no more")
            super().launch(launch, stream)

    layout = KVLayout.mha(layers=4, kv_heads=2, head_dim=8, block_tokens=4)
    e = on_gpu(engine(layout, 0, layout.whole[0], 4, axes=NHD))
    c = copier(Failing(seed), staging_bytes=1)
    size = e.pages.block_bytes
    memory = memoryview(bytearray(4 * size))
    c.pinned.add(memory)
    c.way = "staged"
    with pytest.raises(MemoryError):
        c.gather(e.pages, [0, 1, 2, 3], [memory[i * size : (i + 1) * size] for i in range(4)])
    left = bytes(memory)
    c.close()
    assert bytes(memory) == left
    assert left[:size] == e.payload(0)


class TestCopyPages:
    @settings(max_examples=4 * settings().max_examples)
    @given(data=st.data(), e=engines())
    def test_arbitrary_pages_copy_exactly(self, data: st.DataObject, e: Engine) -> None:
        e = on_gpu(e)
        ids = data.draw(st.permutations(range(e.pages.pages)))
        count = data.draw(st.integers(0, len(ids) // 2))
        targets, sources = (
            ids[:count],
            data.draw(st.lists(st.sampled_from(ids[count:]), min_size=count, max_size=count)),
        )
        before = e.memory.copy()
        for source, target in zip(sources, targets, strict=True):
            e.put(target, e.payload(source))
        expected = e.memory.copy()
        e.memory[:] = before
        copier().copy_pages(e.pages, sources, targets).wait()
        np.testing.assert_array_equal(e.memory, expected)

    @pytest.mark.parametrize(
        ("sources", "targets"), [([0], [0]), ([0, 1], [2, 2]), ([0, 1], [2, 1]), ([0], [1, 2]), ([4], [0]), ([0], [-1])]
    )
    def test_ambiguous_page_copies_are_refused(self, sources: list[int], targets: list[int]) -> None:
        e = on_gpu(engine(KVLayout.mha(layers=1, kv_heads=1, head_dim=8), 0, Shard(0, 1, 0, 1), 4, axes=NHD))
        before = e.memory.copy()
        with pytest.raises(LayoutError):
            copier().copy_pages(e.pages, sources, targets)
        np.testing.assert_array_equal(e.memory, before)


class TestMisuse:
    """Refused with a LayoutError before a byte is touched."""

    def made(self) -> tuple[Engine, int]:
        layout = KVLayout.mha(layers=2, kv_heads=1, head_dim=4, block_tokens=2)
        return on_gpu(engine(layout, 0, layout.whole[0], 4, axes=NHD)), layout.block_bytes()

    def refused(self, e: Engine, ids: list[int], buffers: list[memoryview], match: str) -> None:
        for verb in (copier().gather, copier().scatter):
            with pytest.raises(LayoutError, match=match):
                verb(e.pages, ids, buffers)

    @pytest.mark.parametrize("wrong", [-1, 1])
    def test_a_buffer_of_another_size_is_refused(self, wrong: int) -> None:
        e, size = self.made()
        self.refused(
            e, [0], [memoryview(bytearray(size + wrong))], f"buffer 0 of {size + wrong} bytes: expected {size}"
        )

    def test_a_page_out_of_range_is_refused(self) -> None:
        e, size = self.made()
        self.refused(e, [4], [memoryview(bytearray(size))], "expected 0 to 3")

    @pytest.mark.parametrize("device", ["cpu", "cuda:1", "cuda:00"])
    def test_pages_of_another_device_are_refused(self, device: str) -> None:
        e, size = self.made()
        e.pages = replace(e.pages, device=device)
        self.refused(e, [0], [memoryview(bytearray(size))], f"pages on {device}: expected cuda:0")

"""The contract of a copier, for each that works on a processor's memory, against elementwise indexing in numpy."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcache import native
from kvcache.block.layout import CANONICAL_ORDERS, DTYPE_BYTES, Group, KVLayout, Shard
from kvcache.errors import ConfigError, LayoutError
from kvcache.transfer.copier import Copier
from kvcache.transfer.cpu import CpuCopier, ReferenceCopier, _described
from kvcache.transfer.pages import GroupPages

pytestmark = pytest.mark.filterwarnings("ignore:kvcache._native is not there")


class Memcpy(CpuCopier):
    """The compiled copier as it is on a processor without vector instructions."""

    def gather(self, pages: GroupPages, page_ids: Any, buffers: Any) -> Any:
        ids = np.asarray(page_ids, np.int64)
        native.core.gather(*_described(pages), ids, buffers, self.threads, plain=True)

    def scatter(self, pages: GroupPages, page_ids: Any, buffers: Any) -> Any:
        ids = np.asarray(page_ids, np.int64)
        native.core.scatter(*_described(pages), ids, buffers, self.threads, plain=True)


COPIERS = [ReferenceCopier(), CpuCopier(1), CpuCopier(7)] + ([Memcpy(2)] if native.built else [])


def each(copiers: list[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("copier", copiers, ids=lambda c: f"{type(c).__name__}{getattr(c, 'threads', '')}")


@dataclass
class Engine:
    """An engine's memory. `views[layer][kv]` is (page, token, head, element) over `memory`, gaps between."""

    memory: NDArray[np.uint8]
    views: list[list[NDArray[Any]]]
    pages: GroupPages

    def payload(self, page: int, memory: NDArray[np.uint8] | None = None) -> bytes:
        """What a gather of this page must give: its elements, one by one, in the layout's order."""
        group = self.pages.layout.groups[self.pages.group]
        block = np.array([[view[page] for view in kv] for kv in self.views])
        if group.kind == "opaque":
            return block.tobytes()
        if group.kind == "mla":
            block = block[:, 0, :, 0, :]
        return block.transpose([CANONICAL_ORDERS[group.kind].index(axis) for axis in group.order]).tobytes()

    def put(self, page: int, payload: bytes) -> None:
        """What a scatter must do, element by element."""
        group, shard = self.pages.layout.groups[self.pages.group], self.pages.shard
        if group.kind == "opaque":
            block = np.frombuffer(payload, np.uint8).reshape(shard.layers, 1, 1, 1, -1)
        else:
            shape = self.pages.layout.shape(shard, group=self.pages.group)
            block = np.frombuffer(payload, self.views[0][0].dtype).reshape(shape)
            block = block.transpose([group.order.index(axis) for axis in CANONICAL_ORDERS[group.kind]])
            if group.kind == "mla":
                block = block[:, None, :, None, :]
        for views, layer in zip(self.views, block, strict=True):
            for view, kv in zip(views, layer, strict=True):
                view[page] = kv


def engine(
    layout: KVLayout,
    group: int,
    shard: Shard,
    page_count: int,
    *,
    axes: tuple[str, ...],
    apart: tuple[str, ...] = (),
    gaps: tuple[int, ...] = (0,) * 6,
    offset: int = 0,
    seed: int = 0,
) -> Engine:
    """Pages whose axes are nested as in `axes` (outermost first; element innermost), with bytes of gap behind each
    axis's steps; the axes in `apart` (layer, kv) are regions of their own, in an order that no stride describes."""
    rng = np.random.default_rng(seed)
    g = layout.groups[group]
    if g.kind == "opaque":
        item, extent = 1, {"token": 1, "head": 1, "element": layout.block_bytes(shard, group=group) // shard.layers}
    else:
        item, extent = DTYPE_BYTES[g.dtype], {"token": layout.block_tokens, "head": shard.heads, "element": g.head_dim}
    extent |= {"layer": shard.layers, "kv": 2 if g.kind == "mha" else 1, "page": page_count}
    step = {"element": item}
    span = item * extent["element"]
    for axis, gap in zip(reversed([a for a in axes if a not in apart]), gaps, strict=False):
        step[axis] = span + gap
        span = step[axis] * extent[axis]
    regions = int(np.prod([extent[a] for a in apart], dtype=int))
    starts = offset + np.cumsum([0, *rng.integers(span, 2 * span + 9, regions)])[:regions]
    starts = rng.permutation(starts)
    memory = rng.integers(0, 256, int(starts.max()) + span + 64, dtype=np.uint8)
    views, bases = [], []
    for layer in range(extent["layer"]):
        at = [0] * extent["kv"]
        for kv in range(extent["kv"]):
            index = {"layer": layer, "kv": kv}
            region = 0
            for axis in apart:
                region = region * extent[axis] + index[axis]
            at[kv] = int(starts[region]) + sum(i * step[axis] for axis, i in index.items() if axis not in apart)
        shape = tuple(extent[a] for a in ("page", "token", "head", "element"))
        strides = tuple(step[a] for a in ("page", "token", "head", "element"))
        views.append([np.ndarray(shape, f"u{item}", memory.data, offset=a, strides=strides) for a in at])
        bases.append([memory.ctypes.data + a for a in at])
    pages = GroupPages(
        layout=layout,
        group=group,
        shard=shard,
        bases=np.array(bases, np.uint64),
        pages=page_count,
        page_stride=step["page"],
        token_stride=step["token"],
        head_stride=step["head"],
        owner=memory,
    )
    return Engine(memory, views, pages)


def buffers_for(sizes: list[int], shift: int) -> tuple[NDArray[np.uint8], list[memoryview]]:
    """Poisoned buffers in one piece of memory, with poison between them and `shift` bytes before each."""
    whole = np.full(sum(sizes) + (len(sizes) + 1) * (shift + 16), 0xA5, np.uint8)
    views, at = [], 0
    for size in sizes:
        at += shift
        views.append(memoryview(whole.data)[at : at + size])
        at += size + 16
    return whole, views


def check_gather(copier: Copier, e: Engine, ids: list[int], shift: int) -> None:
    whole, buffers = buffers_for([e.pages.block_bytes] * len(ids), shift)
    expected_whole, expected = buffers_for([e.pages.block_bytes] * len(ids), shift)
    for page, buffer in zip(ids, expected, strict=True):
        buffer[:] = e.payload(page)
    before = e.memory.copy()
    copy = copier.gather(e.pages, ids, buffers)
    assert copy is None or (copy.done and copy.wait(0))
    np.testing.assert_array_equal(whole, expected_whole)
    np.testing.assert_array_equal(e.memory, before)


def check_scatter(copier: Copier, e: Engine, ids: list[int], shift: int) -> None:
    whole, buffers = buffers_for([e.pages.block_bytes] * len(ids), shift)
    whole[:] = np.random.default_rng(len(ids)).integers(0, 256, len(whole), dtype=np.uint8)
    before, source = e.memory.copy(), whole.copy()
    for page, buffer in zip(ids, buffers, strict=True):
        e.put(page, bytes(buffer))
    expected = e.memory.copy()
    e.memory[:] = before
    copy = copier.scatter(e.pages, ids, buffers)
    assert copy is None or (copy.done and copy.wait(0))
    np.testing.assert_array_equal(e.memory, expected)  # the gaps and the other pages too
    np.testing.assert_array_equal(whole, source)


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    kind = draw(st.sampled_from(["mha", "mha", "mla", "opaque"]))
    small = st.integers(1, 4)
    heads = 1 if kind == "mla" else draw(small)
    group = Group(
        layers=draw(small),
        kv_heads=heads,
        head_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
        kind=kind,
        order=tuple(draw(st.permutations(CANONICAL_ORDERS[kind]))),
        opaque_bytes=heads * draw(st.integers(1, 40)) if kind == "opaque" else 0,
    )
    layout = KVLayout((group,), draw(st.integers(1, 5)))
    first_layer, first_head = draw(st.integers(0, group.layers - 1)), draw(st.integers(0, heads - 1))
    shard = Shard(
        first_layer,
        draw(st.integers(first_layer + 1, group.layers)),
        first_head,
        draw(st.integers(first_head + 1, heads)),
    )
    return engine(
        layout,
        0,
        shard,
        draw(st.integers(1, 6)),
        axes=tuple(draw(st.permutations(["layer", "kv", "page", "token", "head"]))),
        apart=draw(st.sampled_from([(), ("layer",), ("kv",), ("layer", "kv")])),
        gaps=tuple(draw(st.lists(st.sampled_from([0, 0, 1, 6]), min_size=5, max_size=5))),
        offset=draw(st.integers(0, 9)),
        seed=draw(st.integers(0, 99)),
    )


@each(COPIERS)
@settings(max_examples=4 * settings().max_examples)
@given(data=st.data(), e=engines(), shift=st.integers(0, 7))
def test_arbitrary_pages_copy_exactly(copier: Copier, data: st.DataObject, e: Engine, shift: int) -> None:
    pages = st.integers(0, e.pages.pages - 1)
    check_gather(copier, e, data.draw(st.lists(pages, max_size=8)), shift)
    check_scatter(copier, e, data.draw(st.lists(pages, max_size=8, unique=True)), shift)


NHD = ("layer", "kv", "page", "token", "head")
HND = ("layer", "kv", "page", "head", "token")
FUSED = ("layer", "page", "kv", "token", "head")
WHOLE_PAGE = ("page", "layer", "kv", "token", "head")


@each(COPIERS[1:])  # the plain one does the same for few bytes and for many
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("axes", [NHD, HND, FUSED, WHOLE_PAGE], ids=["nhd", "hnd", "fused", "whole_page"])
@pytest.mark.parametrize("apart", [(), ("layer",), ("layer", "kv")], ids=["one", "layers_apart", "all_apart"])
def test_large_copies_are_exact(copier: Copier, dtype: str, axes: tuple[str, ...], apart: tuple[str, ...]) -> None:
    """Enough bytes for several threads and for stores around the cache, at places that are aligned and that are not.

    The numbers are chosen so that a thread's part begins in the middle of a row of fragments."""
    layout = KVLayout.mha(layers=3, kv_heads=5, head_dim=128, dtype=dtype)
    e = engine(layout, 0, layout.whole[0], 44, axes=axes, apart=apart, offset=3)
    ids = list(np.random.default_rng(1).permutation(44))[:43]
    check_gather(copier, e, ids, 5)
    check_scatter(copier, e, ids, 0)


@each(COPIERS)
@pytest.mark.parametrize("order", list(permutations(CANONICAL_ORDERS["mha"])), ids="-".join)
def test_every_payload_order_copies_exactly(copier: Copier, order: tuple[str, ...]) -> None:
    layout = KVLayout.mha(layers=3, kv_heads=2, head_dim=8, block_tokens=4, order=order)
    e = engine(layout, 0, Shard(1, 3, 1, 2), 5, axes=HND, gaps=(0, 2, 0, 0, 0))
    check_gather(copier, e, [4, 0, 3], 0)
    check_scatter(copier, e, [4, 0, 3], 0)


@each(COPIERS)
@pytest.mark.parametrize("axes", [("kv", "page", "token", "head", "dim"), ("page", "head", "kv", "token", "dim")])
def test_pages_of_torch_tensors_copy_exactly(copier: Copier, axes: tuple[str, ...]) -> None:
    """From arrays as an engine has them, to payloads as a canonical reader expects them."""
    layout = KVLayout.mha(layers=2, kv_heads=3, head_dim=8, dtype="fp32", block_tokens=4)
    extent = {"kv": 2, "page": 7, "token": 4, "head": 3, "dim": 8}
    rng = np.random.default_rng(0)
    layers = [rng.random([extent[a] for a in axes], np.float32) for _ in range(2)]
    buffers = [memoryview(bytearray(layout.block_bytes())) for _ in range(2)]
    pages = GroupPages.from_tensors(layout, layers, axes=axes)
    copier.gather(pages, [6, 2], buffers)
    for page, buffer in zip([6, 2], buffers, strict=True):
        taken = [np.moveaxis(layer, axes.index("page"), 0)[page] for layer in layers]
        rest = [a for a in axes if a != "page"]
        canonical = [t.transpose([rest.index(a) for a in ("kv", "token", "head", "dim")]) for t in taken]
        assert bytes(buffer) == np.stack(canonical).tobytes()
    copier.scatter(pages, [0, 1], buffers)
    for to, page in zip([0, 1], [6, 2], strict=True):
        for layer in layers:
            moved = np.moveaxis(layer, axes.index("page"), 0)
            np.testing.assert_array_equal(moved[to], moved[page])


@each(COPIERS)
def test_head_shards_equal_the_whole_payload(copier: Copier) -> None:
    """Two ranks with half of the heads each store what one rank with all of them would."""
    layout = KVLayout.mha(layers=2, kv_heads=4, head_dim=8, block_tokens=4)
    e = engine(layout, 0, layout.whole[0], 3, axes=NHD)
    whole = np.frombuffer(e.payload(1), np.uint16).reshape(layout.shape())
    for first in (0, 2):
        shard = layout.shard(heads=(first, first + 2))
        p = e.pages
        part = GroupPages(
            layout=layout,
            group=0,
            shard=shard,
            bases=p.bases + np.uint64(first * p.head_stride),
            pages=p.pages,
            page_stride=p.page_stride,
            token_stride=p.token_stride,
            head_stride=p.head_stride,
        )
        buffer = memoryview(bytearray(layout.block_bytes(shard)))
        copier.gather(part, [1], [buffer])
        assert bytes(buffer) == whole[:, :, :, first : first + 2].tobytes()


@each([c for c in COPIERS if not isinstance(c, Memcpy)])
class TestMisuse:
    """Refused with a LayoutError before a byte is touched."""

    def refused(self, copier: Copier, e: Engine, ids: list[int], buffers: list[memoryview], match: str) -> None:
        before, held = e.memory.copy(), [bytes(b) for b in buffers]
        for verb in (copier.gather, copier.scatter):
            with pytest.raises(LayoutError, match=match):
                verb(e.pages, ids, buffers)
        np.testing.assert_array_equal(e.memory, before)
        assert [bytes(b) for b in buffers] == held

    def made(self) -> tuple[Engine, int]:
        layout = KVLayout.mha(layers=2, kv_heads=1, head_dim=4, block_tokens=2)
        return engine(layout, 0, layout.whole[0], 4, axes=NHD), layout.block_bytes()

    @pytest.mark.parametrize("wrong", [-1, 1])
    def test_a_buffer_of_another_size_is_refused(self, copier: Copier, wrong: int) -> None:
        e, size = self.made()
        buffers = [memoryview(bytearray(size)), memoryview(bytearray(size + wrong))]
        self.refused(copier, e, [0, 1], buffers, f"buffer 1 of {size + wrong} bytes: expected {size}")

    def test_more_pages_than_buffers_are_refused(self, copier: Copier) -> None:
        e, size = self.made()
        self.refused(copier, e, [0, 1], [memoryview(bytearray(size))], "1 buffers for 2 pages")

    @pytest.mark.parametrize("page", [-1, 4])
    def test_a_page_out_of_range_is_refused(self, copier: Copier, page: int) -> None:
        e, size = self.made()
        self.refused(copier, e, [page], [memoryview(bytearray(size))], "expected 0 to 3")

    def test_a_buffer_with_gaps_is_refused(self, copier: Copier) -> None:
        e, size = self.made()
        self.refused(copier, e, [0], [memoryview(bytearray(2 * size))[::2]], "not contiguous")

    def test_gpu_pages_are_refused(self, copier: Copier) -> None:
        e, size = self.made()
        object.__setattr__(e.pages, "device", "cuda:0")
        self.refused(copier, e, [0], [memoryview(bytearray(size))], "cuda:0")

    def test_a_read_only_buffer_is_for_scatter(self, copier: Copier) -> None:
        e, size = self.made()
        buffer = memoryview(bytes(range(size)))
        with pytest.raises(LayoutError, match="read-only"):
            copier.gather(e.pages, [0], [buffer])
        copier.scatter(e.pages, [2], [buffer])
        assert e.payload(2) == bytes(buffer)


def test_zero_threads_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected at least 1"):
        CpuCopier(0)

"""The kernels that quantise, on this processor, beside the codecs in numpy: the same bytes, bit for bit."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvcache.block.layout import CANONICAL_ORDERS, Group, KVLayout
from kvcache.codec import quantised as element
from kvcache.codec import quantised as fp8
from kvcache.codec.codec import codec
from kvcache.errors import LayoutError
from kvcache.transfer.cuda.copier import CudaCopier
from kvcache.transfer.cuda.crossover import NEVER, Crossover
from kvcache.transfer.cuda.quantise import Format, QuantisedPages
from tests.transfer.cuda_on_cpu import HostDevice, compiled
from tests.transfer.test_copier import Engine, buffers_for, engine

FORMATS: list[Format] = ["fp8", "int8"]
NUMBERS = {"bf16": "Bf16", "fp16": "Fp16", "fp32": "Fp32"}
formats = pytest.mark.parametrize("form", FORMATS)
dtypes = pytest.mark.parametrize("dtype", NUMBERS)


def call(name: str, given: NDArray[Any], into: Any) -> NDArray[Any]:
    made = np.empty(len(given), into)
    given = np.ascontiguousarray(given)
    pointers = [ctypes.c_void_p(array.ctypes.data) for array in (given, made)]
    getattr(compiled(), name)(*pointers, ctypes.c_uint64(len(given)))
    return made


def some_floats(limit: float) -> NDArray[np.float32]:
    """Of every magnitude up to the limit, with what lies half way between neighbours in few bits, and both zeros."""
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1 << 20, dtype=np.uint32)
    halves = (np.arange(1 << 16, dtype=np.uint32) << 16)[:, None] + np.array([0, 1, 0x7FFF, 0x8000, 0x8001], np.uint32)
    values = np.concatenate([bits, halves.reshape(-1)]).view(np.float32)
    with np.errstate(invalid="ignore"):
        return values[np.abs(values) <= np.float32(limit)]


class TestNumbers:
    @dtypes
    def test_every_word_is_widened_as_numpy_does(self, dtype: str) -> None:
        words: NDArray[Any] = np.arange(1 << 16, dtype=np.uint16)
        if dtype == "fp32":
            words = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, dtype=np.uint32)
        ours, theirs = call(f"widen_{NUMBERS[dtype]}", words, np.float32), element.widen(words.copy(), dtype)
        same = (ours.view(np.uint32) == theirs.view(np.uint32)) | (np.isnan(ours) & np.isnan(theirs))
        assert same.all()

    @pytest.mark.parametrize(("dtype", "limit"), [("bf16", 3e38), ("fp16", 65504), ("fp32", 3e38)])
    def test_floats_are_narrowed_as_numpy_does(self, dtype: str, limit: float) -> None:
        values = some_floats(limit)
        theirs = element.narrow(values.copy(), dtype)
        np.testing.assert_array_equal(call(f"narrow_{NUMBERS[dtype]}", values, theirs.dtype), theirs)

    def test_e4m3_equals_the_codec(self) -> None:
        values = some_floats(464)
        np.testing.assert_array_equal(call("code_Fp8", values, np.uint8), fp8.quantise_e4m3(values.copy()))
        ours = call("value_Fp8", np.arange(256, dtype=np.uint8), np.float32)
        np.testing.assert_array_equal(ours, fp8.E4M3_VALUES)
        np.testing.assert_array_equal(np.signbit(ours[:-1]), np.signbit(fp8.E4M3_VALUES[:-1]))

    def test_int8_equals_the_codec(self) -> None:
        values = np.concatenate([some_floats(127.49), np.arange(-127, 127, dtype=np.float32) + np.float32(0.5)])
        np.testing.assert_array_equal(call("code_Int8", values, np.int8), np.rint(values).astype(np.int8))
        codes = np.arange(-128, 128, dtype=np.int8)
        np.testing.assert_array_equal(call("value_Int8", codes, np.float32), codes.astype(np.float32))


@st.composite
def numbers(draw: st.DrawFn, *, wild: bool) -> tuple[Engine, NDArray[np.uint8]]:
    """Pages of numbers, and bytes to fill their memory with: such as a model makes, or any bits at all."""
    kind = draw(st.sampled_from(["mha", "mha", "mla"]))
    dtype = draw(st.sampled_from(list(NUMBERS)))
    group = Group(
        layers=draw(st.integers(1, 3)),
        kv_heads=1 if kind == "mla" else draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from([1, 3, 8, 16, 24, 32])),
        dtype=dtype,
        kind=kind,
        order=draw(st.one_of(st.just(()), st.permutations(CANONICAL_ORDERS[kind]).map(tuple))),
    )
    layout = KVLayout((group,), draw(st.sampled_from([1, 4, 16, 17, 40])))
    axes = tuple(draw(st.permutations(["layer", "kv", "page", "token", "head"])))
    gaps = tuple(draw(st.lists(st.sampled_from([0, 0, 4, 16]), min_size=5, max_size=5)))
    made = engine(layout, 0, group.whole, 3, axes=axes, gaps=gaps, offset=draw(st.sampled_from([0, 4])))
    made = replace(made, pages=replace(made.pages, device="cuda:0"))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 16)))
    size = -(-len(made.memory) // 4)
    if wild:
        words = rng.integers(0, 1 << 32, size, dtype=np.uint32)
        keep = draw(
            st.sampled_from([0xFFFFFFFF, 0x83FF83FF, 0x80FF80FF, 0xBFFFBFFF, 0])
        )  # exponents: all, tiny, no NaN
        return made, (words & np.uint32(keep)).view(np.uint8)
    spread = np.exp2(rng.integers(-9, 9, 64)).repeat(-(-2 * size // 64))[: 2 * size]
    values = (rng.standard_normal(2 * size) * spread).astype(np.float32)
    return made, element.narrow(values, dtype).view(np.uint8)


@formats
@pytest.mark.parametrize("wild", [False, True], ids=["numbers", "bits"])
@given(data=st.data())
def test_quantised_bytes_equal_the_codecs(form: Format, wild: bool, data: st.DataObject) -> None:
    e, content = data.draw(numbers(wild=wild))
    e.memory[:] = content[: len(e.memory)]
    shift = data.draw(st.sampled_from([0, 4, 8, 1]))
    way = data.draw(st.sampled_from(["direct", "staged", "mapped"]))
    c = CudaCopier(HostDevice(), crossover=Crossover(NEVER, NEVER), way=way)
    layout, shard = e.pages.layout, e.pages.shard
    quantised, twin = QuantisedPages(form, e.pages), codec(form)
    ids = [2, 0, 1]
    whole, buffers = buffers_for([quantised.payload_bytes] * 3, shift)
    c.pinned.add(memoryview(whole))
    c.gather(e.pages, ids, buffers, quantised=form).wait()
    theirs = [twin.encode(memoryview(e.payload(page)), layout, 0, shard) for page in ids]
    assert [quantised.sound(b) for b in buffers] == [encoded is not None for encoded in theirs]
    sound = [i for i, encoded in enumerate(theirs) if encoded is not None]
    assert [bytes(buffers[i]) for i in sound] == [bytes(theirs[i]) for i in sound]

    before = [e.payload(page) for page in range(3)]
    if len(sound) < 3:
        with pytest.raises(LayoutError, match=f"scales {form} does not make"):
            c.scatter(e.pages, [0, 1, 2], buffers, quantised=form)
        assert [e.payload(page) for page in range(3)] == before
    targets = [0, 1, 2][: len(sound)]
    c.scatter(e.pages, targets, [buffers[i] for i in sound], quantised=form).wait()
    for page, i in zip(targets, sound, strict=True):
        decoded = memoryview(bytearray(e.pages.block_bytes))
        twin.decode(theirs[i], decoded, layout, 0, shard)
        assert e.payload(page) == bytes(decoded)
    assert [e.payload(page) for page in range(len(sound), 3)] == before[len(sound) :]


@formats
@dtypes
def test_many_blocks_take_several_launches(form: Format, dtype: str) -> None:
    """More roots and more blocks than a job holds, of the shape that is read 16 bytes at a time."""
    layout = KVLayout.mha(layers=33, kv_heads=2, head_dim=16, dtype=dtype)
    e = engine(layout, 0, layout.whole[0], 130, axes=("layer", "kv", "page", "token", "head"), offset=16)
    e = replace(e, pages=replace(e.pages, device="cuda:0"))
    e.memory[: len(e.memory) // 4 * 4] = element.narrow(
        np.random.default_rng(0).standard_normal(len(e.memory) // (4 if dtype == "fp32" else 2)).astype(np.float32),
        dtype,
    ).view(np.uint8)[: len(e.memory) // 4 * 4]
    device = HostDevice()
    c = CudaCopier(device, crossover=Crossover(NEVER, NEVER))
    _, buffers = buffers_for([QuantisedPages(form, e.pages).payload_bytes] * 130, 0)
    c.gather(e.pages, range(130), buffers, quantised=form).wait()
    for page in (0, 64, 129):
        assert bytes(buffers[page]) == bytes(
            codec(form).encode(memoryview(e.payload(page)), layout, 0, layout.whole[0])
        )
    c.scatter(e.pages, range(130)[::-1], buffers, quantised=form).wait()
    assert all(name.endswith(f"_{form}_{dtype}_wide") for name in device.launches)
    decoded = memoryview(bytearray(e.pages.block_bytes))
    codec(form).decode(buffers[129], decoded, layout, 0, layout.whole[0])
    assert e.payload(0) == bytes(decoded)


@pytest.mark.parametrize(("shift", "offset", "count"), [(0, 0, "wide"), (8, 16, "wide"), (4, 0, "one"), (0, 8, "one")])
def test_aligned_elements_are_vectorised(shift: int, offset: int, count: str) -> None:
    layout = KVLayout.mha(layers=2, kv_heads=1, head_dim=8)
    e = engine(layout, 0, layout.whole[0], 2, axes=("layer", "kv", "page", "token", "head"), offset=offset)
    e = replace(e, pages=replace(e.pages, device="cuda:0"))
    e.memory[:] = 0x3F
    device = HostDevice()
    c = CudaCopier(device, crossover=Crossover(NEVER, NEVER), way="mapped")
    whole, buffers = buffers_for([QuantisedPages("fp8", e.pages).payload_bytes], shift)
    c.pinned.add(memoryview(whole))
    c.gather(e.pages, [1], buffers, quantised="fp8")
    c.scatter(e.pages, [0], buffers, quantised="fp8")
    assert device.launches == [f"quantise.cu:{verb}_fp8_bf16_{count}" for verb in ("quantise", "restore")]
    assert bytes(buffers[0]) == bytes(codec("fp8").encode(memoryview(e.payload(1)), layout, 0, layout.whole[0]))


@formats
@pytest.mark.parametrize(
    "group", [Group(layers=1, head_dim=8, dtype="fp8_e4m3"), Group(layers=1, kind="opaque", opaque_bytes=64)]
)
def test_an_unsupported_group_kind_or_dtype_is_refused(form: Format, group: Group) -> None:
    e = engine(KVLayout((group,)), 0, group.whole, 2, axes=("layer", "kv", "page", "token", "head"))
    with pytest.raises(LayoutError, match="expected mha or mla of bf16, fp32, fp16"):
        QuantisedPages(form, e.pages)


@formats
def test_misaligned_elements_are_refused(form: Format) -> None:
    layout = KVLayout.mha(layers=2, kv_heads=1, head_dim=8)
    e = engine(layout, 0, layout.whole[0], 2, axes=("layer", "kv", "page", "token", "head"), offset=3)
    e = replace(e, pages=replace(e.pages, device="cuda:0"))
    buffer = memoryview(bytearray(QuantisedPages(form, e.pages).payload_bytes))
    with pytest.raises(LayoutError, match="pages of bf16 at multiples of 1 bytes: expected 2"):
        CudaCopier(HostDevice(), crossover=Crossover(NEVER, NEVER)).gather(e.pages, [0], [buffer], quantised=form)

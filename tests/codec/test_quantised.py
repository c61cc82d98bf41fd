"""`fp8` and `int8`: bounds, bytes, and the numbers that no scale can serve."""

from __future__ import annotations

import itertools
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import kvcache
from kvcache.block.layout import Group, KVLayout, Shard
from kvcache.codec.codec import codec
from kvcache.codec.quantised import E4M3_VALUES, quantise_e4m3
from tests.codec import payloads
from tests.codec.payloads import WORDS, largest, mha, mla, noise, numbers, payload

DTYPES = ("bf16", "fp16", "fp32")
LARGEST = {"fp8": 448.0, "int8": 127.0}
codecs = pytest.mark.parametrize("name", ["fp8", "int8"])
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def through(name: str, before: memoryview, layout: KVLayout, shard: Shard | None = None) -> memoryview | None:
    """Encoded and decoded again; None where it is not encoded."""
    made, whole = codec(name), shard or layout.groups[0].whole
    stored = made.encode(before, layout, 0, whole)
    if stored is None:
        return None
    after = memoryview(bytearray(b"\xff" * len(before)))
    made.decode(stored, after, layout, 0, whole)
    return after


def assert_bound(
    name: str, before: memoryview, after: memoryview, layout: KVLayout, shard: Shard | None = None
) -> None:
    dtype = layout.groups[0].dtype
    was, now = numbers(before, dtype), numbers(after, dtype)
    assert (np.abs(was - now) <= codec(name).error_bound * largest(was, layout, shard)).all()


LAYOUTS = [
    *(mha(order=order) for order in itertools.islice(itertools.permutations(mha().groups[0].order), 0, 120, 7)),
    *(mla(order=order) for order in itertools.permutations(mla().groups[0].order)),
    *(make(block_tokens=tokens) for make in (mha, mla) for tokens in (1, 15, 17, 48)),
]


@codecs
@pytest.mark.parametrize(
    "layout", LAYOUTS, ids=lambda layout: f"{'-'.join(layout.groups[0].order)}-{layout.block_tokens}"
)
def test_each_group_keeps_its_bound_in_any_axis_order(name: str, layout: KVLayout) -> None:
    """Groups of very different sizes: an element measured by another group's scale would be far off."""
    group = layout.groups[0]
    rng = np.random.default_rng(1)
    sizes = {"layer": 1e3, "kv": 1e4, "head": 1e2, "token": 1e6}
    values = rng.standard_normal(layout.shape())
    for axis, factor in sizes.items():
        if axis in group.order:
            at = np.arange(layout.shape()[group.order.index(axis)]) // (16 if axis == "token" else 1)
            shape = [-1 if a == axis else 1 for a in group.order]
            values = values * (factor ** -at.astype(float)).reshape(shape)
    before = payload(values, group.dtype)
    after = through(name, before, layout)
    assert after is not None
    assert_bound(name, before, after, layout)


@codecs
@dtypes
def test_a_shard_is_encoded_independently(name: str, dtype: str) -> None:
    layout = mha(dtype)
    for shard in (Shard(0, 1, 1, 3), Shard(1, 2, 0, 1)):
        before = noise(layout, 3, shard)
        after = through(name, before, layout, shard)
        assert after is not None
        assert_bound(name, before, after, layout, shard)


@codecs
@dtypes
@given(data=st.data())
def test_finite_payloads_stay_within_the_error_bound(name: str, dtype: str, data: Any) -> None:
    layout = KVLayout.mha(layers=1, kv_heads=1, head_dim=2, dtype=dtype, block_tokens=2)
    if data.draw(st.booleans()):
        words = data.draw(st.lists(st.integers(0, np.iinfo(WORDS[dtype]).max), min_size=8, max_size=8))
        before = memoryview(bytearray(np.array(words, WORDS[dtype]).tobytes()))
    else:
        size = 2.0 ** data.draw(st.integers(-30, 15))
        before = payload(data.draw(st.lists(st.floats(-size, size), min_size=8, max_size=8)), dtype)
    after = through(name, before, layout)
    was = numbers(before, dtype)
    tops = largest(was, layout)
    if after is not None:
        assert np.isfinite(was).all()
        assert_bound(name, before, after, layout)
    else:
        least = {"bf16": 2.0**-126, "fp32": 2.0**-126, "fp16": 2.0**-24}[dtype] * LARGEST[name]
        assert not (((tops > 1.0001 * least) & (tops < 2.0**100)) | (tops == 0)).all()


@codecs
@dtypes
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan], ids=str)
def test_a_payload_with_nan_is_stored_raw(name: str, dtype: str, bad: float) -> None:
    values = np.ones(mha(dtype).shape())
    values[1, 1, 3, 2, 5] = bad
    assert through(name, payload(values, dtype), mha(dtype)) is None


@codecs
@dtypes
def test_zeros_stay_zeros_beside_other_numbers(name: str, dtype: str) -> None:
    layout = mha(dtype)
    values = np.zeros(layout.shape())
    values[0, 0, :, 0] = 3.0
    values[0, 0, 2, 0, 1] = 0.0
    before = payload(values, dtype)
    after = through(name, before, layout)
    assert after is not None
    assert bytes(after) == bytes(before), "a group of one magnitude has no loss"


@codecs
def test_the_sign_of_zero_is_kept_by_fp8_alone(name: str) -> None:
    layout = mha("fp32")
    values = np.ones(layout.shape(), np.float32)
    values[0, 0, 0, 0, 0] = -0.0
    after = through(name, payload(values, "fp32"), layout)
    assert after is not None
    assert np.signbit(np.frombuffer(after, np.float32)[0]) == (name == "fp8")


@codecs
@dtypes
@pytest.mark.parametrize("exponent", [-12, -3, 0, 7, 12])
def test_scaling_by_a_power_of_two_scales_the_result(name: str, dtype: str, exponent: int) -> None:
    layout = mha(dtype)
    rng = np.random.default_rng(5)
    values = np.round(rng.uniform(-8, 8, layout.shape()), 0) + np.sign(rng.uniform(-1, 1, layout.shape())) * 0.5
    once = through(name, payload(values, dtype), layout)
    scaled = through(name, payload(values * 2.0**exponent, dtype), layout)
    assert once is not None
    assert scaled is not None
    assert np.array_equal(numbers(once, dtype) * 2.0**exponent, numbers(scaled, dtype))


@codecs
@dtypes
@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_a_second_encoding_loses_nothing_more(name: str, dtype: str, spread: float) -> None:
    """A block may come up and go down again any number of times."""
    layout = mha(dtype)
    once = through(name, noise(layout, 9, spread=spread), layout)
    assert once is not None
    twice = through(name, once, layout)
    assert twice is not None
    if dtype == "fp32":  # 448 x (top / 448) may be a last place away from top
        assert np.allclose(numbers(once, dtype), numbers(twice, dtype), rtol=1e-6, atol=0)
    else:
        assert bytes(once) == bytes(twice)


@dtypes
def test_encoded_bytes_equal_the_specification(dtype: str) -> None:
    """Scales first, a float32 each by layer, K or V, head, token group; then a byte an element, in layout order."""
    layout = mha(dtype, order=("kv", "token", "layer", "dim", "head"), block_tokens=17)
    before = noise(layout, 8)
    was = numbers(before, dtype).reshape(layout.shape())
    for name, top in LARGEST.items():
        stored = codec(name).encode(before, layout, 0, layout.groups[0].whole)
        assert stored is not None
        at = 0
        for layer, kv, head, run in itertools.product(range(2), range(2), range(3), range(2)):
            largest_here = np.abs(was[kv, 16 * run : 16 * run + 16, layer, :, head]).max()
            (scale,) = struct.unpack_from("<f", stored, at)
            assert scale == np.float32(largest_here) / np.float32(top)
            at += 4
        assert len(stored) == at + was.size
        codes = np.frombuffer(stored[at:], np.uint8).reshape(layout.shape())
        code = codes[1, 16, 0, 3, 2]
        (scale,) = struct.unpack_from("<f", stored, 4 * (((0 * 2 + 1) * 3 + 2) * 2 + 1))
        value = E4M3_VALUES[code] if name == "fp8" else np.float32(np.int8(code))
        after = memoryview(bytearray(len(before)))
        codec(name).decode(stored, after, layout, 0, layout.groups[0].whole)
        expected = torch.tensor(float(value * np.float32(scale))).to(payloads.TORCH[dtype])
        assert numbers(after, dtype).reshape(layout.shape())[1, 16, 0, 3, 2] == float(expected)


def test_e4m3_codes_decode_as_in_torch() -> None:
    theirs = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(E4M3_VALUES, theirs, equal_nan=True)
    assert np.array_equal(np.signbit(E4M3_VALUES), np.signbit(theirs))


def test_numbers_encode_to_e4m3_as_in_torch() -> None:
    """All that bf16 and fp16 know, and the neighbours of every number halfway between two codes."""
    words = np.arange(1 << 16, dtype=np.uint16)
    middles = (E4M3_VALUES[:126] + E4M3_VALUES[1:127]) / 2
    near = np.concatenate([np.nextafter(middles, np.float32(side)) for side in (-np.inf, np.inf)])
    values = np.concatenate(
        [
            (words.astype(np.uint32) << 16).view(np.float32),
            words.view(np.float16).astype(np.float32),
            *(sign * each for sign in (1, -1) for each in (E4M3_VALUES, middles, near)),
        ]
    ).astype(np.float32)
    values = values[np.abs(values) <= 448]
    theirs = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(quantise_e4m3(values.copy()), theirs)


@codecs
def test_a_scale_that_no_writer_makes_is_refused(name: str) -> None:
    layout, made = mha(), codec(name)
    whole = layout.groups[0].whole
    stored = made.encode(noise(layout, 1), layout, 0, whole)
    assert stored is not None
    for bad in (np.nan, np.inf, -1.0, 2.0**101):
        wrong = bytearray(stored)
        struct.pack_into("<f", wrong, 8, bad)
        with pytest.raises(ValueError, match="scale"):
            made.decode(memoryview(wrong), memoryview(bytearray(layout.block_bytes())), layout, 0, whole)


@codecs
@pytest.mark.parametrize(
    "group",
    [
        Group(layers=1, kind="opaque", opaque_bytes=64, name="packed"),
        Group(layers=1, head_dim=4, dtype="fp8_e4m3", name="packed"),
        Group(layers=1, head_dim=4, dtype="fp8_e5m2", kind="mla", name="packed"),
    ],
    ids=lambda group: f"{group.kind}-{group.dtype}",
)
def test_a_layout_that_cannot_be_scaled_is_refused(name: str, group: Group) -> None:
    layout = KVLayout((mha().groups[0], group))
    with pytest.raises(kvcache.ConfigError, match=rf"^codec = '{name}': group 1 \(packed\) is .*; use raw or zstd"):
        codec(name).check(layout)
    codec(name).check(mha())
    codec("zstd").check(layout)
    codec("raw").check(layout)

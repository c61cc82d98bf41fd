"""`zstd`: every byte comes back, whatever they are, and nothing but whole frames is believed."""

from __future__ import annotations

import struct
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcache
from kvcache.block.layout import Group, KVLayout
from kvcache.codec.codec import codec, codecs
from tests.codec.payloads import mha, mla, noise

DTYPES = ("bf16", "fp16", "fp32", "fp8_e4m3", "fp8_e5m2")


def through(before: bytes, layout: KVLayout) -> bytes:
    made, whole = codec("zstd"), layout.groups[0].whole
    stored = made.encode(memoryview(before), layout, 0, whole)
    assert stored is not None
    after = memoryview(bytearray(b"\xee" * len(before)))
    made.decode(stored, after, layout, 0, whole)
    return bytes(after)


@pytest.mark.parametrize("dtype", DTYPES)
@given(data=st.data())
def test_any_bytes_are_decoded_unchanged(dtype: str, data: Any) -> None:
    layout = KVLayout.mha(layers=1, kv_heads=1, head_dim=2, dtype=dtype, block_tokens=3)
    size = layout.block_bytes()
    before = data.draw(st.binary(min_size=size, max_size=size))
    assert through(before, layout) == before


@pytest.mark.parametrize("size", [1, 3, 4096, 99_999, 1 << 20])
def test_opaque_payloads_of_any_size_are_decoded_unchanged(size: int) -> None:
    layout = KVLayout((Group(layers=1, kind="opaque", opaque_bytes=size),))
    before = np.random.default_rng(size).integers(0, 256, size, np.uint8).tobytes()
    assert through(before, layout) == before


@pytest.mark.parametrize("layout", [mha("bf16"), mha("fp32"), mla("fp16")], ids=str)
def test_numbers_take_less_room(layout: KVLayout) -> None:
    before = noise(KVLayout(layout.groups, block_tokens=256), 1)
    whole = layout.groups[0].whole
    stored = codec("zstd").encode(before, KVLayout(layout.groups, block_tokens=256), 0, whole)
    assert stored is not None
    assert len(stored) < 0.9 * len(before)


def test_each_plane_is_a_length_prefixed_frame() -> None:
    from kvcache.codec.zstd import library

    layout = mha("fp32")
    before = noise(layout, 4)
    stored = codec("zstd").encode(before, layout, 0, layout.groups[0].whole)
    assert stored is not None
    at = 16
    for place, length in enumerate(struct.unpack_from("<4I", stored)):
        plane = library().decompress(stored[at : at + length])
        assert plane == bytes(before)[place::4]
        at += length
    assert at == len(stored)


def test_invalid_frames_are_refused() -> None:
    from kvcache.codec.zstd import library

    layout, made = mha("bf16"), codec("zstd")
    whole, size = layout.groups[0].whole, layout.block_bytes()
    good = made.encode(noise(layout, 5), layout, 0, whole)
    assert good is not None
    first, second = struct.unpack_from("<2I", good)
    frames = [good[8 : 8 + first], good[8 + first :]]
    long = library().compress(bytes(size))  # twice the bytes of a plane
    bomb = library().compress(bytes(1 << 26))
    short = library().compress(bytes(7))
    for one, other in (
        (frames[0], long),
        (bomb, frames[1]),
        (frames[0], short),
        (frames[0], bytes(frames[1])[:-1]),
        (frames[0], bytes(frames[1]) + b"x"),
        (b"", frames[1]),
        (b"no frame", frames[1]),
        (bytes(frames[0]) + long, frames[1]),
    ):
        wrong = struct.pack("<2I", len(one), len(other)) + bytes(one) + bytes(other)
        with pytest.raises(ValueError, match="a frame of"):
            made.decode(memoryview(wrong), memoryview(bytearray(size)), layout, 0, whole)
    assert second == len(frames[1])
    with pytest.raises(ValueError, match="bytes stored: expected at least 8"):
        made.decode(good[:7], memoryview(bytearray(size)), layout, 0, whole)


def test_a_missing_zstd_library_disables_only_zstd(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("compression", "compression.zstd", "backports", "backports.zstd"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(kvcache.ConfigError, match=r"codec = 'zstd'.*pip install 'kvcache-tiers\[zstd\]'"):
        codec("zstd")
    assert set(codecs()) == {"raw", "fp8", "int8"}

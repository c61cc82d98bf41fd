"""The `fp8` and `int8` codecs: elements divided by a scale, in eight bits.

A scale group is one layer, K or V, head, and run of 16 tokens. Its scale maps the largest magnitude in the group to the
largest number of the small format. A block of 16 tokens has one scale a head. `docs/spec/codec.md` specifies the bytes.

`encode` returns None where a group holds infinity or NaN. It also returns None where a scale would be outside the range
in which float32 arithmetic and the dtype's steps keep the bound. No model's keys or values reach either case.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.layout import KVLayout, Shard
from kvcache.errors import ConfigError

# Conversion between the words of a payload and float32. numpy has no bfloat16; its words are the upper halves of
# float32.

WORD_DTYPES: Mapping[str, np.dtype[Any]] = {"bf16": np.dtype("<u2"), "fp16": np.dtype("<u2"), "fp32": np.dtype("<u4")}
"""The supported dtypes, each with the unsigned integer of its size."""

_U32 = np.uint32


def widen(words: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Return the exact values of words, in a new array."""
    if dtype == "bf16":
        bits: NDArray[np.uint32] = words.astype(_U32)
        bits <<= _U32(16)
        return bits.view(np.float32)
    return np.array(words.view(np.float16 if dtype == "fp16" else np.float32), np.float32)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """Return the nearest words, ties to even. Values must be finite and within the dtype's range."""
    if dtype == "bf16":
        bits = values.view(_U32)
        rounded = bits >> _U32(16)
        rounded &= _U32(1)
        rounded += bits
        rounded += _U32(0x7FFF)
        rounded >>= _U32(16)
        return np.array(rounded, WORD_DTYPES[dtype])
    if dtype == "fp16":
        return np.array(values, np.float16).view(WORD_DTYPES[dtype])
    return values.view(_U32)


def magnitudes(words: NDArray[Any]) -> NDArray[Any]:
    """Return words without their sign bit. They sort by magnitude: numbers, then infinity, then NaN."""
    all_but_sign: NDArray[Any] = words & words.dtype.type(np.iinfo(words.dtype).max >> 1)
    return all_but_sign


GROUP_TOKENS = 16
MIN_SCALE = {"bf16": 2.0**-126, "fp32": 2.0**-126, "fp16": 2.0**-24}
MAX_SCALE = 2.0**100
SCALE_DTYPE = np.dtype("<f4")

_CHUNK_ELEMENTS = 1 << 16  # elements in a pass: few enough to stay in the processor's cache


class ScaledCodec:
    name: str
    error_bound: float
    varies = False
    largest: float  # the largest magnitude of a scaled element

    def check(self, layout: KVLayout) -> None:
        for i, group in enumerate(layout.groups):
            if group.kind == "opaque" or group.dtype not in WORD_DTYPES:
                raise ConfigError(
                    f"codec = {self.name!r}: group {i} ({group.name}) is {group.kind} of {group.dtype}; expected mha "
                    f"or mla of {', '.join(WORD_DTYPES)}; use raw or zstd"
                )

    def encode(self, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> memoryview | None:
        form = ScaleLayout.of(layout, group, shard)
        dtype = layout.groups[group].dtype
        words = np.frombuffer(payload, WORD_DTYPES[dtype]).reshape(form.shape)
        tops = form.largest(words)
        with np.errstate(invalid="ignore"):  # comparisons with NaN are false, so NaN counts as out of range
            scales = widen(tops, dtype) / np.float32(self.largest)
            within = (scales >= MIN_SCALE[dtype]) & (scales <= MAX_SCALE)
        if not np.all(within | (tops == 0)):
            return None
        factors = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales > 0)
        stored = np.empty(form.scale_bytes + words.size, np.uint8)
        stored[: form.scale_bytes] = form.packed(scales)
        codes = stored[form.scale_bytes :].reshape(form.shape)
        for part, factor in form.parts(factors):
            values = widen(words[part], dtype)
            values *= factor
            codes[part] = self._quantise(values)
        return stored.data

    def decode(self, stored: memoryview, payload: memoryview, layout: KVLayout, group: int, shard: Shard) -> None:
        form = ScaleLayout.of(layout, group, shard)
        dtype = layout.groups[group].dtype
        words = np.frombuffer(payload, WORD_DTYPES[dtype]).reshape(form.shape)
        if len(stored) != form.scale_bytes + words.size:
            raise ValueError(f"{len(stored)} bytes stored: expected {form.scale_bytes} of scales and {words.size}")
        scales = form.unpacked(np.frombuffer(stored[: form.scale_bytes], SCALE_DTYPE))
        if not np.all((scales >= 0) & (scales <= MAX_SCALE)):
            raise ValueError(f"a scale among the first {form.scale_bytes} bytes is not within 0 and {MAX_SCALE}")
        codes = np.frombuffer(stored[form.scale_bytes :], np.uint8).reshape(form.shape)
        for part, scale in form.parts(scales):
            values = self._dequantise(codes[part])
            values *= scale
            words[part] = narrow(values, dtype)

    def _quantise(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        """Return the nearest code of each value, ties to even. May overwrite `values`."""
        raise NotImplementedError

    def _dequantise(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class ScaleLayout:
    """The axes of a payload, in the layout's order, and of its scales.

    Scales have one index for each 16 tokens, and one along dim or latent.
    """

    shape: tuple[int, ...]
    token: int  # index of the token axis
    inner: int  # index of the dim or latent axis
    canonical: tuple[int, ...]  # the axes in the order of stored scales

    @classmethod
    def of(cls, layout: KVLayout, group: int, shard: Shard) -> ScaleLayout:
        order = layout.groups[group].order
        at = {axis: i for i, axis in enumerate(order)}
        canonical = tuple(at[axis] for axis in ("layer", "kv", "head", "token", "dim", "latent") if axis in at)
        return cls(layout.shape(shard, group=group), at["token"], canonical[-1], canonical)

    @property
    def scale_shape(self) -> tuple[int, ...]:
        shape = list(self.shape)
        shape[self.token] = -(-shape[self.token] // GROUP_TOKENS)
        shape[self.inner] = 1
        return tuple(shape)

    @property
    def scale_bytes(self) -> int:
        return SCALE_DTYPE.itemsize * int(np.prod(self.scale_shape))

    def largest(self, words: NDArray[Any]) -> NDArray[Any]:
        """Return the word of largest magnitude in each scale group, without its sign bit."""
        runs = np.split(words, range(GROUP_TOKENS, self.shape[self.token], GROUP_TOKENS), self.token)
        # reduce tokens first: numpy is slow at the short runs along the inner axis, and few are left then
        tops = [magnitudes(run).max(axis=self.token, keepdims=True).max(axis=self.inner, keepdims=True) for run in runs]
        return np.concatenate(tops, self.token)

    def packed(self, scales: NDArray[np.float32]) -> NDArray[np.uint8]:
        return np.ascontiguousarray(scales.transpose(self.canonical), SCALE_DTYPE).reshape(-1).view(np.uint8)

    def unpacked(self, scales: NDArray[np.float32]) -> NDArray[np.float32]:
        shape = [self.scale_shape[axis] for axis in self.canonical]
        ordered: NDArray[np.float32] = scales.reshape(shape).transpose(np.argsort(self.canonical))
        return ordered

    def parts(self, scales: NDArray[np.float32]) -> list[tuple[slice, NDArray[np.float32]]]:
        """Return slices of the first axis, of about _CHUNK_ELEMENTS elements, with scales to broadcast over each."""
        spread = scales.repeat(GROUP_TOKENS, self.token)
        spread = spread.take(range(self.shape[self.token]), self.token)
        rows = max(1, _CHUNK_ELEMENTS * self.shape[0] // int(np.prod(self.shape)))
        slices = [slice(at, at + rows) for at in range(0, self.shape[0], rows)]
        return [(part, spread if len(spread) == 1 else spread[part]) for part in slices]


# `fp8`: elements as e4m3 floats, scaled by group. Half the bytes of bf16 and fp16, a quarter of those of fp32. e4m3
# (the finite kind, `float8_e4m3fn`) has a sign, four bits of exponent with bias 7, and three of mantissa. It has no
# infinity; all bits but the sign set mean NaN. The largest number is 448, the smallest 2^-9.

_SMALLEST_NORMAL = np.float32(2.0**-6)
_ALIGN = np.float32(2.0**14)  # the last place of this number in float32 is 2^-9


class Fp8(ScaledCodec):
    """e4m3 floats. Error: half the step at the top of the range, 16 of 448, plus the rounding of the dtype."""

    name = "fp8"
    error_bound = 1 / 25
    largest = 448.0

    def _quantise(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        return quantise_e4m3(values)

    def _dequantise(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.take(E4M3_VALUES, codes)
        return values


def quantise_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return the nearest e4m3 code of numbers from -464 to 464, ties to even. Overwrites `values`."""
    bits = values.view(_U32)
    sign = (bits >> _U32(24)).astype(np.uint8)
    sign &= np.uint8(0x80)
    np.abs(values, out=values)
    codes = bits >> _U32(20)  # exponent and three bits of mantissa
    codes &= _U32(1)
    codes += bits
    codes += _U32(0x7FFFF)
    codes >>= _U32(20)
    codes -= _U32((127 - 7) << 3)
    aligned = values + _ALIGN  # rounds to a multiple of 2^-9, as subnormals are
    small = aligned.view(_U32)
    small -= _ALIGN.view(_U32)
    np.copyto(codes, small, where=values < _SMALLEST_NORMAL)
    narrowed = np.array(codes, np.uint8)
    narrowed |= sign
    return narrowed


def _e4m3_values() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[codes & 0x7F == 0x7F] = np.nan
    return np.array(np.where(codes < 128, size, -size), np.float32)


E4M3_VALUES = _e4m3_values()
"""The value of each code."""


# `int8`: elements as integers of -127 to 127, scaled by group. Half the bytes of bf16 and fp16, a quarter of fp32's.
# Its steps are equal. It is better than `fp8` where magnitudes are alike, and worse for elements that are small beside
# the largest of their group.


class Int8(ScaledCodec):
    """Integers. Error: half a step, plus at most half a step for the rounding of the dtype."""

    name = "int8"
    error_bound = 1 / 127
    largest = 127.0

    def _quantise(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        return np.rint(values, out=values).astype(np.int8).view(np.uint8)

    def _dequantise(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        return codes.view(np.int8).astype(np.float32)

"""`fp8`: elements as e4m3 floats, scaled by group. Half the bytes of bf16 and fp16, a quarter of those of fp32.

e4m3 (the finite kind, `float8_e4m3fn`): sign, four bits of exponent with bias 7, three of mantissa; no infinity, NaN
where all bits but the sign are set. The largest number is 448, the smallest 2^-9.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.codec.scaled import Scaled

_U32 = np.uint32
_SMALLEST_NORMAL = np.float32(2.0**-6)
_ALIGN = np.float32(2.0**14)  # whose last place in float32 is 2^-9


class Fp8(Scaled):
    """Error: half the distance of neighbours at the top, 16 of 448, and the rounding of the dtype."""

    name = "fp8"
    error_bound = 1 / 25
    largest = 448.0

    def _quantise(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        return quantise(values)

    def _restore(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        values: NDArray[np.float32] = np.take(NUMBERS, codes)
        return values


def quantise(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """The nearest e4m3 code, ties to even, of numbers within -464 and 464. Uses `values` up."""
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


def _numbers() -> NDArray[np.float32]:
    codes = np.arange(256)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    size = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10))
    size[codes & 0x7F == 0x7F] = np.nan
    return np.array(np.where(codes < 128, size, -size), np.float32)


NUMBERS = _numbers()
"""What each code means."""

"""Elements as numbers: the words of a payload as float32, and float32 as the nearest words.

numpy knows no bfloat16: its words are the upper halves of float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS: Mapping[str, np.dtype[Any]] = {"bf16": np.dtype("<u2"), "fp16": np.dtype("<u2"), "fp32": np.dtype("<u4")}
"""The dtypes whose elements are numbers here, as unsigned integers of their size."""

_U32 = np.uint32


def widen(words: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """Exactly; a new array."""
    if dtype == "bf16":
        bits: NDArray[np.uint32] = words.astype(_U32)
        bits <<= _U32(16)
        return bits.view(np.float32)
    return np.array(words.view(np.float16 if dtype == "fp16" else np.float32), np.float32)


def narrow(values: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """The nearest, ties to even. Finite values only, none beyond the dtype's largest."""
    if dtype == "bf16":
        bits = values.view(_U32)
        rounded = bits >> _U32(16)
        rounded &= _U32(1)
        rounded += bits
        rounded += _U32(0x7FFF)
        rounded >>= _U32(16)
        return np.array(rounded, WORDS[dtype])
    if dtype == "fp16":
        return np.array(values, np.float16).view(WORDS[dtype])
    return values.view(_U32)


def magnitudes(words: NDArray[Any]) -> NDArray[Any]:
    """Words without their sign: in the order of the numbers' magnitudes, above all numbers infinity, then NaN."""
    all_but_sign: NDArray[Any] = words & words.dtype.type(np.iinfo(words.dtype).max >> 1)
    return all_but_sign

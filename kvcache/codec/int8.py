"""`int8`: elements as integers of -127 to 127, scaled by group. Half the bytes of bf16 and fp16, a quarter of fp32's.

Steps of equal size: better than `fp8` where magnitudes are alike, worse for what is small beside the largest of its
group.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.codec.scaled import Scaled


class Int8(Scaled):
    """Error: half a step, and as much again at most for the rounding of the dtype."""

    name = "int8"
    error_bound = 1 / 127
    largest = 127.0

    def _quantise(self, values: NDArray[np.float32]) -> NDArray[np.uint8]:
        return np.rint(values, out=values).astype(np.int8).view(np.uint8)

    def _restore(self, codes: NDArray[np.uint8]) -> NDArray[np.float32]:
        return codes.view(np.int8).astype(np.float32)

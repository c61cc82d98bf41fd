"""Many copies over the bus in one call of the driver: cuMemcpyBatchAsync, where the driver has it (12.8 and later).

Reached through libcuda by its C interface, since CuPy does not carry it. The call works in whatever context is current.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

Addresses = NDArray[np.uint64]

ATTRIBUTES = np.dtype(
    [
        ("source_order", "i4"),
        ("source_place", "i4", (2,)),
        ("target_place", "i4", (2,)),
        ("flags", "u4"),
    ]
)
"""CUmemcpyAttributes of cuda.h; the places are hints for managed memory and stay 0."""

_IN_STREAM_ORDER, _BESIDE_COMPUTE = 1, 1


class Batch:
    """The driver's call, or that there is none."""

    def __init__(self, library: Any) -> None:
        self._call = next(
            (
                (getattr(library, name), with_failure)
                for name, with_failure in (("cuMemcpyBatchAsync_v2", False), ("cuMemcpyBatchAsync", True))
                if hasattr(library, name)
            ),
            None,
        )

    @classmethod
    def of_driver(cls) -> Batch:
        try:
            return cls(ctypes.CDLL("libcuda.so.1"))
        except OSError:
            return cls(None)

    @property
    def available(self) -> bool:
        return self._call is not None

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int) -> bool:
        """Put the copies on the stream, which must not be the default one. False where that cannot be done: then the
        caller copies one by one; what of the batch may have begun does no harm, since it writes the same bytes."""
        if self._call is None or not len(sizes):
            return not len(sizes)
        call, with_failure = self._call
        attributes = np.zeros(1, ATTRIBUTES)
        attributes["source_order"], attributes["flags"] = _IN_STREAM_ORDER, _BESIDE_COMPUTE
        first, failed = np.zeros(1, np.uint64), np.zeros(1, np.uint64)
        arrays = [np.ascontiguousarray(a, np.uint64) for a in (targets, sources, sizes)]
        given: list[Any] = [ctypes.c_void_p(a.ctypes.data) for a in arrays]
        given += [ctypes.c_size_t(len(sizes)), ctypes.c_void_p(attributes.ctypes.data)]
        given += [ctypes.c_void_p(first.ctypes.data), ctypes.c_size_t(1)]
        given += [ctypes.c_void_p(failed.ctypes.data)] if with_failure else []
        if call(*given, ctypes.c_void_p(stream)) == 0:
            return True
        self._call = None  # this driver or these pointers: not asked again
        return False

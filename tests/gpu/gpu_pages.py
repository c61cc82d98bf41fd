"""An engine's pages on a real GPU, and what the tests put there to order and to look at them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from kvcache.transfer.pages import GroupPages
from tests.transfer.test_copier import Engine

cupy = pytest.importorskip("cupy", reason="no CuPy: pip install 'kvcache-tiers[cuda13]'")


@dataclass
class GpuPages:
    """The memory of an engine of the CPU tests, on the device; what the tests expect is worked out in the first."""

    e: Engine
    memory: Any  # cupy.ndarray
    pages: GroupPages

    @classmethod
    def of(cls, e: Engine, device: int = 0) -> GpuPages:
        memory = cupy.asarray(e.memory)
        moved = e.pages.bases.astype(np.int64) - e.memory.ctypes.data + memory.data.ptr
        pages = replace(e.pages, bases=moved.astype(np.uint64), device=f"cuda:{device}", owner=memory)
        return cls(e, memory, pages)

    def now(self) -> NDArray[np.uint8]:
        found: NDArray[np.uint8] = cupy.asnumpy(self.memory)
        return found


_SOURCE = r"""
extern "C" __global__ void stand(volatile int* gate, long long most_ns) {
    unsigned long long begun, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begun));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (*gate == 0 && now - begun < most_ns);
}
"""


class StreamGate:
    """Holds a stream until it is opened, for ten seconds at most so that a test that is wrong ends."""

    def __init__(self) -> None:
        self._memory = cupy.cuda.alloc_pinned_memory(4)
        self._flag = np.frombuffer(self._memory, np.int32, 1)
        self._flag[0] = 0
        self._kernel = cupy.RawKernel(_SOURCE, "stand")

    def close_on(self, stream: Any) -> None:
        with stream:
            self._kernel((1,), (1,), (np.uint64(self._memory.ptr), np.int64(10_000_000_000)))

    def open(self) -> None:
        self._flag[0] = 1

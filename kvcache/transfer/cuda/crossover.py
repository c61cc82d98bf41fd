"""The size from which on DMA copies over the bus are as fast as a kernel's.

DMA engines use no multiprocessors, so the copier prefers them where they keep up. Each DMA copy has a start-up cost, so
they keep up only for large copies. The size differs by machine and is measured when a copier is made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from kvcache.transfer.cuda.device import Device
from kvcache.transfer.cuda.kernels import Direction, launches
from kvcache.transfer.walk import CopyPlan, FragmentWalk

SIZES = tuple(1 << power for power in range(14, 23))  # 16 KiB to 4 MiB
NEVER = sys.maxsize
_TOTAL_BYTES = 16 << 20
_MIN_RATE_RATIO = 0.97
_RUNS = 3


@dataclass(frozen=True, slots=True)
class Crossover:
    """The smallest copies that use DMA, in bytes."""

    gather: int  # from the device
    scatter: int  # to the device


def crossover_bytes(dma: Mapping[int, float], kernel: float) -> int:
    """Return the size from which on every measured DMA rate keeps up with the kernel; NEVER where none does."""
    found = NEVER
    for size in sorted(dma, reverse=True):
        if dma[size] < _MIN_RATE_RATIO * kernel:
            break
        found = size
    return found


class TransferRates:
    """Measures rates over the bus with pinned memory, in bytes a second: DMA copies of one size, and the kernel."""

    def __init__(self, device: Device, stream: int, bus_blocks: int, total_bytes: int = _TOTAL_BYTES) -> None:
        self._device, self._stream, self._bus_blocks, self._total = device, stream, bus_blocks, total_bytes
        self._there = device.memory(total_bytes, stream)
        self._here = device.host_memory(total_bytes)

    def dma(self, direction: Direction, size: int) -> float:
        starts = np.arange(0, self._total - size + 1, size, dtype=np.uint64)
        there, here = starts + np.uint64(self._there.pointer), starts + np.uint64(self._here.pointer)
        ends = (here, there) if direction == "gather" else (there, here)
        sizes = np.full(len(starts), size, np.uint64)
        return self._rate(lambda: self._device.copy(*ends, sizes, self._stream, pinned=True), len(starts) * size)

    def kernel(self, direction: Direction) -> float:
        whole = CopyPlan(np.array([[self._there.pointer, 0]], np.int64), FragmentWalk((), self._total), 0)
        here = np.array([self._here.pointer], np.int64)
        (launch,) = launches(whole, direction, [0], here, self._bus_blocks)
        return self._rate(lambda: self._device.launch(launch, self._stream), self._total)

    def _rate(self, work: Callable[[], None], size: int) -> float:
        self._device.seconds(self._stream, work)
        return size / float(np.median([self._device.seconds(self._stream, work) for _ in range(_RUNS)]))


def measure(device: Device, stream: int, bus_blocks: int, sizes: Sequence[int] = SIZES) -> Crossover:
    """Measure the crossover of both directions. Takes some tens of milliseconds."""
    rates = TransferRates(device, stream, bus_blocks)
    gather, scatter = (
        crossover_bytes({size: rates.dma(direction, size) for size in sizes}, rates.kernel(direction))
        for direction in ("gather", "scatter")
    )
    return Crossover(gather, scatter)

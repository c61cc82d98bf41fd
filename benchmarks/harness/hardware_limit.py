"""What the hardware allows, measured in the same run as what is held against it: the best of a few runs each.

All use as many threads as torch does. Rates are in bytes or operations a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from kvcache.os_env import LocalDisk

MiB = 1 << 20


def best_s(call: Callable[[], object], runs: int = 5) -> float:
    """The shortest time of a call, after one that does not count."""
    call()
    times = []
    for _ in range(runs):
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return min(times)


def matmul_rate(dtype: torch.dtype = torch.float32, size: int = 2048) -> float:
    """Floating-point operations a second of a large square product."""
    a, b = torch.rand(size, size).to(dtype), torch.rand(size, size).to(dtype)
    out = torch.empty_like(a)
    return 2 * size**3 / best_s(lambda: torch.mm(a, b, out=out))


def memory_rate(size_bytes: int = 256 * MiB) -> float:
    """Bytes a second that can be read from memory: a sum of more than the processor's caches hold."""
    numbers = torch.ones(size_bytes // 4)
    return size_bytes / best_s(numbers.sum)


def copy_rate(size_bytes: int = 256 * MiB) -> float:
    """Bytes a second that can be copied within memory."""
    source = torch.ones(size_bytes // 4)
    target = torch.empty_like(source)
    return size_bytes / best_s(lambda: target.copy_(source))


def drive_rate(directory: Path, size_bytes: int = 256 * MiB, threads: int = 4) -> float:
    """Bytes a second that can be read from a file written there before, in pieces of 1 MiB, around the page cache
    where the file system allows."""
    path = str(directory / "floor")
    disk = LocalDisk()
    file = disk.open(path, create=True, direct=True)
    try:
        for at in range(0, size_bytes, MiB):
            file.write(at, [_aligned(MiB)])
        file.sync()

        def read(first: int) -> None:
            buffer = _aligned(MiB)
            for at in range(first, size_bytes, threads * MiB):
                file.read(at, [buffer])

        with ThreadPoolExecutor(threads) as pool:
            return size_bytes / best_s(lambda: list(pool.map(read, range(0, threads * MiB, MiB))), runs=3)
    finally:
        file.close()
        disk.remove(path)


def _aligned(size_bytes: int) -> memoryview:
    """A buffer on a page boundary, as O_DIRECT wants it."""
    buffer = torch.ones(size_bytes + 4096, dtype=torch.uint8).numpy()
    start = -buffer.ctypes.data % 4096
    return memoryview(buffer)[start : start + size_bytes]

"""A GPU that is not there: the shipped kernels, compiled for this processor, behind the copier's `Device`.

Streams are queues. `HostDevice` runs what is put on them at once; `LazyHostDevice` runs it as late as it may and in an
order drawn at random, so that a copy which does not wait for what it must wait for reads or writes the wrong bytes.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from kvcache.transfer.cuda.device import Addresses, DeviceMemory
from kvcache.transfer.cuda.kernels import THREADS, Launch

HERE = Path(__file__).parent
CXX = os.environ.get("CXX", "g++")


@cache
def compiled() -> ctypes.CDLL:
    """The kernels as a library; an access at an address that its width does not allow ends the process."""
    if not shutil.which(CXX):
        pytest.skip(f"no compiler {CXX}")
    with TemporaryDirectory() as place:
        library = Path(place) / "kernels.so"
        command = [CXX, "-std=c++17", "-O2", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
        command += ["-Wno-unknown-pragmas", "-fsanitize=undefined", "-fsanitize-undefined-trap-on-error"]
        subprocess.run([*command, HERE / "cuda_on_cpu.cpp", "-o", library], check=True)
        return ctypes.CDLL(str(library))


class Point:
    """An event: has happened when its stream has come to it."""

    def __init__(self, device: HostDevice) -> None:
        self._device, self.happened = device, False

    @property
    def done(self) -> bool:
        self._device.advance()
        return self.happened

    def synchronize(self) -> None:
        while not self.happened:
            assert self._device.step(), "a stream waits for what never comes"


class HostDevice:
    name = "cuda:0"
    multiprocessors = 3

    def __init__(self, *, pinning: bool = True) -> None:
        self.launches: list[str] = []
        self.copies: list[tuple[int, bool]] = []  # pieces of each batch, pinned
        self.pinning = pinning
        self._queues: dict[int, deque[Callable[[], bool]]] = {0: deque()}  # a step says whether it could be taken

    def stream(self) -> int:
        handle = len(self._queues)
        self._queues[handle] = deque()
        return handle

    def put(self, stream: int, work: Callable[[], object]) -> None:
        self._put(stream, lambda: (work(), True)[1])

    def _put(self, stream: int, step: Callable[[], bool]) -> None:
        self._queues[stream].append(step)
        self.advance()

    def record(self, stream: int) -> Point:
        point = Point(self)
        self.put(stream, lambda: setattr(point, "happened", True))
        return point

    def follow(self, stream: int, event: Any) -> None:
        self._put(stream, lambda: event.happened)

    def launch(self, launch: Launch, stream: int) -> None:
        self.launches.append(launch.kernel)
        file, name = launch.kernel.split(":")
        call = getattr(compiled(), f"launch_{file.removesuffix('.cu')}")
        function = ctypes.cast(getattr(compiled(), name), ctypes.c_void_p)
        job = launch.job.copy()  # by value
        self.put(stream, lambda: call(function, ctypes.c_void_p(job.ctypes.data), *launch.grid, THREADS))

    def copy(self, targets: Addresses, sources: Addresses, sizes: Addresses, stream: int, *, pinned: bool) -> None:
        self.copies.append((len(sizes), pinned))
        pieces = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))
        self.put(stream, lambda: [ctypes.memmove(*piece) for piece in pieces])
        if not pinned:
            self.record(stream).synchronize()

    def memory(self, size_bytes: int, stream: int) -> DeviceMemory:
        poisoned = np.full(size_bytes + 256, 0xEE, np.uint8)
        return DeviceMemory(-(-poisoned.ctypes.data // 256) * 256, poisoned)

    def host_memory(self, size_bytes: int) -> DeviceMemory:
        return self.memory(size_bytes, 0)

    def register(self, address: int, size_bytes: int, *, read_only: bool = False) -> int:
        if not self.pinning:
            raise OSError("cudaErrorMemoryAllocation")
        return address

    def unregister(self, address: int) -> None:
        pass

    def seconds(self, stream: int, work: Callable[[], None]) -> float:
        work()
        return 1.0

    def advance(self) -> None:
        """Time passes: all is done that can be."""
        while self.step():
            pass

    def step(self) -> bool:
        """Take one step of some stream; False where none can be taken."""
        return any(self._take(queue) for queue in self._queues.values())

    @staticmethod
    def _take(queue: deque[Callable[[], bool]]) -> bool:
        if not queue or not queue[0]():
            return False
        queue.popleft()
        return True


class LazyHostDevice(HostDevice):
    """Nothing is done before it is waited for; what is done first is drawn by lot."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._random = Random(seed)

    def advance(self) -> None:
        pass

    def step(self) -> bool:
        queues = list(self._queues.values())
        self._random.shuffle(queues)
        return any(self._take(queue) for queue in queues)

"""The contract of a copier, and the registry of copiers by device.

A copier copies whole blocks between an engine's pages and block bytes in the layout's order.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from kvcache.errors import KVCacheError, LayoutError
from kvcache.transfer.cpu import CpuCopier
from kvcache.transfer.pages import GroupPages


class CopyHandle(Protocol):
    """A running copy. Once it is done, the caller may change the pages (gather) or the buffers (scatter) again."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until this layer of every block is copied; `layer` counts within the shard."""


class Copier(Protocol):
    """Copies whole blocks. Pages and buffers belong to the caller.

    Args of `gather` and `scatter`:
        page_ids: The page of each block.
        buffers: The payload of each block: contiguous, of the layout's size for the shard.
        after: A mark. The copy begins after the work that the engine gave its device before the mark, or before the
            call where there is no mark.
    """

    def mark(self) -> Any:
        """Return the engine's current position. Call it on the thread that gives the device its work."""

    def gather(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: Any = None
    ) -> CopyHandle:
        """Copy pages to buffers."""

    def scatter(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: Any = None
    ) -> CopyHandle:
        """Copy buffers to pages."""


# The registry makes the copier of a device at its first use. It pins the host memory of copies in the background, for
# each GPU in use. Until a region is pinned, or where the system does not allow it, the driver copies through its own
# buffers, at a part of the speed.

_log = logging.getLogger("kvcache.transfer")


class PinnedMemory(Protocol):
    """The part of `PinnedRegions` that the registry uses."""

    def add(self, memory: memoryview) -> None: ...
    def remove(self, memory: memoryview) -> None: ...


class DeviceCopier(Copier, Protocol):
    """A copier of a device with separate memory: `CudaCopier`."""

    @property
    def pinned(self) -> PinnedMemory: ...
    def close(self) -> None: ...


def cuda_copier(index: int) -> DeviceCopier:
    from kvcache.transfer.cuda.copier import CudaCopier

    return CudaCopier(index, compute_stream=lambda: current_stream(index))


def current_stream(index: int) -> int:
    """Return torch's current stream on this thread; the default stream where torch has not initialised CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(index).cuda_stream)


class CopierRegistry:
    """The copiers by device, and the host memory to pin for them.

    Args:
        background: Runs calls later, one after another.
        threads: Threads of the CPU copier.
        make: Makes the copier of a GPU.

    Thread safety: any thread may call it; `close` only after the last background call.
    """

    def __init__(
        self,
        background: Callable[[Callable[[], None]], Any],
        *,
        threads: int = 2,
        make: Callable[[int], DeviceCopier] = cuda_copier,
    ) -> None:
        self._cpu, self._make, self._background = CpuCopier(threads), make, background
        self._devices: dict[int, DeviceCopier] = {}
        self._memory: dict[int, memoryview] = {}  # all regions, by identity
        self._pinned: set[tuple[int, int]] = set()  # (device, region identity); used only by background calls
        self._logged_devices = False
        self._lock = threading.Lock()

    def of(self, device: str) -> Copier:
        """Return the copier for pages on this device, as torch names it. The first call for a GPU is slow.

        Raises:
            LayoutError: No copier supports such a device.
            ConfigError: There is no such GPU, or CuPy is missing.
        """
        kind, _, number = device.partition(":")
        if kind == "cpu":
            return self._cpu
        if kind != "cuda" or not (number or "0").isdigit():
            raise LayoutError(f"pages on {device}: expected cpu or cuda:N")
        index = int(number or 0)
        known = list[memoryview]()
        with self._lock:
            if index not in self._devices:
                self._devices[index] = self._make(index)
                known = list(self._memory.values())
            copier = self._devices[index]
        for memory in known:
            self._pin_later(index, memory)
        return copier

    def add_region(self, memory: memoryview) -> None:
        """Register memory that copies use."""
        with self._lock:
            self._memory[id(memory)] = memory
            devices = list(self._devices)
        for index in devices:
            self._pin_later(index, memory)

    def remove_region(self, memory: memoryview) -> None:
        """Unregister memory. No copy may use it any more."""
        with self._lock:
            self._memory.pop(id(memory), None)
            pinned = bool(self._devices)
        if pinned:
            self._background(lambda: self._unpin(memory))

    def _pin_later(self, index: int, memory: memoryview) -> None:
        self._background(lambda: self._pin(index, id(memory)))

    def _pin(self, index: int, identity: int) -> None:
        with self._lock:
            memory, copier = self._memory.get(identity), self._devices.get(index)
        if memory is None or copier is None or (index, identity) in self._pinned:
            return
        try:
            copier.pinned.add(memory)
        except KVCacheError as error:
            if not self._logged_devices:
                _log.warning("%s; copies are slower", error)
            self._logged_devices = True
        else:
            self._pinned.add((index, identity))

    def _unpin(self, memory: memoryview) -> None:
        for index, identity in [pair for pair in self._pinned if pair[1] == id(memory)]:
            self._pinned.discard((index, identity))
            self._devices[index].pinned.remove(memory)

    def close(self) -> None:
        """Wait for running copies, then unpin. Call it after the last background call."""
        with self._lock:
            devices, self._devices = self._devices, {}
        for copier in devices.values():
            copier.close()

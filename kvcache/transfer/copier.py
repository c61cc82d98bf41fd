"""The contract of a copier: between an engine's pages and block bytes, in the layout's order."""

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
    """Something to wait for. After it is done the pages (gather) or the buffers (scatter) may change again."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Until this layer, counted within the shard, of every block has been copied."""


class Copier(Protocol):
    """Moves whole blocks. `buffers[i]` is the payload of one block, contiguous, of the layout's size for that shard;
    `page_ids[i]` the page that holds the block. Pages and buffers belong to the caller.

    `after` is a mark: what the engine had put to its device before it was made comes before the copy. Without one that
    is what it had put there before the call.
    """

    def mark(self) -> Any:
        """Where the engine is now; to be called on the thread by which it gives its device work."""

    def gather(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: Any = None
    ) -> CopyHandle:
        """Pages to buffers."""

    def scatter(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: Any = None
    ) -> CopyHandle:
        """Buffers to pages."""


# The copier of each device that an engine's pages lie on, made when it is first asked for, and the host memory that
# copies go to and come from: pinned for every GPU that is in use, in the background. Until a piece of memory is
# pinned, or where the system does not allow it, copies go by way of the driver's own buffers, at a part of the speed.

_log = logging.getLogger("kvcache.transfer")


class PinnedMemory(Protocol):
    """As `PinnedRegions`."""

    def add(self, memory: memoryview) -> None: ...
    def remove(self, memory: memoryview) -> None: ...


class DeviceCopier(Copier, Protocol):
    """A copier of a device that has memory of its own, as `CudaCopier`."""

    @property
    def pinned(self) -> PinnedMemory: ...
    def close(self) -> None: ...


def cuda_copier(index: int) -> DeviceCopier:
    from kvcache.transfer.cuda.copier import CudaCopier

    return CudaCopier(index, compute_stream=lambda: current_stream(index))


def current_stream(index: int) -> int:
    """The stream on which torch works for this thread; the default stream where torch is not, or not on a GPU."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return int(torch.cuda.current_stream(index).cuda_stream)


class CopierRegistry:
    """Thread-safe. `background` runs a call later, in order with the others; `make` makes the copier of a GPU."""

    def __init__(
        self,
        background: Callable[[Callable[[], None]], Any],
        *,
        threads: int = 2,
        make: Callable[[int], DeviceCopier] = cuda_copier,
    ) -> None:
        self._cpu, self._make, self._background = CpuCopier(threads), make, background
        self._devices: dict[int, DeviceCopier] = {}
        self._memory: dict[int, memoryview] = {}  # by identity, all that copies may go to
        self._pinned: set[tuple[int, int]] = set()  # device, memory; touched in the background alone
        self._logged_devices = False
        self._lock = threading.Lock()

    def of(self, device: str) -> Copier:
        """The copier for pages on this device, as torch names it. LayoutError where there is none for such a device,
        ConfigError where there is no GPU or nothing to reach it by. The first call for a GPU takes a while."""
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
        """Copies may go to this memory and come from it."""
        with self._lock:
            self._memory[id(memory)] = memory
            devices = list(self._devices)
        for index in devices:
            self._pin_later(index, memory)

    def remove_region(self, memory: memoryview) -> None:
        """No copy goes there any more, and none is under way."""
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
                _log.warning("%s; copies work all the same, slower", error)
            self._logged_devices = True
        else:
            self._pinned.add((index, identity))

    def _unpin(self, memory: memoryview) -> None:
        for index, identity in [pair for pair in self._pinned if pair[1] == id(memory)]:
            self._pinned.discard((index, identity))
            self._devices[index].pinned.remove(memory)

    def close(self) -> None:
        """Wait for copies under way, and unpin; once nothing runs in the background any more."""
        with self._lock:
            devices, self._devices = self._devices, {}
        for copier in devices.values():
            copier.close()

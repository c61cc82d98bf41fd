"""Pinned host memory: regions that a GPU can access, and the device addresses within them.

Pinning locks every memory page of a region, which is slow. Whole regions (slabs of the arena) are therefore pinned
when they are mapped, and never for one copy. A region keeps its memory alive until it is unpinned.
"""

from __future__ import annotations

import resource
import threading
from bisect import bisect_right
from dataclasses import dataclass, field

import numpy as np

from kvcache.errors import StoreError
from kvcache.settings.types import show_bytes
from kvcache.transfer.cuda.device import Device


def address_of(memory: memoryview) -> int:
    """Return the address of a contiguous buffer's first byte."""
    return int(np.frombuffer(memory, np.uint8).__array_interface__["data"][0])


@dataclass(frozen=True, slots=True)
class _Region:
    address: int
    size_bytes: int
    device_address: int
    memory: memoryview = field(repr=False)


class PinnedRegions:
    """The pinned regions of one device.

    Thread safety: any thread may call it; one lock guards the list of regions.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        _raise_limit()
        self._regions: list[_Region] = []  # by address
        self._lock = threading.Lock()

    def add(self, memory: memoryview) -> None:
        """Pin a region. A read-only region serves only loads.

        Raises:
            StoreError: The system does not allow it. Copies still work through the driver's buffers, at a part of the
                speed.
        """
        address, size = address_of(memory), memory.nbytes
        try:
            device_address = self._device.register(address, size, read_only=memory.readonly)
        except OSError as error:
            raise StoreError(
                f"{show_bytes(size)} of host memory cannot be pinned for {self._device.name}: {error}; {_limit(size)}"
            ) from error
        region = _Region(address, size, device_address, memory)
        with self._lock:
            self._regions.insert(bisect_right(self._regions, address, key=lambda r: r.address), region)

    def remove(self, memory: memoryview) -> None:
        """Unpin a region. No running copy may use it."""
        address = address_of(memory)
        with self._lock:
            region = next(r for r in self._regions if r.address == address)
            self._regions.remove(region)
        self._device.unregister(address)

    def find(self, address: int, size_bytes: int) -> int | None:
        """Return the device address of these host bytes; None where one region does not hold them all."""
        with self._lock:
            i = bisect_right(self._regions, address, key=lambda r: r.address) - 1
            if i < 0:
                return None
            region = self._regions[i]
        if address + size_bytes > region.address + region.size_bytes:
            return None
        return region.device_address + address - region.address

    def close(self) -> None:
        for region in list(self._regions):
            self.remove(region.memory)


def _raise_limit() -> None:
    """Raise the soft limit of locked memory to the hard limit, which needs no privilege."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (hard, hard))


def _limit(size_bytes: int) -> str:
    """Return the advice for an error text, by this process's limit of locked memory."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or limit >= size_bytes:
        return "the locked-memory limit allows it: check the free memory, or give less host.capacity_bytes"
    return (
        f"the locked-memory limit is {show_bytes(limit)}: raise it (`ulimit -l unlimited`, LimitMEMLOCK=infinity of a "
        "systemd unit, --ulimit memlock=-1 of a container)"
    )

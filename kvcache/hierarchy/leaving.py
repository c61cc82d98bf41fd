"""Records on their way down whose host slots were given back: copies in bounded memory that is used again."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcache.block.record import Address, record_bytes
from kvcache.tier.host.arena import Extent, Region, Slot
from kvcache.tier.host.tier import Held

MOST_BYTES = 64 << 20


class Leaving:
    """By name, what left host and is not written yet. Thread-safe."""

    def __init__(self, most_bytes: int = MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._copies: dict[bytes, Held] = {}
        self._free: list[Region] = []  # fresh memory costs more than the copy: what was used is kept
        self._taken_bytes = 0  # of copies and free regions
        self._lock = threading.Lock()

    def take(self, held: Held) -> bool:
        """Copy a record, of which the caller has a reference. False where there is no room for it."""
        size = record_bytes(held.payload_bytes)
        with self._lock:
            if held.address.name in self._copies:
                return True
            region = self._region(size)
            if region is None:
                return False
            slot = Slot(Extent(region, size, held.slot.extent.tenant), 0)
            slot.view[:] = held.slot.view[:size]
            slot.sealed, slot.expires_ms = held.slot.sealed, held.slot.expires_ms
            self._copies[held.address.name] = Held(held.address, slot, held.payload_bytes)
            return True

    def find(self, address: Address) -> Held | None:
        return self._copies.get(address.name)

    def give_back(self, addresses: Sequence[Address]) -> None:
        """Forget those that are here."""
        with self._lock:
            found = (self._copies.pop(address.name, None) for address in addresses)
            self._free += [held.slot.extent.region for held in found if held is not None]

    def wipe(self) -> None:
        """Overwrite what those that left have left behind."""
        with self._lock:
            for region in self._free:
                region.view[:] = bytes(region.bytes)

    def _region(self, size: int) -> Region | None:
        at = next((i for i, region in enumerate(self._free) if region.bytes == size), None)
        if at is not None:
            return self._free.pop(at)
        while self._free and self._taken_bytes + size > self._most_bytes:
            self._taken_bytes -= self._free.pop().bytes
        if self._taken_bytes + size > self._most_bytes:
            return None
        self._taken_bytes += size
        return Region(size)

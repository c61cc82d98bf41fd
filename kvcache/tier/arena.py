"""The host tier's memory: extents of one slot size and one tenant each, slots with generations.

An extent is mapped when it is first needed and unmapped when its last slot comes back, so that no model and no tenant
holds memory that it does not use. A slot is given out once at a time; its generation changes when it is given out
again, so that a reader which looked before and after its copy knows whether it read what it meant to.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

PAGE = 4096


class Extent:
    """A piece of the arena: `count` slots of `slot_bytes`, page-aligned."""

    def __init__(self, slot_bytes: int, count: int, tenant: str) -> None:
        self.slot_bytes, self.count, self.tenant = slot_bytes, count, tenant
        self._memory = mmap.mmap(-1, slot_bytes * count)
        self.view = memoryview(self._memory)
        self.free = list(range(count - 1, -1, -1))
        self.generations = [0] * count
        self.slots: dict[int, Slot] = {}  # given out

    @property
    def bytes(self) -> int:
        return self.slot_bytes * self.count


class Slot:
    """Room for one record: its header area, then its payload padded to whole pages.

    Counts references: who reads or writes it has one, and so does the tier while the record is published. When the
    last one is released the slot goes back to its extent.
    """

    __slots__ = ("extent", "generation", "i", "references", "sealed")

    def __init__(self, extent: Extent, i: int) -> None:
        self.extent, self.i = extent, i
        self.generation = extent.generations[i]
        self.references = 1
        self.sealed = False  # the header is written and the checksums are taken

    @property
    def view(self) -> memoryview:
        """All of the slot. Valid while the caller has a reference."""
        size = self.extent.slot_bytes
        return self.extent.view[self.i * size : (self.i + 1) * size]


class Arena:
    """Gives out slots within `capacity_bytes`. Thread-safe."""

    def __init__(self, capacity_bytes: int, extent_bytes: int) -> None:
        self.capacity_bytes, self.extent_bytes = capacity_bytes, extent_bytes
        self.mapped_bytes = 0
        self.used_bytes = 0
        self._extents: dict[tuple[int, str], list[Extent]] = {}
        self._lock = threading.Lock()

    def allocate(self, slot_bytes: int, tenant: str) -> Slot | None:
        """A slot with one reference, or None where there is no room."""
        with self._lock:
            extents = self._extents.setdefault((slot_bytes, tenant), [])
            # the fullest last: new slots fill it, so that the emptier ones can empty
            extent = next((e for e in reversed(extents) if e.free), None) or self._map(slot_bytes, tenant)
            if extent is None:
                return None
            i = extent.free.pop()
            slot = extent.slots[i] = Slot(extent, i)
            self.used_bytes += slot_bytes
            return slot

    def _map(self, slot_bytes: int, tenant: str) -> Extent | None:
        room = self.capacity_bytes - self.mapped_bytes
        count = min(max(self.extent_bytes, slot_bytes), room) // slot_bytes
        if count < 1:
            return None
        try:
            extent = Extent(slot_bytes, count, tenant)
        except OSError:  # the machine has less than the setting says: no room, which the caller counts
            return None
        self.mapped_bytes += extent.bytes
        self._extents[slot_bytes, tenant].append(extent)
        return extent

    def room(self, slot_bytes: int) -> int:
        """How many more slots of this size can be given out, for the tenant that has most of them free."""
        with self._lock:
            free = max(
                (
                    sum(len(e.free) for e in extents)
                    for (size, _), extents in self._extents.items()
                    if size == slot_bytes
                ),
                default=0,
            )
            return free + (self.capacity_bytes - self.mapped_bytes) // slot_bytes

    def acquire(self, slot: Slot) -> None:
        with self._lock:
            slot.references += 1

    def release(self, slot: Slot) -> None:
        with self._lock:
            slot.references -= 1
            if slot.references:
                return
            extent = slot.extent
            extent.generations[slot.i] += 1
            extent.free.append(slot.i)
            del extent.slots[slot.i]
            self.used_bytes -= extent.slot_bytes
            if not extent.slots:
                self._extents[extent.slot_bytes, extent.tenant].remove(extent)
                self.mapped_bytes -= extent.bytes

    def extents(self) -> Iterator[Extent]:
        for extents in list(self._extents.values()):
            yield from list(extents)

    def check(self) -> list[str]:
        faults = []
        with self._lock:
            mapped = used = 0
            for (size, tenant), extents in self._extents.items():
                for e in extents:
                    mapped, used = mapped + e.bytes, used + len(e.slots) * size
                    if sorted([*e.free, *e.slots]) != list(range(e.count)):
                        faults.append(f"arena: an extent of {tenant!r} lost or doubled slots of {size} bytes")
                    faults += [f"arena: slot {i} has no reference" for i, s in e.slots.items() if s.references < 1]
            if (mapped, used) != (self.mapped_bytes, self.used_bytes):
                faults.append(f"arena: counts {self.mapped_bytes}, {self.used_bytes} bytes, {mapped}, {used} are there")
            if mapped > self.capacity_bytes:
                faults.append(f"arena: {mapped} bytes mapped of at most {self.capacity_bytes}")
        return faults

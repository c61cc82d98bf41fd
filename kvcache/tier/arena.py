"""The host tier's memory: extents of one slot size and one tenant each, slots with generations.

An extent is made when it is first needed and given back when its last slot comes back, so that no model and no tenant
holds memory that it does not use. A slot is given out once at a time; its generation changes when it is given out
again, so that a reader which looked before and after its copy knows whether it read what it meant to.

The first touch of fresh memory costs the system a fault a page, two seconds a GiB on a virtual machine where a copy
takes a tenth of that. So one region is kept ahead, touched in the background, and an emptied one is kept to be cut
anew.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator

from kvcache import native
from kvcache.port import Executor

PAGE = 4096
POPULATE = 23  # MADV_POPULATE_WRITE of Linux 5.14, newer than Python's names for it
STEP_BYTES = 1 << 20


class Region:
    """Page-aligned memory of this process."""

    def __init__(self, size_bytes: int) -> None:
        self.bytes = size_bytes
        self._memory = mmap.mmap(-1, size_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self._memory)

    def touch(self) -> None:
        """Have the system find the memory now. Changes nothing in it; where the system cannot, nothing happens."""
        if native.available():
            native.core.populate(self.view)
            return
        try:
            for at in range(0, self.bytes, STEP_BYTES):  # in steps: the interpreter lock is held meanwhile
                self._memory.madvise(POPULATE, at, min(STEP_BYTES, self.bytes - at))
        except (AttributeError, OSError):
            return


class Extent:
    """A piece of the arena: `count` slots of `slot_bytes` in one region."""

    def __init__(self, region: Region, slot_bytes: int, tenant: str) -> None:
        self.region, self.slot_bytes, self.tenant = region, slot_bytes, tenant
        self.count = count = region.bytes // slot_bytes
        self.view = region.view
        self.free = list(range(count - 1, -1, -1))
        self.generations = [0] * count
        self.slots: dict[int, Slot] = {}  # given out


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

    def __init__(self, capacity_bytes: int, extent_bytes: int, executor: Executor) -> None:
        self.capacity_bytes, self.extent_bytes = capacity_bytes, min(extent_bytes, capacity_bytes)
        self.mapped_bytes = 0  # of extents
        self._spare: Region | None = None  # ahead of need; its bytes are within the capacity
        self._executor = executor
        self.used_bytes = 0
        self._extents: dict[tuple[int, str], list[Extent]] = {}
        self._lock = threading.Lock()

    def allocate(self, slot_bytes: int, tenant: str) -> Slot | None:
        """A slot with one reference, or None where there is no room."""
        with self._lock:
            extents = self._extents.setdefault((slot_bytes, tenant), [])
            # the fullest last: new slots fill it, so that the emptier ones can empty
            extent = next((e for e in reversed(extents) if e.free), None)
            fresh = extent is None
            extent = extent or self._map(slot_bytes, tenant)
            if extent is None:
                return None
            i = extent.free.pop()
            slot = extent.slots[i] = Slot(extent, i)
            self.used_bytes += slot_bytes
        if fresh:
            self._executor.submit(self.prepare)
        return slot

    def _map(self, slot_bytes: int, tenant: str) -> Extent | None:
        size = min(max(self.extent_bytes, slot_bytes), self.capacity_bytes - self.mapped_bytes)
        if size < slot_bytes:
            return None
        region, self._spare = self._spare, None
        if region is None or region.bytes != size:
            try:
                region = Region(size)
            except OSError:  # the machine has less than the setting says: no room, which the caller counts
                return None
        extent = Extent(region, slot_bytes, tenant)
        self.mapped_bytes += region.bytes
        self._extents[slot_bytes, tenant].append(extent)
        return extent

    def prepare(self) -> None:
        """Have the next region ready, if there is room for one."""
        with self._lock:
            size = min(self.extent_bytes, self.capacity_bytes - self.mapped_bytes)
            if self._spare is not None or size < PAGE:
                return
        try:
            region = Region(size)
        except OSError:  # it will be tried again when it is needed
            return
        with self._lock:
            if self._spare is not None or size > self.capacity_bytes - self.mapped_bytes:
                return
            self._spare = region
        region.touch()  # from its front, where slots are given out first: it may be in use already

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
                self.mapped_bytes -= extent.region.bytes
                if extent.region.bytes == self.extent_bytes:
                    self._spare = extent.region

    def extents(self) -> Iterator[Extent]:
        for extents in list(self._extents.values()):
            yield from list(extents)

    def check(self) -> list[str]:
        faults = []
        with self._lock:
            mapped = used = 0
            for (size, tenant), extents in self._extents.items():
                for e in extents:
                    mapped, used = mapped + e.region.bytes, used + len(e.slots) * size
                    if sorted([*e.free, *e.slots]) != list(range(e.count)):
                        faults.append(f"arena: an extent of {tenant!r} lost or doubled slots of {size} bytes")
                    faults += [f"arena: slot {i} has no reference" for i, s in e.slots.items() if s.references < 1]
            if (mapped, used) != (self.mapped_bytes, self.used_bytes):
                faults.append(f"arena: counts {self.mapped_bytes}, {self.used_bytes} bytes, {mapped}, {used} are there")
            if mapped > self.capacity_bytes:
                faults.append(f"arena: {mapped} bytes mapped of at most {self.capacity_bytes}")
        return faults

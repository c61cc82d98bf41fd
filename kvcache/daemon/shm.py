"""The daemon's slabs, as a client maps them: leased slots, and their generations."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvcache import native
from kvcache.daemon.protocol import LEASE_DTYPE, ProtocolError
from kvcache.tier.host.arena import POPULATE_READ, POPULATE_WRITE, table_bytes, touch
from kvcache.transfer.copier import CopierRegistry

MAX_SLAB_BYTES = 1 << 40
"""Most bytes of one slab, a check of what a daemon sends."""


class SlabMapping:
    """One mapped slab. Its memory is unmapped when the last object that uses it is freed; a copy keeps a slot of it."""

    def __init__(self, descriptor: int, slot_bytes: int, size_bytes: int, *, writable: bool) -> None:
        total = os.fstat(descriptor).st_size  # whole pages, perhaps huge pages
        if not 0 < slot_bytes <= size_bytes <= MAX_SLAB_BYTES or total < size_bytes + table_bytes(size_bytes):
            raise ProtocolError(f"an extent of {size_bytes} bytes in slots of {slot_bytes}: its file has another size")
        self.writable, self.slot_bytes, self.count = writable, slot_bytes, size_bytes // slot_bytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._memory = mmap.mmap(descriptor, total, flags=mmap.MAP_SHARED, prot=access)
        if hasattr(mmap, "MADV_DONTFORK"):  # a forked child that outlives this process must not write to leased slots
            self._memory.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self._memory)[:size_bytes]
        self.generations: NDArray[np.uint64] = np.frombuffer(self._memory, "<u8", self.count, size_bytes)

    def touch(self) -> None:
        """Fault every page in, because a first touch costs more than a copy."""
        if self.writable and native.available():
            native.core.populate(self.view)
        else:
            touch(self._memory, POPULATE_WRITE if self.writable else POPULATE_READ)


@dataclass(frozen=True, slots=True)
class LeasedSlot:
    mapping: SlabMapping
    i: int

    @property
    def view(self) -> memoryview:
        size = self.mapping.slot_bytes
        return self.mapping.view[self.i * size : (self.i + 1) * size]


@dataclass(frozen=True, slots=True)
class LeasedBatch:
    """Slots that the daemon leased in one message."""

    parts: Sequence[tuple[int, int, LeasedSlot]]  # block, group, slot
    generations: NDArray[np.uint64]

    @property
    def first(self) -> int:
        return min(block for block, _, _ in self.parts)

    def unchanged(self) -> NDArray[np.bool_]:
        """Return, by part, whether the slot's generation is still the leased one."""
        words = [slot.mapping.generations[slot.i] for _, _, slot in self.parts]
        same: NDArray[np.bool_] = np.array(words, np.uint64) == self.generations
        return same


class SlabMappings:
    """The slabs that one client session has mapped. Thread-safe."""

    def __init__(self, copiers: CopierRegistry, background: Callable[[Callable[[], None]], object]) -> None:
        self._copiers, self._background = copiers, background
        self._by_number: dict[int, SlabMapping] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def numbers(self) -> list[int]:
        """Numbers of the mapped slabs."""
        return list(self._by_number)

    def map_slabs(self, slabs: Sequence[Sequence[int]], descriptors: Sequence[int], gone: Sequence[int]) -> None:
        """Map new slabs, and drop removed ones. Closes the descriptors."""
        try:
            if len(slabs) != len(descriptors):
                raise ProtocolError(f"{len(slabs)} extents with {len(descriptors)} descriptors")
            for (number, slot_bytes, size_bytes, writable), descriptor in zip(slabs, descriptors, strict=True):
                with self._lock:
                    mapped = self._by_number.get(number)
                    if mapped is None or (writable and not mapped.writable):
                        made = SlabMapping(descriptor, slot_bytes, size_bytes, writable=bool(writable))
                        self._by_number[number] = made
                        self._background(made.touch)
                        self._copiers.add_region(made.view)
                        weakref.finalize(made, self._copiers.remove_region, made.view).atexit = False
            with self._lock:
                for number in gone:
                    self._by_number.pop(number, None)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"invalid extents: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def parse_leases(self, packed: bytes, *, blocks: int, groups: int) -> LeasedBatch:
        """Return the slots of a message; ProtocolError where they are not part of a transfer of `blocks` blocks."""
        if not packed or len(packed) % LEASE_DTYPE.itemsize:
            raise ProtocolError(f"{len(packed)} bytes of leased slots: expected a multiple of {LEASE_DTYPE.itemsize}")
        rows = np.frombuffer(packed, LEASE_DTYPE)
        if rows["block"].max() >= blocks or rows["group"].max() >= groups:
            raise ProtocolError(f"leased slots for blocks that were not requested; requested: {blocks}")
        parts = []
        with self._lock:
            for block, group, _, slab, i, _ in rows.tolist():
                mapping = self._by_number.get(slab)
                if mapping is None or i >= mapping.count:
                    raise ProtocolError(f"slot {i} of extent {slab}: the daemon did not announce it")
                parts.append((block, group, LeasedSlot(mapping, i)))
        return LeasedBatch(parts, rows["generation"])

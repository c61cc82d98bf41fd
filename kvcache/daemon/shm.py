"""The daemon's memory as a client sees it: extents mapped, slots in them, generations compared."""

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
"""Of one extent: what a daemon says is checked like anything else."""


class SlabMapping:
    """One extent. Its memory is unmapped when nobody uses it any more: who copies has a slot of it until then."""

    def __init__(self, descriptor: int, slot_bytes: int, size_bytes: int, *, writable: bool) -> None:
        total = os.fstat(descriptor).st_size  # whole pages, which may be huge ones
        if not 0 < slot_bytes <= size_bytes <= MAX_SLAB_BYTES or total < size_bytes + table_bytes(size_bytes):
            raise ProtocolError(f"an extent of {size_bytes} bytes in slots of {slot_bytes}: its file is another")
        self.writable, self.slot_bytes, self.count = writable, slot_bytes, size_bytes // slot_bytes
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._memory = mmap.mmap(descriptor, total, flags=mmap.MAP_SHARED, prot=access)
        if hasattr(mmap, "MADV_DONTFORK"):  # a child that outlives us must not write to what was lent to us
            self._memory.madvise(mmap.MADV_DONTFORK)
        self.view = memoryview(self._memory)[:size_bytes]
        self.generations: NDArray[np.uint64] = np.frombuffer(self._memory, "<u8", self.count, size_bytes)

    def touch(self) -> None:
        """Have the system map all of it: a first touch costs more than the copy of what is there."""
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
    """Slots that the daemon lent."""

    parts: Sequence[tuple[int, int, LeasedSlot]]  # block, group, slot
    generations: NDArray[np.uint64]

    @property
    def first(self) -> int:
        return min(block for block, _, _ in self.parts)

    def unchanged(self) -> NDArray[np.bool_]:
        """By part, whether its slot is still the one that was lent."""
        words = [slot.mapping.generations[slot.i] for _, _, slot in self.parts]
        same: NDArray[np.bool_] = np.array(words, np.uint64) == self.generations
        return same


class SlabMappings:
    """Of one session. Thread-safe."""

    def __init__(self, copiers: CopierRegistry, background: Callable[[Callable[[], None]], object]) -> None:
        self._copiers, self._background = copiers, background
        self._by_number: dict[int, SlabMapping] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def numbers(self) -> list[int]:
        """Of the extents that are mapped."""
        return list(self._by_number)

    def map_slabs(self, slabs: Sequence[Sequence[int]], descriptors: Sequence[int], gone: Sequence[int]) -> None:
        """Map what is new, let go of what is no more. Closes the descriptors."""
        try:
            if len(slabs) != len(descriptors):
                raise ProtocolError(f"{len(slabs)} extents with {len(descriptors)} descriptors")
            for (number, slot_bytes, size_bytes, writable), descriptor in zip(slabs, descriptors, strict=True):
                with self._lock:
                    there = self._by_number.get(number)
                    if there is None or (writable and not there.writable):
                        made = SlabMapping(descriptor, slot_bytes, size_bytes, writable=bool(writable))
                        self._by_number[number] = made
                        self._background(made.touch)
                        self._copiers.add_region(made.view)
                        weakref.finalize(made, self._copiers.remove_region, made.view).atexit = False
            with self._lock:
                for number in gone:
                    self._by_number.pop(number, None)
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"extents that make no sense: {error}") from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def parse_leases(self, packed: bytes, *, blocks: int, groups: int) -> LeasedBatch:
        """What a message lends, of a transfer of so many blocks; ProtocolError where it is no part of that."""
        if not packed or len(packed) % LEASE_DTYPE.itemsize:
            raise ProtocolError(f"{len(packed)} bytes of lent slots: expected a multiple of {LEASE_DTYPE.itemsize}")
        rows = np.frombuffer(packed, LEASE_DTYPE)
        if rows["block"].max() >= blocks or rows["group"].max() >= groups:
            raise ProtocolError(f"slots are lent for blocks that were not asked for: {blocks} were")
        parts = []
        with self._lock:
            for block, group, _, slab, i, _ in rows.tolist():
                mapping = self._by_number.get(slab)
                if mapping is None or i >= mapping.count:
                    raise ProtocolError(f"slot {i} of extent {slab}: not one that was told of")
                parts.append((block, group, LeasedSlot(mapping, i)))
        return LeasedBatch(parts, rows["generation"])

"""The arena: the memory of the host tier, in slabs of one slot size and one tenant each.

A slab is created when it is first needed and returned when its last slot is released. So no model and no tenant keeps
memory that it does not use. A slab class is a slot size and a tenant. Where the free slots of a class's other slabs can
hold one slab's records, that slab can be evacuated (`find_evacuable`) and serve another class.

A slot has one owner at a time. Its generation changes before it is allocated again. So a reader that compares the
generation before and after its copy knows whether it copied the intended record.

The first touch of fresh memory costs a page fault a page: two seconds a GiB on a virtual machine where a copy takes a
tenth of that. So the arena prepares one spare region in the background, and keeps an emptied one as the spare.

Thread safety: all methods of `Arena` may be called from any thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import threading
import weakref
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from kvcache import native
from kvcache.os_env import Executor

# Regions: host memory to cut into slots, followed by a word for each slot's generation. A shared region is a file in
# memory that other processes map. Its size is sealed, so that no reader is killed by a fault. Its memory is returned to
# the system by punching a hole; then every generation reads zero, a value that no slot has.

PAGE_BYTES = 4096
MIN_SLOT_BYTES = PAGE_BYTES
WORD_BYTES = 8
TOUCH_STEP_BYTES = 1 << 20
POPULATE_READ, POPULATE_WRITE = 22, 23  # of madvise, Linux 5.14: newer than Python's names for them
_HUGE_BYTES = 2 << 20
_MAX_GENERATION = (1 << 64) - 1
_PUNCH_AND_KEEP_SIZE = 3  # of fallocate
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Region:
    """Page-aligned memory of `size_bytes`.

    Raises:
        OSError: the system has no memory left.
    """

    def __init__(self, size_bytes: int, *, shared: bool = False, inherited: int | None = None) -> None:
        """Map the region.

        Args:
            shared: other processes may map it.
            inherited: the descriptor of a region of this size that an earlier process created. The new region owns it,
                and is shared.

        Raises:
            ValueError: `inherited` is no such file.
        """
        self.bytes = size_bytes
        table = table_bytes(size_bytes)
        self.descriptor: int | None = None
        self.is_exported = inherited is not None
        """Other processes may map the region: its contents must not reach another tenant."""
        self._words: memoryview | None = None  # where other processes read generations
        if shared or inherited is not None:
            size = size_bytes + table
            self.descriptor, self._memory = _create_file(size) if inherited is None else _adopt_file(inherited, size)
            weakref.finalize(self, os.close, self.descriptor)
            self._words = memoryview(self._memory)[size_bytes : size_bytes + table].cast("Q")
        else:
            # Python's default, shared memory, never gets huge pages, with which a drive moves twice the bytes a second
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # a forked child's copy would be the whole region, at its first write
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                with suppress(OSError):
                    self._memory.madvise(getattr(mmap, advice))
        self.view = memoryview(self._memory)[:size_bytes]
        self.generations = array("Q", bytes(table))
        """By slot; zero in slots that were never cut. Private, since a process that may write to the memory may change
        the words.
        """

    def renew_generations(self, numbers: Iterable[int]) -> None:
        """Give these slots a new generation, here and for the processes that map the region."""
        generations, words = self.generations, self._words
        for i in numbers:
            generations[i] = generations[i] % _MAX_GENERATION + 1
            if words is not None:
                words[i] = generations[i]

    def restore_generations(self, generations: array[int]) -> None:
        """Set the generations that the earlier process reported, by slot. The words in the file are not trusted."""
        self.generations[: len(generations)] = generations
        if self._words is not None:
            self._words[: len(generations)] = memoryview(generations)

    def touch(self) -> None:
        """Fault in all memory now without changing it; does nothing where the system cannot."""
        if native.available():
            native.core.populate(self.view)
        else:
            touch(self._memory, POPULATE_WRITE)

    @property
    def shared(self) -> bool:
        return self.descriptor is not None

    def export(self, *, writable: bool) -> int:
        """Return a new descriptor for another process; the caller closes it.

        Raises:
            OSError: no descriptor is left.
            ValueError: the region is not shared.
        """
        if self.descriptor is None:
            raise ValueError("the region is private to this process: expected a shared one")
        self.is_exported = True
        if writable:
            return os.dup(self.descriptor)
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def punch_hole(self) -> None:
        """Return the memory to the system now, for every process that maps it. It then reads as zero."""
        if self.descriptor is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(self.descriptor, _PUNCH_AND_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(len(self._memory)))


def table_bytes(size_bytes: int) -> int:
    """Return the size of the generation words, for the largest possible number of slots."""
    return max(PAGE_BYTES, -(-(size_bytes // MIN_SLOT_BYTES * WORD_BYTES) // PAGE_BYTES) * PAGE_BYTES)


def touch(memory: mmap.mmap, advice: int) -> None:
    """Map all of the memory now, step by step, since the interpreter lock is held during each step."""
    with suppress(OSError):
        for at in range(0, len(memory), TOUCH_STEP_BYTES):
            memory.madvise(advice, at, min(TOUCH_STEP_BYTES, len(memory) - at))


def _create_file(size_bytes: int) -> tuple[int, mmap.mmap]:
    """Create a sealed file in memory, of huge pages where enough are free."""
    plain = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    kinds = [plain | os.MFD_HUGETLB, plain] if huge_pages_free() * _HUGE_BYTES >= size_bytes else [plain]
    for flags in kinds:
        descriptor = os.memfd_create("kvcache-extent", flags)
        unit = _HUGE_BYTES if flags & os.MFD_HUGETLB else PAGE_BYTES
        try:
            os.fchmod(descriptor, 0o600)  # otherwise a process that may read it could reopen it for writing
            os.ftruncate(descriptor, -(-size_bytes // unit) * unit)
            memory = mmap.mmap(descriptor, -(-size_bytes // unit) * unit)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError:
            os.close(descriptor)
            if flags == plain:
                raise
        else:
            return descriptor, memory
    raise AssertionError("the last kind returned or raised")


def _adopt_file(descriptor: int, size_bytes: int) -> tuple[int, mmap.mmap]:
    """Map a file that another process created with `_create_file`; closes it where it is none."""
    try:
        found = os.fstat(descriptor)
        if found.st_size < size_bytes or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ValueError(f"a file of {found.st_size} bytes, user {found.st_uid}: expected {size_bytes} of our own")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("the file is not sealed against truncation")
        return descriptor, mmap.mmap(descriptor, found.st_size)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise ValueError(f"invalid extent: {error}") from None


def huge_pages_free() -> int:
    try:
        with open("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


SlabClass = tuple[int, str]
"""Slot size in bytes, and tenant."""

_WIPE_BATCH_BYTES = 16 << 20
"""Bytes that a wipe allocates at a time."""

RegionListener = Callable[[memoryview], None]


def _ignore(memory: memoryview) -> None:
    pass


class Slab:
    """A part of the arena: `count` slots of `slot_bytes` in one region. Its number is never reused."""

    _numbers = itertools.count(1)

    def __init__(self, region: Region, slot_bytes: int, tenant: str, *, inherited: bool = False) -> None:
        """With `inherited`, the slab of another process, with the generations that it reported."""
        self.region, self.slot_bytes, self.tenant = region, slot_bytes, tenant
        self.number = next(self._numbers)
        self.count = count = region.bytes // slot_bytes
        self.view = region.view
        self.free = list(range(count - 1, -1, -1))
        self.generations = region.generations
        region.renew_generations(range(0 if inherited else count))
        self.slots: dict[int, Slot] = {}  # allocated slots, by number
        self.closing = False  # no slot of it is allocated
        self.unmapped = False  # its region has another owner or none

    @property
    def kind(self) -> SlabClass:
        return self.slot_bytes, self.tenant


class Slot:
    """Memory for one record: its header area, then its payload padded to whole pages.

    The slot counts references: one for each reader or writer, and one of the tier while the record is published. The
    last release frees the slot.
    """

    __slots__ = ("expires_ms", "generation", "i", "name", "references", "sealed", "slab")

    def __init__(self, slab: Slab, i: int) -> None:
        self.slab, self.i = slab, i
        self.generation = slab.generations[i]
        self.references = 1
        self.sealed = False  # the header and checksums are written
        self.expires_ms = 0  # expiry of the record, in milliseconds since 1970; 0: never
        self.name = b""  # name of the published record

    @property
    def view(self) -> memoryview:
        """The memory of the slot, valid while the caller holds a reference."""
        size = self.slab.slot_bytes
        return self.slab.view[self.i * size : (self.i + 1) * size]


class Arena:
    """Allocates slots within `capacity_bytes`.

    Thread safety: all methods may be called from any thread.
    """

    def __init__(
        self,
        capacity_bytes: int,
        slab_bytes: int,
        executor: Executor,
        *,
        shared: bool = False,
        quota: Callable[[str], int] | None = None,
    ) -> None:
        """Create an empty arena.

        Args:
            shared: use memory that other processes may map.
            quota: the most bytes of a tenant; all of the arena where None.
        """
        self.shared = shared
        self.capacity_bytes, self.slab_bytes = capacity_bytes, min(slab_bytes, capacity_bytes)
        self.mapped_bytes = 0  # of slabs
        self._spare: Region | None = None  # prepared ahead of need; its bytes are within the capacity
        self._executor = executor
        self.used_bytes = 0
        self._used_by_tenant: dict[str, int] = {}
        self._quota = quota or (lambda tenant: capacity_bytes)
        """Returns the most bytes that a tenant may use."""
        self._slabs: dict[SlabClass, list[Slab]] = {}
        self._open: dict[SlabClass, dict[Slab, None]] = {}  # slabs with a free slot; the last one is filled first
        self._on_added: RegionListener = _ignore
        self._on_removed: RegionListener = _ignore
        self._lock = threading.Lock()

    def watch(self, on_added: RegionListener = _ignore, on_removed: RegionListener = _ignore) -> None:
        """Report each region that is added, the present ones included, and each that is removed.

        The callbacks must not call the arena.
        """
        with self._lock:
            self._on_added, self._on_removed = on_added, on_removed
            for region in self._regions():
                on_added(region.view)

    def _regions(self) -> list[Region]:
        regions = [e.region for slabs in self._slabs.values() for e in slabs]
        return regions if self._spare is None else [*regions, self._spare]

    def allocate(self, slot_bytes: int, tenant: str, *, moving: bool = False) -> Slot | None:
        """Allocate a slot with one reference; None where there is no capacity."""
        taken = self.allocate_many(slot_bytes, tenant, 1, moving=moving)
        return taken[0] if taken else None

    def allocate_many(self, slot_bytes: int, tenant: str, count: int, *, moving: bool = False) -> list[Slot]:
        """Allocate at most `count` slots, each with one reference.

        Args:
            moving: the slots take records of other slots, so the quota does not apply.
        """
        taken: list[Slot] = []
        fresh = False
        with self._lock:
            count = count if moving else min(count, self._spare_bytes(tenant) // slot_bytes)
            while len(taken) < count:
                slab = self._next((slot_bytes, tenant))
                if slab is None:
                    slab = self._map(slot_bytes, tenant)
                    if slab is None:
                        break
                    fresh = True
                self._hand_out(slab, taken, count)
            self._charge(tenant, len(taken) * slot_bytes)
        if fresh:
            self._executor.submit(self.prepare)
        return taken

    def spare_bytes(self, tenant: str) -> int:
        """Bytes that the tenant's quota has left."""
        with self._lock:
            return self._spare_bytes(tenant)

    def _spare_bytes(self, tenant: str) -> int:
        return self._quota(tenant) - self._used_by_tenant.get(tenant, 0)

    def _charge(self, tenant: str, change_bytes: int) -> None:
        self.used_bytes += change_bytes
        used = self._used_by_tenant[tenant] = self._used_by_tenant.get(tenant, 0) + change_bytes
        if not used:
            del self._used_by_tenant[tenant]

    def _next(self, kind: SlabClass) -> Slab | None:
        return next((e for e in reversed(self._open.get(kind, {})) if not e.closing), None)

    def _hand_out(self, slab: Slab, taken: list[Slot], count: int) -> None:
        free = slab.free
        for _ in range(min(len(free), count - len(taken))):
            i = free.pop()
            slot = slab.slots[i] = Slot(slab, i)
            taken.append(slot)
        if not free:
            self._open[slab.kind].pop(slab)

    def _map(self, slot_bytes: int, tenant: str) -> Slab | None:
        size = min(max(self.slab_bytes, slot_bytes), self.capacity_bytes - self.mapped_bytes)
        if size < slot_bytes:
            return None
        region, self._spare = self._spare, None
        if region is None or region.bytes != size:
            if region is not None:
                self._on_removed(region.view)
            try:
                region = Region(size, shared=self.shared)
            except OSError:  # the machine has less memory than the setting; the caller counts it as no capacity
                return None
            self._on_added(region.view)
        slab = Slab(region, slot_bytes, tenant)
        self.mapped_bytes += region.bytes
        self._slabs.setdefault(slab.kind, []).append(slab)
        self._open.setdefault(slab.kind, {})[slab] = None
        return slab

    def adopt(self, slab: Slab, taken: Sequence[int]) -> list[Slot] | None:
        """Add a slab that another process handed over.

        Args:
            taken: the slots that hold records; they are allocated.

        Returns:
            Those slots, each with one reference; None where the capacity does not suffice.
        """
        with self._lock:
            if slab.region.bytes > self.capacity_bytes - self.mapped_bytes or not taken:
                return None
            used = set(taken)
            slab.free = [i for i in range(slab.count - 1, -1, -1) if i not in used]
            slots = [Slot(slab, i) for i in taken]
            slab.slots = {slot.i: slot for slot in slots}
            self.mapped_bytes += slab.region.bytes
            self._charge(slab.tenant, len(slots) * slab.slot_bytes)
            self._slabs.setdefault(slab.kind, []).append(slab)
            if slab.free:
                self._open.setdefault(slab.kind, {})[slab] = None
            else:
                self._open.setdefault(slab.kind, {})
            self._on_added(slab.region.view)
            spare = self._spare
            if spare is not None and spare.bytes > self.capacity_bytes - self.mapped_bytes:
                self._spare = None
                self._on_removed(spare.view)
        return slots

    def prepare(self) -> None:
        """Create the spare region, if the capacity allows one."""
        with self._lock:
            size = min(self.slab_bytes, self.capacity_bytes - self.mapped_bytes)
            if self._spare is not None or size < PAGE_BYTES:
                return
        try:
            region = Region(size, shared=self.shared)
        except OSError:  # tried again when it is needed
            return
        with self._lock:
            if self._spare is not None or size > self.capacity_bytes - self.mapped_bytes:
                return
            self._spare = region
            self._on_added(region.view)
        region.touch()  # from its start, where slots are allocated first: it may be in use already

    def free_slots(self, slot_bytes: int) -> int:
        """Return how many more slots of this size can be allocated, for the tenant with the most of them free."""
        with self._lock:
            free = max(
                (sum(len(e.free) for e in slabs) for (size, _), slabs in self._slabs.items() if size == slot_bytes),
                default=0,
            )
            return free + (self.capacity_bytes - self.mapped_bytes) // slot_bytes

    def acquire(self, *slots: Slot) -> None:
        with self._lock:
            for slot in slots:
                slot.references += 1

    def release(self, *slots: Slot) -> None:
        back: defaultdict[Slab, list[int]] = defaultdict(list)
        with self._lock:
            for slot in slots:
                slot.references -= 1
                if not slot.references:
                    back[slot.slab].append(slot.i)
            for slab, numbers in back.items():
                self._return_slots(slab, numbers)

    def _return_slots(self, slab: Slab, numbers: Sequence[int]) -> None:
        slab.region.renew_generations(numbers)
        slab.free += numbers
        for i in numbers:
            del slab.slots[i]
        self._charge(slab.tenant, -slab.slot_bytes * len(numbers))
        if slab.slots:
            self._open[slab.kind][slab] = None
            return
        slabs = self._slabs[slab.kind]
        slabs.remove(slab)
        self._open[slab.kind].pop(slab, None)
        slab.unmapped = True
        if not slabs:
            del self._slabs[slab.kind], self._open[slab.kind]
        self.mapped_bytes -= slab.region.bytes
        freed: Region | None = slab.region
        if slab.region.is_exported:
            slab.region.punch_hole()
        elif slab.region.bytes == self.slab_bytes:
            freed, self._spare = self._spare, slab.region
        if freed is not None:
            self._on_removed(freed.view)

    def wipe(self) -> None:
        """Overwrite every slot that is free now. Slots in use are not touched."""
        for slab in self.slabs():
            done: set[int] = set()
            while slots := self._acquire_free(slab, done):
                for slot in slots:
                    slot.view[:] = bytes(slab.slot_bytes)
                done.update(slot.i for slot in slots)
                self.release(*slots)
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None:
            spare.view[:] = bytes(spare.bytes)
            with self._lock:
                if self._spare is None and spare.bytes <= self.capacity_bytes - self.mapped_bytes:
                    self._spare, spare = spare, None
            if spare is not None:
                self._on_removed(spare.view)

    def _acquire_free(self, slab: Slab, done: set[int]) -> list[Slot]:
        """Allocate some free slots of a slab that are not in `done`, each with one reference."""
        with self._lock:
            found = [i for i in slab.free if i not in done][: max(1, _WIPE_BATCH_BYTES // slab.slot_bytes)]
            if slab.unmapped or not found:
                return []
            taken = set(found)
            slab.free[:] = [i for i in slab.free if i not in taken]
            slots = [Slot(slab, i) for i in found]
            slab.slots.update((slot.i, slot) for slot in slots)
            if not slab.free:
                self._open[slab.kind].pop(slab)
            self._charge(slab.tenant, len(slots) * slab.slot_bytes)
            return slots

    # Slabs of other classes.

    def find_evacuable(self, slot_bytes: int, tenant: str) -> Slab | None:
        """Return the slab of another class that is cheapest to evacuate, None where there is none.

        Its records fit into the free slots of the other slabs of its class, and no request holds a reference to one.
        """
        with self._lock:
            found: list[Slab] = []
            for kind, slabs in self._slabs.items():
                if kind == (slot_bytes, tenant) or len(slabs) < 2:
                    continue
                free = sum(len(e.free) for e in slabs if not e.closing)
                fitting = (e for e in slabs if len(e.slots) <= free - len(e.free) and not e.closing)
                found += [e for e in fitting if all(s.references == 1 and s.name for s in e.slots.values())]
            return min(found, key=lambda e: len(e.slots) * e.slot_bytes, default=None)

    def other_classes(self, slot_bytes: int, tenant: str) -> list[Slab]:
        """Return the slabs of other classes that can hold such a slot, those with the fewest used bytes first."""
        with self._lock:
            other_classes = (e for kind, slabs in self._slabs.items() if kind != (slot_bytes, tenant) for e in slabs)
            fitting = (e for e in other_classes if e.region.bytes >= slot_bytes)
            return sorted(fitting, key=lambda e: len(e.slots) * e.slot_bytes)

    def sample_names(self, slab: Slab, most: int, turn: int) -> list[bytes] | None:
        """Return the names of at most `most` records of a slab, evenly spaced; another `turn` selects others.

        Returns:
            None where one of the slots is being read or written.
        """
        with self._lock:
            step = -(-len(slab.slots) // most) or 1
            slots = list(itertools.islice(slab.slots.values(), turn % step, None, step))
            return [s.name for s in slots] if all(s.references == 1 and s.name for s in slots) else None

    def slabs(self) -> Iterator[Slab]:
        for slabs in list(self._slabs.values()):
            yield from list(slabs)

    def check(self) -> list[str]:
        faults = []
        with self._lock:
            mapped = used = 0
            for (size, tenant), slabs in self._slabs.items():
                for e in slabs:
                    mapped, used = mapped + e.region.bytes, used + len(e.slots) * size
                    if bool(e.free) != (e in self._open[size, tenant]):
                        faults.append(f"arena: an extent of {tenant!r} with {len(e.free)} free slots is misplaced")
                    if sorted([*e.free, *e.slots]) != list(range(e.count)):
                        faults.append(f"arena: an extent of {tenant!r} lost or doubled slots of {size} bytes")
                    faults += [f"arena: slot {i} has no reference" for i, s in e.slots.items() if s.references < 1]
            if sum(self._used_by_tenant.values()) != used:
                faults.append(f"arena: tenants use {self._used_by_tenant}, {used} bytes are in use")
            if (mapped, used) != (self.mapped_bytes, self.used_bytes):
                faults.append(f"arena: counts {self.mapped_bytes}, {self.used_bytes} bytes, {mapped}, {used} are there")
            if mapped > self.capacity_bytes:
                faults.append(f"arena: {mapped} bytes mapped of at most {self.capacity_bytes}")
        return faults

"""The host tier's memory: extents of one slot size and one tenant each, slots with generations.

An extent is made when it is first needed and given back when its last slot comes back, so that no model and no tenant
holds memory that it does not use. Where the free slots of one kind (slot size and tenant) are as many as one of its
extents has in use, that extent can be emptied by moving (`movable`), and serves another kind. A slot is given out once
at a time; its generation changes when it is given out again, so that a reader which looked before and after its copy
knows whether it read what it meant to.

The first touch of fresh memory costs the system a fault a page, two seconds a GiB on a virtual machine where a copy
takes a tenth of that. So one region is kept ahead, touched in the background, and an emptied one is kept to be cut
anew."""

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

# A piece of host memory to cut into slots, with a word for each slot's generation behind it. A shared one is a file
# in memory that other processes map. It can be neither cut short nor grown, so that no reader of it dies of a fault;
# what it held is given back by punching it out, and then every generation reads zero, which none has.

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
    """Page-aligned memory of `size_bytes`; OSError where the system has none to give."""

    def __init__(self, size_bytes: int, *, shared: bool = False, left: int | None = None) -> None:
        """`left`: the file of another process's region of this size, which ended and left it to this one; ours from now
        on, and shared. ValueError where it is none."""
        self.bytes = size_bytes
        table = table_bytes(size_bytes)
        self.descriptor: int | None = None
        self.is_exported = left is not None
        """Other processes may map it: what it held must not meet another tenant in it."""
        self._words: memoryview | None = None  # where other processes look for generations
        if shared or left is not None:
            size = size_bytes + table
            self.descriptor, self._memory = _create_file(size) if left is None else _adopt_file(left, size)
            weakref.finalize(self, os.close, self.descriptor)
            self._words = memoryview(self._memory)[size_bytes : size_bytes + table].cast("Q")
        else:
            # Python's default, shared memory, never gets huge pages, with which a drive moves twice the bytes a second
            self._memory = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child's copy would be all of it, at its first write
            if hasattr(mmap, advice):
                with suppress(OSError):
                    self._memory.madvise(getattr(mmap, advice))
        self.view = memoryview(self._memory)[:size_bytes]
        self.generations = array("Q", bytes(table))
        """By slot; zero in those that were never cut. Ours alone: who may write to the memory may write any there."""

    def renew_generations(self, numbers: Iterable[int]) -> None:
        """Another generation for these slots, here and for those who map them."""
        generations, words = self.generations, self._words
        for i in numbers:
            generations[i] = generations[i] % _MAX_GENERATION + 1
            if words is not None:
                words[i] = generations[i]

    def restore_generations(self, generations: array[int]) -> None:
        """Those of the process that left it, by slot. What the file says is not believed: others may write there."""
        self.generations[: len(generations)] = generations
        if self._words is not None:
            self._words[: len(generations)] = memoryview(generations)

    def touch(self) -> None:
        """Have the system find the memory now. Changes nothing in it; where the system cannot, nothing happens."""
        if native.available():
            native.core.populate(self.view)
        else:
            touch(self._memory, POPULATE_WRITE)

    @property
    def shared(self) -> bool:
        return self.descriptor is not None

    def export(self, *, writable: bool) -> int:
        """A descriptor for another process, which the caller closes. OSError where there are none left."""
        if self.descriptor is None:
            raise ValueError("a region of this process alone: expected a shared one")
        self.is_exported = True
        if writable:
            return os.dup(self.descriptor)
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def punch_hole(self) -> None:
        """Give the memory back to the system now, whoever maps it. What is read from it then is zero."""
        if self.descriptor is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(self.descriptor, _PUNCH_AND_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(len(self._memory)))


def table_bytes(size_bytes: int) -> int:
    """Of the generations, for as many slots as there can be."""
    return max(PAGE_BYTES, -(-(size_bytes // MIN_SLOT_BYTES * WORD_BYTES) // PAGE_BYTES) * PAGE_BYTES)


def touch(memory: mmap.mmap, advice: int) -> None:
    """Have the system map all of this now, a step at a time: the interpreter lock is held meanwhile."""
    with suppress(OSError):
        for at in range(0, len(memory), TOUCH_STEP_BYTES):
            memory.madvise(advice, at, min(TOUCH_STEP_BYTES, len(memory) - at))


def _create_file(size_bytes: int) -> tuple[int, mmap.mmap]:
    """A sealed file in memory, of huge pages where the system keeps enough of them."""
    plain = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    kinds = [plain | os.MFD_HUGETLB, plain] if huge_pages_free() * _HUGE_BYTES >= size_bytes else [plain]
    for flags in kinds:
        descriptor = os.memfd_create("kvcache-extent", flags)
        unit = _HUGE_BYTES if flags & os.MFD_HUGETLB else PAGE_BYTES
        try:
            os.fchmod(descriptor, 0o600)  # else whoever may read it could open it anew to write
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
    """A file that another process made so; it is closed where it is none."""
    try:
        found = os.fstat(descriptor)
        if found.st_size < size_bytes or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ValueError(f"a file of {found.st_size} bytes, user {found.st_uid}: expected {size_bytes} of our own")
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS != _SEALS:
            raise ValueError("a file that somebody may cut short")
        return descriptor, mmap.mmap(descriptor, found.st_size)
    except (OSError, ValueError) as error:
        os.close(descriptor)
        raise ValueError(f"no extent: {error}") from None


def huge_pages_free() -> int:
    try:
        with open("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return 0


SlabClass = tuple[int, str]
"""Slot size and tenant."""

_WIPE_BATCH_BYTES = 16 << 20
"""Taken at a time to be overwritten."""

RegionListener = Callable[[memoryview], None]


def _ignore(memory: memoryview) -> None:
    pass


class Slab:
    """A piece of the arena: `count` slots of `slot_bytes` in one region. Its number is never another one's."""

    _numbers = itertools.count(1)

    def __init__(self, region: Region, slot_bytes: int, tenant: str, *, left: bool = False) -> None:
        """`left`: as another process had it, with the generations that it told."""
        self.region, self.slot_bytes, self.tenant = region, slot_bytes, tenant
        self.number = next(self._numbers)
        self.count = count = region.bytes // slot_bytes
        self.view = region.view
        self.free = list(range(count - 1, -1, -1))
        self.generations = region.generations
        region.renew_generations(range(0 if left else count))
        self.slots: dict[int, Slot] = {}  # given out
        self.closing = False  # no slot of it is given out
        self.unmapped = False  # its region is another's, or nobody's

    @property
    def kind(self) -> SlabClass:
        return self.slot_bytes, self.tenant


class Slot:
    """Room for one record: its header area, then its payload padded to whole pages.

    Counts references: who reads or writes it has one, and so does the tier while the record is published. When the
    last one is released the slot goes back to its extent.
    """

    __slots__ = ("expires_ms", "generation", "i", "name", "references", "sealed", "slab")

    def __init__(self, slab: Slab, i: int) -> None:
        self.slab, self.i = slab, i
        self.generation = slab.generations[i]
        self.references = 1
        self.sealed = False  # the header is written and the checksums are taken
        self.expires_ms = 0  # when the record that is in it ends, since 1970; 0: never
        self.name = b""  # of the record that is published in it

    @property
    def view(self) -> memoryview:
        """All of the slot. Valid while the caller has a reference."""
        size = self.slab.slot_bytes
        return self.slab.view[self.i * size : (self.i + 1) * size]


class Arena:
    """Gives out slots within `capacity_bytes`. Thread-safe."""

    def __init__(self, capacity_bytes: int, slab_bytes: int, executor: Executor, *, shared: bool = False) -> None:
        """`shared`: of memory that other processes may map."""
        self.shared = shared
        self.capacity_bytes, self.slab_bytes = capacity_bytes, min(slab_bytes, capacity_bytes)
        self.mapped_bytes = 0  # of extents
        self._spare: Region | None = None  # ahead of need; its bytes are within the capacity
        self._executor = executor
        self.used_bytes = 0
        self._used_by_tenant: dict[str, int] = {}
        self.quota: Callable[[str], int] = lambda tenant: capacity_bytes
        """What a tenant may have in use at most."""
        self._slabs: dict[SlabClass, list[Slab]] = {}
        self._open: dict[SlabClass, dict[Slab, None]] = {}  # those with a free slot; the last one is filled first
        self._on_added: RegionListener = _ignore
        self._on_removed: RegionListener = _ignore
        self._lock = threading.Lock()

    def watch(self, on_added: RegionListener = _ignore, on_removed: RegionListener = _ignore) -> None:
        """Tell of each piece of memory that comes, those that are here too, and of each that goes. Nobody may use the
        arena within such a call."""
        with self._lock:
            self._on_added, self._on_removed = on_added, on_removed
            for region in self._regions():
                on_added(region.view)

    def _regions(self) -> list[Region]:
        regions = [e.region for slabs in self._slabs.values() for e in slabs]
        return regions if self._spare is None else [*regions, self._spare]

    def allocate(self, slot_bytes: int, tenant: str, *, moving: bool = False) -> Slot | None:
        """A slot with one reference, or None where there is no room."""
        taken = self.allocate_many(slot_bytes, tenant, 1, moving=moving)
        return taken[0] if taken else None

    def allocate_many(self, slot_bytes: int, tenant: str, count: int, *, moving: bool = False) -> list[Slot]:
        """As many slots as there is room for, at most `count`, each with one reference. `moving`: for what leaves
        another slot, whatever the quota."""
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
        """What its quota leaves it."""
        with self._lock:
            return self._spare_bytes(tenant)

    def _spare_bytes(self, tenant: str) -> int:
        return self.quota(tenant) - self._used_by_tenant.get(tenant, 0)

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
            except OSError:  # the machine has less than the setting says: no room, which the caller counts
                return None
            self._on_added(region.view)
        slab = Slab(region, slot_bytes, tenant)
        self.mapped_bytes += region.bytes
        self._slabs.setdefault(slab.kind, []).append(slab)
        self._open.setdefault(slab.kind, {})[slab] = None
        return slab

    def adopt(self, slab: Slab, taken: Sequence[int]) -> list[Slot] | None:
        """Take in an extent that another process left, with these of its slots given out, each with one reference.
        None where there is no room for it."""
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
        """Have the next region ready, if there is room for one."""
        with self._lock:
            size = min(self.slab_bytes, self.capacity_bytes - self.mapped_bytes)
            if self._spare is not None or size < PAGE_BYTES:
                return
        try:
            region = Region(size, shared=self.shared)
        except OSError:  # it will be tried again when it is needed
            return
        with self._lock:
            if self._spare is not None or size > self.capacity_bytes - self.mapped_bytes:
                return
            self._spare = region
            self._on_added(region.view)
        region.touch()  # from its front, where slots are given out first: it may be in use already

    def room(self, slot_bytes: int) -> int:
        """How many more slots of this size can be given out, for the tenant that has most of them free."""
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
        left: Region | None = slab.region
        if slab.region.is_exported:
            slab.region.punch_hole()
        elif slab.region.bytes == self.slab_bytes:
            left, self._spare = self._spare, slab.region
        if left is not None:
            self._on_removed(left.view)

    def wipe(self) -> None:
        """Overwrite every slot that is free at the moment; those in use are their users' to leave clean."""
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
        """Some of its free slots that were not done, each with one reference."""
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

    # another kind's extents

    def find_evacuable(self, slot_bytes: int, tenant: str) -> Slab | None:
        """Of the extents of other kinds one whose slots fit into the free ones of its kind's other extents and are
        read by nobody: the one with the least to move."""
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
        """The extents of other kinds that one of these slots fits into, those with the fewest bytes in use first."""
        with self._lock:
            other_classes = (e for kind, slabs in self._slabs.items() if kind != (slot_bytes, tenant) for e in slabs)
            fitting = (e for e in other_classes if e.region.bytes >= slot_bytes)
            return sorted(fitting, key=lambda e: len(e.slots) * e.slot_bytes)

    def sample_names(self, slab: Slab, most: int, turn: int) -> list[bytes] | None:
        """Of the records in at most so many of its slots, here and there, in others at another turn. None where
        somebody reads or writes one of these slots."""
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

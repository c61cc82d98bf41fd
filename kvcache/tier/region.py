"""A piece of host memory to cut into slots, with a word for each slot's generation behind it.

A shared one is a file in memory that other processes map. It can be neither cut short nor grown, so that no reader of
it dies of a fault; what it held is given back by punching it out, and then every generation reads zero, which none has.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref
from array import array
from collections.abc import Iterable
from contextlib import suppress

from kvcache import native

PAGE = 4096
LEAST_SLOT_BYTES = PAGE
WORD_BYTES = 8
STEP_BYTES = 1 << 20
POPULATE_READ, POPULATE_WRITE = 22, 23  # of madvise, Linux 5.14: newer than Python's names for them
_HUGE_BYTES = 2 << 20
_LAST_GENERATION = (1 << 64) - 1
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
        self.exported = left is not None
        """Other processes may map it: what it held must not meet another tenant in it."""
        self._words: memoryview | None = None  # where other processes look for generations
        if shared or left is not None:
            size = size_bytes + table
            self.descriptor, self._memory = _file(size) if left is None else _left(left, size)
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

    def renew(self, numbers: Iterable[int]) -> None:
        """Another generation for these slots, here and for those who map them."""
        generations, words = self.generations, self._words
        for i in numbers:
            generations[i] = generations[i] % _LAST_GENERATION + 1
            if words is not None:
                words[i] = generations[i]

    def recall(self, generations: array[int]) -> None:
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
        self.exported = True
        if writable:
            return os.dup(self.descriptor)
        return os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)

    def punch(self) -> None:
        """Give the memory back to the system now, whoever maps it. What is read from it then is zero."""
        if self.descriptor is not None:
            libc = ctypes.CDLL(None, use_errno=True)
            libc.fallocate(self.descriptor, _PUNCH_AND_KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(len(self._memory)))


def table_bytes(size_bytes: int) -> int:
    """Of the generations, for as many slots as there can be."""
    return max(PAGE, -(-(size_bytes // LEAST_SLOT_BYTES * WORD_BYTES) // PAGE) * PAGE)


def touch(memory: mmap.mmap, advice: int) -> None:
    """Have the system map all of this now, a step at a time: the interpreter lock is held meanwhile."""
    with suppress(OSError):
        for at in range(0, len(memory), STEP_BYTES):
            memory.madvise(advice, at, min(STEP_BYTES, len(memory) - at))


def _file(size_bytes: int) -> tuple[int, mmap.mmap]:
    """A sealed file in memory, of huge pages where the system keeps enough of them."""
    plain = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    kinds = [plain | os.MFD_HUGETLB, plain] if huge_pages_free() * _HUGE_BYTES >= size_bytes else [plain]
    for flags in kinds:
        descriptor = os.memfd_create("kvcache-extent", flags)
        unit = _HUGE_BYTES if flags & os.MFD_HUGETLB else PAGE
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


def _left(descriptor: int, size_bytes: int) -> tuple[int, mmap.mmap]:
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

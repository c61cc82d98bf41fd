"""The segment files of a store: made, opened while somebody uses them, removed, and what the disk has left for more."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from kvcache.os_env import Clock, Disk, File
from kvcache.tier.counters import Counters
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.segment import Segment
from kvcache.tier.nvme.space import Space

FULL = {errno.ENOSPC, errno.EDQUOT}
FULL_PAUSE_S = 1.0
"""Before the next segment is tried on a disk that said it is full."""

FRESH_S = 1.0
"""How old an answer about free room may be where it only decides whether to ask for more."""


class Files:
    """`memory` is the lock of index and space; nothing here holds it during I/O."""

    def __init__(
        self,
        disk: Disk,
        clock: Clock,
        directory: Directory,
        space: Space,
        memory: threading.Lock,
        floor_bytes: int,
        counters: Counters,
    ) -> None:
        self._disk, self._clock, self._directory, self._space = disk, clock, directory, space
        self._memory, self._floor_bytes, self._counters = memory, floor_bytes, counters
        self.leftovers: dict[int, Segment] = {}  # retired, with files that could not be removed yet
        self._full_until = 0.0
        self._left: tuple[float, int] | None = None  # until when it holds, and the answer

    def path(self, number: int) -> str:
        return self._directory.join(f"segment-{number:06d}")

    def there(self) -> set[int]:
        return set(self._directory.numbered("segment"))

    @contextmanager
    def using(self, segment: Segment, users: int = 1) -> Iterator[File]:
        """The segment's file, open while this lasts, for callers who are counted among its users and leave then."""
        try:
            yield segment.open(self._disk, self.path(segment.number))
        finally:
            self.leave(segment, users)

    def leave(self, segment: Segment, users: int = 1) -> None:
        with self._memory:
            segment.users -= users
            over = segment.retired and not segment.users
        if over:
            segment.close()

    def make(self, segment: Segment) -> bool:
        """Make the file of a segment that is claimed; False where the disk is full. The file may be there all the
        same, and after an OSError too."""
        self._left = None
        try:
            segment.create(self._disk, self.path(segment.number))
        except OSError as error:
            if error.errno not in FULL:
                raise
            self.full()
            return False
        return True

    def full(self) -> None:
        """The disk said so."""
        self._counters.add("disk_full")
        self._full_until = self._clock.now() + FULL_PAUSE_S

    def clear(self, segment: Segment) -> None:
        """Remove the file of a retired segment. Who still uses it has it open, and goes on until he leaves."""
        self._left = None
        try:
            self._disk.remove(self.path(segment.number))
        except FileNotFoundError:
            pass
        except OSError:
            self._counters.add("write_errors")
            self.leftovers[segment.number] = segment  # its bytes stay counted until it can be removed
            return
        self.leftovers.pop(segment.number, None)
        with self._memory:
            self._space.forget(segment)
            unused = not segment.users
        if unused:
            segment.close()

    def free_bytes(self, *, fresh: bool = True) -> int:
        """What the disk has left for segments; negative for a while after it said that it is full."""
        now = self._clock.now()
        if now < self._full_until:
            return -(1 << 62)
        left = self._left
        if fresh or left is None or left[0] < now:
            found = max(0, self._disk.free_bytes(self._directory.path) - self._floor_bytes)
            self._left = left = now + FRESH_S, found
        return left[1]

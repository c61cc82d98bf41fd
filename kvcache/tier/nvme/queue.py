"""What waits for a thread of the tier: by priority, reads before removals before writes, then in order.

Bounded: writes by their bytes, everything by number. Not thread-safe: `NvmeTier` calls it under its lock.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from kvcache.block.address import Address
from kvcache.tier.tier import Op, Segments, Ticket

MOST_JOBS = 1 << 17
_RANK: dict[Op, int] = {"read": 0, "remove": 1, "write": 2}


@dataclass(slots=True, eq=False)
class Job:
    """One block of a ticket."""

    op: Op
    address: Address
    segments: Segments
    ticket: Ticket
    i: int
    deadline: float | None
    write_bytes: int = 0


class Queue:
    def __init__(self, most_write_bytes: int) -> None:
        self._most_write_bytes = most_write_bytes
        self._waiting: dict[int, Job] = {}  # by order of arrival; the heaps may name jobs that have left
        self._urgent: list[tuple[int, int, int]] = []
        self._deadlines: list[tuple[float, int]] = []
        self._order = count()
        self.write_bytes = 0  # of writes that wait or run

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, job: Job, priority: int) -> bool:
        """False where the queue is full. A write larger than the whole bound is taken while there is no other."""
        if len(self._waiting) >= MOST_JOBS:
            return False
        if job.write_bytes and self.write_bytes and self.write_bytes + job.write_bytes > self._most_write_bytes:
            return False
        self.write_bytes += job.write_bytes
        order = next(self._order)
        self._waiting[order] = job
        heapq.heappush(self._urgent, (priority, _RANK[job.op], order))
        if job.deadline is not None:
            heapq.heappush(self._deadlines, (job.deadline, order))
            if len(self._deadlines) > 2 * len(self._waiting) + 64:
                self._deadlines = [entry for entry in self._deadlines if entry[1] in self._waiting]
                heapq.heapify(self._deadlines)
        return True

    def pop(self) -> Job | None:
        """The most urgent, or None. `end` it when it ran."""
        while self._urgent:
            job = self._waiting.pop(heapq.heappop(self._urgent)[2], None)
            if job is not None:
                return job
        return None

    def end(self, job: Job) -> None:
        self.write_bytes -= job.write_bytes

    def expired(self, now: float) -> Iterator[Job]:
        """Those whose deadline passed while they waited, taken out and ended."""
        while self._deadlines and self._deadlines[0][0] < now:
            job = self._waiting.pop(heapq.heappop(self._deadlines)[1], None)
            if job is not None:
                self.end(job)
                yield job

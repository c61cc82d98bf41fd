"""What waits for a thread of the tier: by priority, lookups before reads before removals before writes, then in order.

What was asked for together waits together and is taken in pieces: as many blocks as one thread should do at a time, so
that neighbours are read and written at once. Writers never take all threads: a device that hangs on writes still reads.

Bounded: writes by their bytes, everything by number. Not thread-safe: a tier calls it under its lock.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from kvcache.block.record import Address
from kvcache.tier.tier import Op, Segments, Ticket

MOST_JOBS = 1 << 17
PIECE_BYTES = 4 << 20
PIECE_BLOCKS = 256
QUESTIONS = 4096
"""Lookups in a piece: cheap enough that dividing them costs more than it saves."""
_RANK: dict[Op, int] = {"contains": 0, "read": 1, "remove": 2, "write": 3}


@dataclass(slots=True, eq=False)
class Batch:
    """Blocks `first` to `end` (excluded) of one ticket."""

    op: Op
    addresses: Sequence[Address]
    segments: Sequence[Segments]  # none to look or remove
    ticket: Ticket
    first: int
    end: int
    share: int = 1  # how many of them one thread takes at most
    deadline: float | None = None
    whole: bool = False  # one thread took all that was left of it

    @property
    def blocks(self) -> range:
        return range(self.first, self.end)

    @property
    def wanted(self) -> Sequence[Address]:
        return self.addresses[self.first : self.end]

    def size_bytes(self, i: int) -> int:
        return sum(map(len, self.segments[i])) if self.segments else 0


class Queue:
    def __init__(self, threads: int, most_write_bytes: int, *, piece_bytes: int = PIECE_BYTES, spread: int = 0) -> None:
        """`spread`: over how many threads a batch is divided where it has less than a piece for each; all of them
        where not given."""
        self._spread = spread or threads
        self._most_writers, self._most_write_bytes = max(1, threads - 1), most_write_bytes
        self._piece_bytes = piece_bytes
        self._lines: dict[tuple[int, int], deque[Batch]] = {}
        self._deadlines: list[tuple[float, int, Batch]] = []
        self._order = count()
        self._waiting = 0
        self._writers = 0
        self.write_bytes = 0  # of writes that wait or run

    def __len__(self) -> int:
        """How many blocks wait."""
        return self._waiting

    def push(self, batch: Batch, priority: int, deadline: float | None) -> int:
        """How many blocks of it, from the first, find room; the rest is not taken and the batch ends before it. A
        write larger than the whole bound is taken while there is no other."""
        batch.end = min(batch.end, batch.first + MOST_JOBS - self._waiting)
        if batch.op == "write":
            batch.end = self._admit(batch)
        taken = batch.end - batch.first
        if taken > 0:
            shared = -(-taken // self._spread)
            batch.share = QUESTIONS if batch.op == "contains" else min(PIECE_BLOCKS, shared)
            self._waiting += taken
            self._lines.setdefault((priority, _RANK[batch.op]), deque()).append(batch)
            if deadline is not None:
                heapq.heappush(self._deadlines, (deadline, next(self._order), batch))
        return max(0, taken)

    def _admit(self, batch: Batch) -> int:
        for i in batch.blocks:
            size = batch.size_bytes(i)
            if self.write_bytes and self.write_bytes + size > self._most_write_bytes:
                return i
            self.write_bytes += size
        return batch.end

    def pop(self, whole: Callable[[Op], bool] = lambda op: False) -> Batch | None:
        """The next piece of work for one thread, or None where there is none that may begin. `leave` when it ran.
        `whole`: whether the thread takes all that is left of the batch; it does that in `pieces`."""
        for key in sorted(self._lines):
            line = self._lines[key]
            while line and line[0].first >= line[0].end:
                line.popleft()
            if not line:
                del self._lines[key]
            elif key[1] != _RANK["write"] or self.write_too():
                return self._cut(line[0], whole=whole(line[0].op))
        return None

    def _cut(self, batch: Batch, *, whole: bool) -> Batch:
        piece = replace(batch, end=batch.end if whole else self._piece_end(batch), whole=whole)
        batch.first = piece.end
        self._waiting -= piece.end - piece.first
        return piece

    def _piece_end(self, batch: Batch) -> int:
        """Where the first piece of a batch ends: a thread's share, or as much of it as makes a piece."""
        most = min(batch.end, batch.first + batch.share)
        end, size = batch.first + 1, batch.size_bytes(batch.first)
        while end < most and size + (more := batch.size_bytes(end)) <= self._piece_bytes:
            end, size = end + 1, size + more
        return end

    def pieces(self, batch: Batch) -> Iterator[Batch]:
        """What a thread took, as the pieces that several threads would take."""
        while batch.whole and (end := self._piece_end(batch)) < batch.end:
            yield replace(batch, end=end)
            batch = replace(batch, first=end)
        yield batch

    def leave(self, piece: Batch) -> None:
        if piece.op == "write":
            self.written()
            self._forget(piece)

    def write_too(self) -> bool:
        """Count one more writer, where there may be one: `written` when it has ended."""
        if self._writers >= self._most_writers:
            return False
        self._writers += 1
        return True

    def written(self) -> None:
        self._writers -= 1

    def _forget(self, batch: Batch) -> None:
        self.write_bytes -= sum(map(batch.size_bytes, batch.blocks)) if batch.op == "write" else 0

    def expired(self, now: float) -> Iterator[Batch]:
        """What waited past its deadline, taken out."""
        while self._deadlines and self._deadlines[0][0] < now:
            batch = heapq.heappop(self._deadlines)[2]
            if batch.first < batch.end:
                late = replace(batch)
                batch.first = batch.end
                self._waiting -= late.end - late.first
                self._forget(late)
                yield late
        if len(self._deadlines) > 2 * self._waiting + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[2].first < entry[2].end]
            heapq.heapify(self._deadlines)

    def clear(self) -> Iterator[Batch]:
        """All that waits, taken out."""
        for line in self._lines.values():
            for batch in line:
                if batch.first < batch.end:
                    self._waiting -= batch.end - batch.first
                    self._forget(batch)
                    yield batch
        self._lines.clear()

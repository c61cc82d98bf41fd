"""Eviction policies from their papers, replayed on traces for comparison with the cache's own.

None of them ranks classes of blocks, so none can drive the index. `classic_policies.cpp` has compiled twins, whose
behaviour these classes define.

All policies respect chains: a block with resident children is not evicted, and the next one in the policy's order is
taken. A request touches its blocks tail first, so that its head is the newest.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from functools import cache
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import ClassVar

import numpy as np

from kvcache.trace.formats import Trace
from kvcache.trace.simulate import SimulationResult, parents_of

Order = OrderedDict[int, None]  # first to be evicted first


class Classic:
    """The resident blocks, at most `capacity`. `parents` holds for each block the one before it, or -1."""

    name: ClassVar[str]

    def __init__(self, capacity: int, parents: list[int]) -> None:
        self.capacity, self._parents = capacity, parents
        self.here: set[int] = set()
        self._children = [0] * len(parents)

    def touch(self, block: int) -> None:
        """Record a use of a resident block."""
        raise NotImplementedError

    def admit(self, block: int) -> None:
        """Offer a block that is not resident; the policy may keep it or not."""
        raise NotImplementedError

    def _enter(self, block: int) -> None:
        self.here.add(block)
        if self._parents[block] >= 0:
            self._children[self._parents[block]] += 1

    def _leave(self, block: int) -> None:
        self.here.remove(block)
        if self._parents[block] >= 0:
            self._children[self._parents[block]] -= 1

    def _free(self, order: Iterable[int]) -> int | None:
        """Return the first block that may be evicted."""
        return next((block for block in order if not self._children[block]), None)

    @property
    def _full(self) -> bool:
        return len(self.here) >= self.capacity


class S3FIFO(Classic):
    """Yang et al., SOSP 2023: a small queue, a main queue that a block enters after another use, and a queue of ghosts.

    The small queue is a quarter, and one use promotes, which serves chains of blocks better than the paper's values.
    """

    name = "s3fifo"

    def __init__(self, capacity: int, parents: list[int]) -> None:
        super().__init__(capacity, parents)
        self._small, self._main, self._ghosts = Order(), Order(), Order()
        self._uses = [0] * len(parents)

    def touch(self, block: int) -> None:
        self._uses[block] = min(3, self._uses[block] + 1)

    def admit(self, block: int) -> None:
        while self._full:
            self._make_room()
        known = block in self._ghosts
        self._ghosts.pop(block, None)
        self._uses[block] = 0
        (self._main if known else self._small)[block] = None
        self._enter(block)

    def _make_room(self) -> None:
        small = next(iter(self._small), None)
        if small is not None and (len(self._small) >= self.capacity // 4 or self._free(self._main) is None):
            del self._small[small]
            if self._uses[small] or self._children[small]:
                self._uses[small] = 0
                self._main[small] = None
                return
            self._leave(small)
            self._ghosts[small] = None
            if len(self._ghosts) > self.capacity:
                self._ghosts.popitem(last=False)
            return
        main = next(iter(self._main))
        if self._uses[main] or self._children[main]:
            self._uses[main] = max(0, self._uses[main] - 1)
            self._main.move_to_end(main)
            return
        del self._main[main]
        self._leave(main)


class Sieve(Classic):
    """Zhang et al., NSDI 2024: one queue, and a hand that moves from the oldest to the newest. The hand skips each
    visited block once and evicts the first unvisited one."""

    name = "sieve"

    def __init__(self, capacity: int, parents: list[int]) -> None:
        super().__init__(capacity, parents)
        self._queue: list[int] = []  # by time of admission
        self._hand = 0
        self._visited: set[int] = set()

    def touch(self, block: int) -> None:
        self._visited.add(block)

    def admit(self, block: int) -> None:
        while self._full:
            if self._hand >= len(self._queue):
                self._hand = 0
            at = self._queue[self._hand]
            if at in self._visited:
                self._visited.remove(at)
            elif not self._children[at]:
                del self._queue[self._hand]
                self._leave(at)
                continue
            self._hand += 1
        self._queue.append(block)
        self._enter(block)


class ARC(Classic):
    """Megiddo and Modha, FAST 2003: blocks used once and blocks used again, with ghosts of both that move the
    border."""

    name = "arc"

    def __init__(self, capacity: int, parents: list[int]) -> None:
        super().__init__(capacity, parents)
        self._once, self._again, self._gone_once, self._gone_again = Order(), Order(), Order(), Order()
        self._border = 0.0

    def touch(self, block: int) -> None:
        self._once.pop(block, None)
        self._again.pop(block, None)
        self._again[block] = None

    def admit(self, block: int) -> None:
        once, again = len(self._gone_once), len(self._gone_again)
        if block in self._gone_once:
            self._border = min(self.capacity, self._border + max(1.0, again / once))
            self._make_room(from_again=False)
            del self._gone_once[block]
            self._again[block] = None
        elif block in self._gone_again:
            self._border = max(0.0, self._border - max(1.0, once / again))
            self._make_room(from_again=True)
            del self._gone_again[block]
            self._again[block] = None
        else:
            if len(self._once) + once >= self.capacity and self._gone_once:
                self._gone_once.popitem(last=False)
            elif len(self.here) + once + again >= 2 * self.capacity and self._gone_again:
                self._gone_again.popitem(last=False)
            self._make_room(from_again=False)
            self._once[block] = None
        self._enter(block)

    def _make_room(self, *, from_again: bool) -> None:
        while self._full:
            size = len(self._once)
            take_once = size > 0 and (size > self._border or (from_again and size == self._border))
            both = ((self._once, self._gone_once), (self._again, self._gone_again))
            for order, gone in both if take_once else both[::-1]:
                victim = self._free(order)
                if victim is not None:
                    del order[victim]
                    gone[victim] = None
                    self._leave(victim)
                    break


class Ranked(Classic):
    """A policy that evicts the smallest key first, and among equals the one used longest ago."""

    def __init__(self, capacity: int, parents: list[int]) -> None:
        super().__init__(capacity, parents)
        self._order: list[tuple[float, int, int]] = []  # key, time of use, block
        self._at: dict[int, tuple[float, int, int]] = {}
        self._time = 0

    def key(self, block: int) -> float:
        """Return the key of a block at a use, and count the use."""
        raise NotImplementedError

    def left(self, key: float) -> None:
        """Record the eviction of a block with this key."""

    def touch(self, block: int) -> None:
        del self._order[bisect_left(self._order, self._at[block])]
        self._place(block)

    def admit(self, block: int) -> None:
        while self._full:
            key, _, victim = place = next(row for row in self._order if not self._children[row[2]])
            self._order.remove(place)
            del self._at[victim]
            self._leave(victim)
            self.left(key)
        self._place(block)
        self._enter(block)

    def _place(self, block: int) -> None:
        self._time += 1
        self._at[block] = self.key(block), self._time, block
        insort(self._order, self._at[block])


class LRU2(Ranked):
    """O'Neil et al., SIGMOD 1993, with K = 2: the key is the time of the use before the last, which is remembered
    forever."""

    name = "lru2"

    def __init__(self, capacity: int, parents: list[int]) -> None:
        super().__init__(capacity, parents)
        self._last = [-inf] * len(parents)

    def key(self, block: int) -> float:
        before, self._last[block] = self._last[block], float(self._time)
        return before


class LFUDA(Ranked):
    """Arlitt et al., 1999: the key is the uses since admission plus the age of the cache, which is the key of the last
    evicted block. Equals GreedyDual by frequency where all blocks cost the same."""

    name = "lfuda"

    def __init__(self, capacity: int, parents: list[int]) -> None:
        super().__init__(capacity, parents)
        self._uses = [0] * len(parents)
        self._age = 0.0

    def key(self, block: int) -> float:
        self._uses[block] = self._uses[block] + 1 if block in self.here else 1
        return self._age + self._uses[block]

    def left(self, key: float) -> None:
        self._age = key


class WTinyLFU(Classic):
    """Einziger et al., 2017: a window of recency before a segmented main part. A block enters the main part only in
    place of one that was used less.

    The window is a half, which serves chains better than the paper's hundredth. Counts are exact instead of a sketch,
    and are halved every ten capacities of uses.
    """

    name = "wtinylfu"

    def __init__(self, capacity: int, parents: list[int]) -> None:
        super().__init__(capacity, parents)
        self._window, self._tried, self._kept = Order(), Order(), Order()
        self._window_room = max(1, capacity // 2)
        self._kept_room = (capacity - self._window_room) * 4 // 5
        self._counts = [0] * len(parents)
        self._counted = 0

    def touch(self, block: int) -> None:
        self._count(block)
        if block in self._window:
            self._window.move_to_end(block)
            return
        self._tried.pop(block, None)
        self._kept.pop(block, None)
        self._kept[block] = None
        if len(self._kept) > self._kept_room:
            self._tried[self._kept.popitem(last=False)[0]] = None

    def admit(self, block: int) -> None:
        self._count(block)
        if len(self._window) >= self._window_room or self._full:
            self._move_on()
        self._window[block] = None
        self._enter(block)

    def _move_on(self) -> None:
        """Move the oldest block of the window to the main part, if necessary in place of one there that was used
        less."""
        oldest = next(iter(self._window))
        if self._full:
            for _ in range(len(self._tried)):
                if not self._children[next(iter(self._tried))]:
                    break
                self._tried.move_to_end(next(iter(self._tried)))  # a parent of resident blocks
            tried = self._free(self._tried)
            main = tried if tried is not None else self._free(self._kept)
            if main is None or (self._counts[oldest] < self._counts[main] and not self._children[oldest]):
                leaver = self._free(self._window)
                assert leaver is not None, "some block has no children here"
                del self._window[leaver]
                self._leave(leaver)
                return
            del (self._tried if main in self._tried else self._kept)[main]
            self._leave(main)
        del self._window[oldest]
        self._tried[oldest] = None

    def _count(self, block: int) -> None:
        self._counts[block] += 1
        self._counted += 1
        if self._counted >= 10 * self.capacity:
            self._counts = [count // 2 for count in self._counts]
            self._counted = 0


CLASSICS: Mapping[str, type[Classic]] = {kind.name: kind for kind in (S3FIFO, ARC, LRU2, LFUDA, WTinyLFU, Sieve)}


def simulate(trace: Trace, name: str, capacity: int, *, use_reference: bool = False) -> SimulationResult:
    """As `kvcache.trace.simulate.simulate`, for these policies. Without `use_reference` it runs the compiled twins."""
    hits = np.zeros(len(trace), np.int32)
    if use_reference:
        chains = [chain.tolist() for chain in trace]
        policy = CLASSICS[name](capacity, parents_of(chains, trace.unique))
        for r, chain in enumerate(chains):
            hits[r] = next((i for i, block in enumerate(chain) if block not in policy.here), len(chain))
            for block in reversed(chain):
                (policy.touch if block in policy.here else policy.admit)(block)
    else:
        starts, blocks = (np.ascontiguousarray(a) for a in (trace.starts, trace.blocks))
        sizes = (len(trace), trace.unique, capacity)
        if not _library().replay_classic(name.encode(), starts.ctypes, blocks.ctypes, *sizes, hits.ctypes):
            raise ValueError(f"policy {name!r}: expected one of {', '.join(CLASSICS)}")
    return SimulationResult(name, capacity, hits, trace.accesses)


@cache
def _library() -> ctypes.CDLL:
    """The compiled twins, built once a process."""
    place = TemporaryDirectory(prefix="kvcache-classic-policies-")
    target = Path(place.name, "classic_policies.so")
    source = Path(__file__).with_name("classic_policies.cpp")
    compiler = os.environ.get("CXX", "c++")
    subprocess.run([compiler, "-std=c++17", "-O3", "-shared", "-fPIC", source, "-o", target], check=True)
    library = ctypes.CDLL(str(target))
    place.cleanup()  # the library stays mapped
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    library.replay_classic.argtypes = [ctypes.c_char_p, pointer, pointer, size, size, size, pointer]
    return library

"""The eviction order of the reference index: twin of `age_histogram`, `eviction_order.h` and `evict.cpp` in csrc/host.

Each tier has one order for each cost class, each class of use, and whether a lower tier has the record too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvcache.index.reference.ghosts import Node, OrderPosition

# `AgeHistogram` counts waiting blocks by class of use and time of last use: the twin of csrc/host/age_histogram. Times
# are grouped in spans, and every tick begins one. Two neighbours are merged once both lie in one age bin, so there are
# about as many spans as bins. A span is never split: all of it counts in the bin of its first time.


class AgeHistogram:
    """`edges[b]` is the lowest age in bin b; the first is 0."""

    def __init__(self, classes: int, edges: Sequence[int]) -> None:
        self.edges = list(edges)
        self._starts = [0]
        self._counts = [[0] * classes]
        self._merged = 1  # number of spans after the last merge
        self._shape = (classes, len(edges))

    def bin(self, age: int) -> int:
        return bisect_right(self.edges, age) - 1

    def begin(self, now: int) -> None:
        """Start empty at this time; the first additions may be of any age and get exact bins."""
        self._starts = sorted({0, *(now - edge for edge in self.edges if edge < now)})
        self._counts = [[0] * self._shape[0] for _ in self._starts]
        self._merged = len(self._starts)

    def tick(self, now: int) -> None:
        self._starts.append(now)
        self._counts.append([0] * self._shape[0])
        if len(self._starts) > 2 * self._merged + 16:
            self._merge(now)

    def _merge(self, now: int) -> None:
        starts, counts = self._starts[:1], self._counts[:1]
        ends = [start - 1 for start in self._starts[2:]] + [now]
        for start, end, count in zip(self._starts[1:], ends, self._counts[1:], strict=True):
            if self.bin(now - starts[-1]) == self.bin(now - end):
                counts[-1] = [a + b for a, b in zip(counts[-1], count, strict=True)]
            else:
                starts.append(start)
                counts.append(count)
        self._starts, self._counts, self._merged = starts, counts, len(starts)

    def add(self, use_class: int, stamp: int, blocks: int) -> None:
        self._counts[bisect_right(self._starts, stamp) - 1][use_class] += blocks

    def count(self, now: int) -> NDArray[np.int64]:
        """By (class, age bin)."""
        out = np.zeros(self._shape, np.int64)
        for start, count in zip(self._starts, self._counts, strict=True):
            out[:, self.bin(now - start)] += count
        return out


OrderKey = tuple[int, int, int, int]  # tier, cost_class, whether a lower tier has it, class of use


USES_BITS = 5
MAX_USES = (1 << USES_BITS) - 1


class UseClasses:
    """The classes of use.

    A block's uses are a byte. The low bits count its uses after the first. The high bits count the `gaps` that are at
    most its age at the last use. The number of `bounds` that are at most the use count selects the class; where it is
    not 0, the gap count divides the class further.
    """

    def __init__(self, bounds: Sequence[int], gaps: Sequence[int]) -> None:
        self._bounds, self._gaps = tuple(bounds), tuple(gaps)

    def __len__(self) -> int:
        return 1 + len(self._bounds) * (len(self._gaps) + 1)

    def of(self, uses: int) -> int:
        c = bisect_right(self._bounds, uses & MAX_USES)
        return 1 + (c - 1) * (len(self._gaps) + 1) + (uses >> USES_BITS) if c else 0

    def again(self, uses: int, age: int) -> int:
        """The use byte after one more use at that age."""
        return min((uses & MAX_USES) + 1, MAX_USES) | bisect_right(self._gaps, age) << USES_BITS


class ReferenceOrders:
    def __init__(self, tiers: int, classes: UseClasses, ages: AgeHistogram) -> None:
        self._tiers, self._classes, self._ages = tiers, classes, ages
        self.all: dict[OrderKey, list[OrderPosition]] = {}

    def leave(self, node: Node) -> None:
        for t, key in enumerate(node.listed):
            if key is not None:
                order = self.all[key]
                del order[bisect_left(order, node.standing)]
                node.listed[t] = None

    def enter(self, node: Node, cost_class: int) -> None:
        if node.holds:
            return
        for t in range(self._tiers):
            if node.listed[t] is None and node.tiers >> t & 1 and not node.children[t]:
                key = t, cost_class, int(node.tiers >> (t + 1) != 0), self._classes.of(node.uses)
                insort(self.all.setdefault(key, []), node.standing)
                node.listed[t] = key

    def worst(
        self,
        tier: int,
        values: NDArray[np.float64],
        weights: Sequence[float],
        now: int,
        before: int | None,
        stored_below: bool,
        most: float,
    ) -> OrderPosition | None:
        """The next record to evict; it stays in its order. None if no record qualifies."""
        worst: tuple[float, int, OrderPosition] | None = None
        for (t, cost_class, below, c), order in self.all.items():
            weight = weights[cost_class] if cost_class < len(weights) else 1.0
            if t != tier or (stored_below and not below) or weight == inf:
                continue
            for value, standing in self._heads(order, values[c], now):
                candidate = (value * weight, -below, standing)
                if candidate[0] == inf or candidate[0] > most:
                    continue
                if (before is None or standing[0] < before) and (worst is None or candidate < worst):
                    worst = candidate
        return None if worst is None else worst[2]

    def value(
        self, node: Node, cost_class: int, values: NDArray[np.float64], weights: Sequence[float], now: int
    ) -> float:
        weight = weights[cost_class] if cost_class < len(weights) else 1.0
        b = self._ages.bin(max(0, now - node.stamp))
        return inf if weight == inf else float(values[self._classes.of(node.uses), b]) * weight

    def _heads(
        self, order: list[OrderPosition], values: NDArray[np.float64], now: int
    ) -> Iterator[tuple[float, OrderPosition]]:
        """The first record of each age bin, with its value."""
        at = 0
        while at < len(order):
            b = self._ages.bin(now - order[at][0])
            yield float(values[b]), order[at]
            if b == 0:
                return
            at = bisect_left(order, (now - self._ages.edges[b] + 1,), at)

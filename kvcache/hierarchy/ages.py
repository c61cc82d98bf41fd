"""How many blocks wait, by class of use and by the time they were last used: the plain twin of `csrc/host/ages`.

Times are kept in spans. Every tick begins one; as they age, neighbours become one where both lie within one bin of age,
so that there are about as many spans as bins. A span is never cut, so each counts wholly in the bin of its first time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class Ages:
    """`edges[b]` is the least age in bin b; the first is 0."""

    def __init__(self, classes: int, edges: Sequence[int]) -> None:
        self.edges = list(edges)
        self._starts = [0]
        self._counts = [[0] * classes]
        self._merged = 1  # spans that the last merge left
        self._shape = (classes, len(edges))

    def bin(self, age: int) -> int:
        return bisect_right(self.edges, age) - 1

    def begin(self, now: int) -> None:
        """Nothing is counted yet; what comes first may be of any age, in exact bins."""
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
        """By class and bin."""
        out = np.zeros(self._shape, np.int64)
        for start, count in zip(self._starts, self._counts, strict=True):
            out[:, self.bin(now - start)] += count
        return out

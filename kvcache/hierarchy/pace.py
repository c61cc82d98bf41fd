"""How long something takes by its size, learned from what it took: a tier's reads by their bytes, an engine's prefill
by its tokens.

So long for anything, so much more for each unit, and for prefill something that grows with its square: attention. The
first guess is corrected in two ways. The *level*, one factor for all sizes, is the median of the last few samples
against what was expected of them: it ignores two odd ones of five, and follows a drive that became ten times slower
within three. How the parts stand to one another is fitted to more samples, as they are by that level: least squares
of the relative error, the older ones weighing less, no part below nothing.
"""

from __future__ import annotations

from collections import deque
from math import exp, log
from statistics import median

LAST = 5
"""Samples whose median is the level."""
DOUBT = log(1.5)
KEEP = 0.98
"""What a sample weighs against the one after it."""
TRUST = 0.1
"""What the first guess weighs against a sample."""
MOST = 1e15
_SWEEPS = 4


class Pace:
    """`fixed_s` for anything at all, `unit_s` for each unit, as much again at each `bend` units. Not thread-safe."""

    def __init__(self, fixed_s: float, unit_s: float, bend: float = float("inf")) -> None:
        self._fixed_s, self._unit_s, self._bend = fixed_s, unit_s, bend
        self._weights = [1.0, 1.0, 1.0]  # of the parts
        self._products = [[0.0] * 3 for _ in range(3)]  # of parts with each other, over samples
        self._sums = [0.0] * 3  # of parts, over samples
        self._gaps: deque[float] = deque(maxlen=LAST)
        self._level = 0.0

    @property
    def known(self) -> bool:
        """There was a sample."""
        return bool(self._gaps)

    @property
    def doubtful(self) -> bool:
        """The last sample is not what the level says: a change, or an odd one."""
        return bool(self._gaps) and abs(self._gaps[-1] - self._level) > DOUBT

    def seconds(self, size: float) -> float:
        """Expected of so much; 0 of nothing."""
        return exp(self._level) * self._expected(size) if size > 0 else 0.0

    def learn(self, size: float, seconds: float) -> None:
        """So much took so long."""
        if not (0 < size < MOST and 0 < seconds < MOST):  # nor what is no number
            return
        gap = log(seconds / self._expected(size))
        self._gaps.append(gap)
        self._level = median(self._gaps)
        usual = self._expected(size) * exp(max(-1.0, min(1.0, gap - self._level)))
        row = [part / usual for part in self._parts(size)]
        for i, one in enumerate(row):
            self._sums[i] = KEEP * self._sums[i] + one
            self._products[i] = [KEEP * p + one * other for p, other in zip(self._products[i], row, strict=True)]
        self._fit()

    def _fit(self) -> None:
        """Gauss and Seidel's steps from where the weights are, which is near."""
        for _ in range(_SWEEPS):
            for i, row in enumerate(self._products):
                rest = sum(p * w for j, (p, w) in enumerate(zip(row, self._weights, strict=True)) if j != i)
                self._weights[i] = max(0.0, (self._sums[i] + TRUST - rest) / (row[i] + TRUST))

    def _parts(self, size: float) -> tuple[float, float, float]:
        return self._fixed_s, self._unit_s * size, self._unit_s * size * size / self._bend

    def _expected(self, size: float) -> float:
        """But for the level."""
        parts = self._parts(size)
        return max(1e-12, sum(part * weight for part, weight in zip(parts, self._weights, strict=True)))

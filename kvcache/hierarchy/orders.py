"""Who of the plain index may leave, in the order in which they would: of each tier an order for each kind and class of
use, and for whether a tier below has it too. Plain twin of `csrc/host/order` and `csrc/host/evict`."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from math import inf

import numpy as np
from numpy.typing import NDArray

from kvcache.hierarchy.ages import Ages
from kvcache.hierarchy.node import Node, Standing

Key = tuple[int, int, int, int]  # tier, kind, whether a tier below has it, class


class PlainOrders:
    def __init__(self, tiers: int, bounds: Sequence[int], ages: Ages) -> None:
        self._tiers, self._bounds, self._ages = tiers, bounds, ages
        self.all: dict[Key, list[Standing]] = {}

    def use_class(self, uses: int) -> int:
        return sum(uses >= bound for bound in self._bounds)

    def leave(self, node: Node) -> None:
        for t, key in enumerate(node.listed):
            if key is not None:
                order = self.all[key]
                del order[bisect_left(order, node.standing)]
                node.listed[t] = None

    def enter(self, node: Node, kind: int) -> None:
        if node.holds:
            return
        for t in range(self._tiers):
            if node.listed[t] is None and node.tiers >> t & 1 and not node.children[t]:
                key = t, kind, int(node.tiers >> (t + 1) != 0), self.use_class(node.uses)
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
    ) -> Standing | None:
        """The one to leave next, which stays where it is."""
        worst: tuple[float, int, Standing] | None = None
        for (t, kind, below, c), order in self.all.items():
            weight = weights[kind] if kind < len(weights) else 1.0
            if t != tier or (stored_below and not below) or weight == inf:
                continue
            for value, standing in self._heads(order, values[c], now):
                candidate = (value * weight, -below, standing)
                if candidate[0] == inf or candidate[0] > most:
                    continue
                if (before is None or standing[0] < before) and (worst is None or candidate < worst):
                    worst = candidate
        return None if worst is None else worst[2]

    def _heads(self, order: list[Standing], values: NDArray[np.float64], now: int) -> Iterator[tuple[float, Standing]]:
        """The first of each bin of age."""
        at = 0
        while at < len(order):
            b = self._ages.bin(now - order[at][0])
            yield float(values[b]), order[at]
            if b == 0:
                return
            at = bisect_left(order, (now - self._ages.edges[b] + 1,), at)

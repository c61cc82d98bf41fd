"""The plain index against what a walk over all of its nodes finds: the plain twin of `csrc/host/audit`."""

from __future__ import annotations

import threading

from kvcache.hierarchy.ages import Ages
from kvcache.hierarchy.ghosts import PlainGhosts
from kvcache.hierarchy.node import Name, Node
from kvcache.hierarchy.orders import PlainOrders


class Audited:
    clock: int
    _tiers: int
    _nodes: dict[Name, Node]
    _of_kind: list[list[int]]
    _blocks: int
    _orders: PlainOrders
    _ages: Ages
    _ghosts: PlainGhosts
    _lock: threading.RLock

    def __len__(self) -> int:
        return len(self._nodes)

    def resident(self, tier: int) -> int:
        return sum(self.residents(tier))

    def residents(self, tier: int) -> list[int]:  # by kind
        with self._lock:
            return [of_kind[tier] for of_kind in self._of_kind]

    def ghosts(self) -> int:
        return len(self._ghosts)

    def held(self) -> int:
        with self._lock:
            return sum(node.holds for node in self._nodes.values())

    def names(self, tier: int) -> bytes:  # place and signature of each that the tier has, one behind the other
        with self._lock:
            return b"".join(place + sign for (place, sign), node in self._nodes.items() if node.tiers >> tier & 1)

    def check(self) -> list[str]:
        """Counts, orders and links against what a walk over all nodes finds."""
        faults = []
        with self._lock:
            children: dict[Name, list[int]] = {}
            for node in self._nodes.values():
                if node.parent_name:
                    counts = children.setdefault(node.parent_name, [0] * self._tiers)
                    for t in range(self._tiers):
                        counts[t] += node.tiers >> t & 1
            for node in self._nodes.values():
                label = f"index: {node.name[1][:8].hex()}"
                if node.children != children.get(node.name, [0] * self._tiers):
                    faults.append(f"{label} counts {node.children} children, {children.get(node.name)} are there")
                if not node.tiers and not node.holds and not any(node.children):
                    faults.append(f"{label} is remembered for nothing")
                for t, place in enumerate(node.listed):
                    if (place is not None) != bool(node.tiers >> t & 1 and not node.children[t] and not node.holds):
                        faults.append(f"{label} {'is missing in' if place is None else 'stands in'} an order")
                    if place is not None and node.standing not in self._orders.all[place]:
                        faults.append(f"{label} stands in the wrong order")
            resident = [sum(node.tiers >> t & 1 for node in self._nodes.values()) for t in range(self._tiers)]
            counted = [sum(of_kind[t] for of_kind in self._of_kind) for t in range(self._tiers)]
            if counted != resident:
                faults.append(f"index: counts {counted} residents, {resident} are there")
            listed = sum(place is not None for node in self._nodes.values() for place in node.listed)
            if listed != sum(map(len, self._orders.all.values())):
                faults.append("index: orders with strangers in them")
            if any(order != sorted(order) for order in self._orders.all.values()):
                faults.append("index: an order out of order")
            waiting = self._ages.count(self.clock).sum()
            if waiting != self._blocks + len(self._ghosts):
                faults.append(f"index: {waiting} blocks and ghosts by age, {self._blocks} are there")
        return faults

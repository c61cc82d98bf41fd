"""Which records are in which tier, how they hang together, and who leaves next. The plain twin.

A node is one address. Nodes of one group and shard form chains: a node's parent is the record of the block before.
In each tier the nodes that are resident there and have no child resident there stand in lists, one a class of use,
ordered by age, the deeper first among equals; a parent enters when its last child leaves. Victims are taken from the
heads of these lists by the policy's table of values, so that a decision does not depend on how many nodes there are.

Lists are heaps whose entries may be out of date: an entry counts only while its ticket is the node's current one.
A list is rebuilt when most of it is out of date, so its length stays within a small multiple of the live entries.

The clock is a count of requests. Thread-safe; no call does I/O.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvcache.block.address import KEY_BYTES, Address
from kvcache.evict.policy import AGE_BINS, Policy, age_bin


@dataclass(slots=True, eq=False)
class Node:
    name: bytes
    address: Address | None  # None: only remembered as the parent of children whose own parent is gone
    parent: bytes  # the parent's name, empty for the first block or where unknown
    tiers: int = 0  # bit mask
    children: list[int] = field(default_factory=list)  # resident children, by tier
    tickets: list[int] = field(default_factory=list)  # the current list entry, by tier; 0: in no list
    depth: int = 0
    uses: int = 0
    stamp: int = 0
    holds: int = 0


Entry = tuple[int, int, int, Node]  # stamp, -depth, ticket, node


class Index:
    def __init__(self, tiers: Sequence[str], policy: Policy) -> None:
        self.tiers = tuple(tiers)
        self.policy = policy
        self.clock = 0
        self._bit = {tier: i for i, tier in enumerate(tiers)}
        self._nodes: dict[bytes, Node] = {}
        classes = len(policy.bounds) + 1
        # by tier, by whether a tier below has it too, by class
        self._lists: list[list[list[list[Entry]]]] = [[[[] for _ in range(classes)] for _ in "01"] for _ in tiers]
        self._live = [[[0] * classes for _ in "01"] for _ in tiers]
        self._place: dict[int, tuple[int, int, int]] = {}  # ticket -> tier, below, class
        self._next_ticket = 1
        self._resident = [0] * len(self.tiers)
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._nodes)

    def tick(self) -> int:
        """A request begins: the new time."""
        with self._lock:
            self.clock += 1
            return self.clock

    # asking

    def where(self, names: Iterable[bytes]) -> list[int]:
        """By name, the mask of tiers that have it: bit i is tier i, the nearest is the lowest bit."""
        nodes = self._nodes
        with self._lock:
            return [node.tiers if (node := nodes.get(name)) is not None else 0 for name in names]

    def resident(self, tier: str) -> int:
        return self._resident[self._bit[tier]]

    def stamp(self, name: bytes) -> int:
        """When it was last used; now, for one that is not here."""
        with self._lock:
            node = self._nodes.get(name)
            return self.clock if node is None else node.stamp

    def names(self, tier: str) -> set[bytes]:
        """All that a tier has: for audits."""
        with self._lock:
            return {name for name, node in self._nodes.items() if node.tiers >> self._bit[tier] & 1}

    def contains(self, name: bytes, tier: str | None = None) -> bool:
        mask = self.where([name])[0]
        return bool(mask if tier is None else mask >> self._bit[tier] & 1)

    # changing

    def insert(self, address: Address, tier: str) -> None:
        """The tier has this record now."""
        t, name = self._bit[tier], address.name
        with self._lock:
            node = self._nodes.get(name)
            if node is None:
                node = self._nodes[name] = self._new(name)
            if node.address is None:
                node.address = address
                self._attach(node, address)
            if node.tiers >> t & 1:
                return
            self._count_child(node, t, 1)
            node.tiers |= 1 << t
            self._resident[t] += 1
            self._relist(node)

    def discard(self, address: Address, tier: str, *, unless_held: bool = False) -> bool:
        """The tier has it no more. True where it had it."""
        with self._lock:
            node = self._nodes.get(address.name)
            if node is None or not node.tiers >> self._bit[tier] & 1 or (unless_held and node.holds):
                return False
            self._drop(node, self._bit[tier])
            return True

    def touch(self, names: Sequence[bytes], stamp: int) -> None:
        """Count a use of each at this time."""
        with self._lock:
            for name in names:
                node = self._nodes.get(name)
                if node is not None:
                    node.uses += 1
                    node.stamp = max(node.stamp, stamp)
                    self._relist(node)

    def hold(self, names: Sequence[bytes]) -> list[bytes]:
        """Keep these from leaving; the names that were there. Give each back with `release`."""
        held = []
        with self._lock:
            for name in names:
                node = self._nodes.get(name)
                if node is not None and node.tiers:
                    node.holds += 1
                    held.append(name)
                    self._relist(node)
        return held

    def release(self, names: Iterable[bytes]) -> None:
        with self._lock:
            for name in names:
                node = self._nodes[name]
                node.holds -= 1
                self._relist(node)
                self._forget(node)

    def evict(
        self,
        tier: str,
        *,
        before: int | None = None,
        stored_below: bool = False,
    ) -> tuple[Address, bool] | None:
        """Take the least valuable record out of a tier: its address, and whether another tier still has it.

        `before`: only one last used earlier than this time (a request never evicts its own chain). `stored_below`:
        only one that a tier below has too. None where there is none.
        """
        t = self._bit[tier]
        with self._lock:
            values = self.policy.values(self._counts(t))
            node = self._worst(t, (1,) if stored_below else (0, 1), values, before)
            if node is None:
                return None
            assert node.address is not None
            address, kept = node.address, bool(node.tiers & ~(1 << t))
            self._drop(node, t)
            return address, kept

    # within

    def _new(self, name: bytes) -> Node:
        return Node(name, None, b"", children=[0] * len(self.tiers), tickets=[0] * len(self.tiers), stamp=self.clock)

    def _attach(self, node: Node, address: Address) -> None:
        """Hang a node under its parent, known by now or not."""
        if address.parent and address.parent != address.namespace:
            node.parent = address.parent[:KEY_BYTES] + node.name[KEY_BYTES:]
            parent = self._nodes.get(node.parent)
            if parent is not None:
                node.depth = parent.depth + 1

    def _count_child(self, node: Node, t: int, change: int) -> None:
        if not node.parent:
            return
        parent = self._nodes.get(node.parent)
        if parent is None:
            parent = self._nodes[node.parent] = self._new(node.parent)
        parent.children[t] += change
        self._relist(parent)
        self._forget(parent)

    def _drop(self, node: Node, t: int) -> None:
        node.tiers &= ~(1 << t)
        self._resident[t] -= 1
        self._unlist(node, t)
        self._count_child(node, t, -1)
        self._relist(node)
        self._forget(node)

    def _forget(self, node: Node) -> None:
        if not node.tiers and not node.holds and not any(node.children):
            self._nodes.pop(node.name, None)

    def _relist(self, node: Node) -> None:
        """Put the node where it belongs in every tier's lists."""
        for t in range(len(self.tiers)):
            self._unlist(node, t)
            if node.tiers >> t & 1 and not node.children[t] and not node.holds:
                below = int(node.tiers >> (t + 1) != 0)
                c = sum(node.uses >= bound for bound in self.policy.bounds)
                ticket, self._next_ticket = self._next_ticket, self._next_ticket + 1
                node.tickets[t] = ticket
                self._place[ticket] = (t, below, c)
                self._live[t][below][c] += 1
                entries = self._lists[t][below][c]
                heapq.heappush(entries, (node.stamp, -node.depth, ticket, node))
                if len(entries) > 64 + 4 * self._live[t][below][c]:
                    entries[:] = [e for e in entries if e[3].tickets[t] == e[2]]
                    heapq.heapify(entries)

    def _unlist(self, node: Node, t: int) -> None:
        ticket = node.tickets[t]
        if ticket:
            _, below, c = self._place.pop(ticket)
            self._live[t][below][c] -= 1
            node.tickets[t] = 0

    def _counts(self, t: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """How many wait in each class. The twin does not sort them into age bins: they stand in the first."""
        counts = np.zeros((len(self.policy.bounds) + 1, AGE_BINS), np.int64)
        counts[:, 0] = np.sum(self._live[t], axis=0)
        return counts

    def _worst(
        self,
        t: int,
        belows: Sequence[int],
        values: np.ndarray[tuple[int, ...], np.dtype[np.float64]],
        before: int | None,
    ) -> Node | None:
        """The least valuable head of the tier's lists, left in place."""
        worst: tuple[float, int, int, int, Node] | None = None
        for below in belows:
            for c, entries in enumerate(self._lists[t][below]):
                while entries and entries[0][3].tickets[t] != entries[0][2]:
                    heapq.heappop(entries)
                if not entries:
                    continue
                stamp, depth, _, node = entries[0]
                if before is not None and stamp >= before:
                    continue
                # among equals those stored below first, then the older, then the deeper
                candidate = (float(values[c, age_bin(self.clock - stamp)]), -below, stamp, depth, node)
                if worst is None or candidate[:4] < worst[:4]:
                    worst = candidate
        return None if worst is None else worst[4]

    def check(self) -> list[str]:
        """Counts, lists and links against what a walk over all nodes finds."""
        faults = []
        with self._lock:
            children: dict[bytes, list[int]] = {}
            resident = [0] * len(self.tiers)
            for node in self._nodes.values():
                for t in range(len(self.tiers)):
                    if node.tiers >> t & 1:
                        resident[t] += 1
                        if node.parent:
                            children.setdefault(node.parent, [0] * len(self.tiers))[t] += 1
            for node in self._nodes.values():
                label = node.name.hex()
                if node.children != children.get(node.name, [0] * len(self.tiers)):
                    faults.append(
                        f"index: {label} counts {node.children} children, {children.get(node.name)} are there"
                    )
                if not node.tiers and not node.holds and not any(node.children):
                    faults.append(f"index: {label} is remembered for nothing")
                for t in range(len(self.tiers)):
                    listed = bool(node.tickets[t])
                    if listed != bool(node.tiers >> t & 1 and not node.children[t] and not node.holds):
                        faults.append(
                            f"index: {label} {'stands' if listed else 'is missing'} in {self.tiers[t]}'s lists"
                        )
            if resident != self._resident:
                faults.append(f"index: counts {self._resident} residents, {resident} are there")
            if len(self._place) != sum(n > 0 for node in self._nodes.values() for n in node.tickets):
                faults.append("index: tickets without a node")
        return faults

    def held(self) -> int:
        """How many holds there are, in all."""
        with self._lock:
            return sum(node.holds for node in self._nodes.values())

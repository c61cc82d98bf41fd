"""The index in plain Python: the twin of `kvcache._native.Index`, and the definition of each of its calls.

A node is one block of one shard (namespace, group, shard). Its parent is the block before it of the same shard. Each
tier orders its evictable nodes: those that it has, without children in the tier and without holds. There is one order
for each cost class, each class of use, and whether a lower tier also has the node. An order is sorted by last use,
then deeper first, then by name. All blocks of one shard are of one cost class; `evict` compares classes by their
weights. A parent enters its order, at its sorted position, when its last child is removed. A node without a tier is
kept while it is held or has a child in some tier. After that it becomes a ghost, of which a bounded number is kept.

The clock is a count of requests. No call does I/O. Signatures are packed, 32 bytes each, for consecutive blocks of one
chain. Tiers are numbers, 0 is the fastest. A mask has bit i set if tier i has the block.

`AuditedIndex` is the twin of csrc/host/audit.cpp.

Thread safety: any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from itertools import islice
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import SIGNATURE_BYTES, digest_chain
from kvcache.index.block_run import ALL_BLOCKS, SHARD_KEY_BYTES, PackedSignatures, usable_prefix
from kvcache.index.reference.eviction_order import USES_BITS, AgeHistogram, ReferenceOrders, UseClasses
from kvcache.index.reference.ghosts import (
    UNKNOWN_PARENT,
    BlockName,
    LastUse,
    Node,
    ReferenceGhosts,
    block_names,
    is_descendant,
)

# Audit: counts, orders and links against a walk over all nodes.


class TraceRun(NamedTuple):
    """Requests `first` to `end` of a trace, to replay in one shard."""

    shard_key: bytes
    starts: NDArray[np.int64]
    """Where each request's blocks begin in `blocks`; one more than there are requests."""
    blocks: NDArray[np.int32]
    """Block numbers."""
    signatures: NDArray[np.uint64]
    """By block number, of shape (unique, 4)."""
    first: int
    end: int
    capacity: int
    """In blocks."""
    values: NDArray[np.float64]
    """The policy's table, by class of use and bin of age."""
    hits: NDArray[np.int32]
    """Output: by request from `first` on, how many of its leading blocks were cached."""
    refuses: bool = True
    """False lets new blocks evict records worth more as well."""


class AuditedIndex:
    clock: int
    _tiers: int
    _nodes: dict[BlockName, Node]
    _by_cost_class: list[list[int]]
    _blocks: int
    _orders: ReferenceOrders
    _ages: AgeHistogram
    _ghosts: ReferenceGhosts
    _lock: threading.RLock

    def __len__(self) -> int:
        return len(self._nodes)

    def resident(self, tier: int) -> int:
        return sum(self.resident_by_class(tier))

    def resident_by_class(self, tier: int) -> list[int]:  # by cost class
        with self._lock:
            return [of_class[tier] for of_class in self._by_cost_class]

    def ghosts(self) -> int:
        return len(self._ghosts)

    def held(self) -> int:
        with self._lock:
            return sum(node.holds for node in self._nodes.values())

    def names(self, tier: int) -> bytes:  # shard key and signature of each record in the tier, concatenated
        with self._lock:
            return b"".join(
                shard_key + sign for (shard_key, sign), node in self._nodes.items() if node.tiers >> tier & 1
            )

    def check(self) -> list[str]:
        """Faults in counts, orders and links, found by a walk over all nodes."""
        faults = []
        with self._lock:
            children: dict[BlockName, list[int]] = {}
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
                for t, position in enumerate(node.listed):
                    if (position is not None) != bool(node.tiers >> t & 1 and not node.children[t] and not node.holds):
                        faults.append(f"{label} {'is missing in' if position is None else 'stands in'} an order")
                    if position is not None and node.standing not in self._orders.all[position]:
                        faults.append(f"{label} stands in the wrong order")
            resident = [sum(node.tiers >> t & 1 for node in self._nodes.values()) for t in range(self._tiers)]
            counted = [sum(of_class[t] for of_class in self._by_cost_class) for t in range(self._tiers)]
            if counted != resident:
                faults.append(f"index: counts {counted} residents, {resident} are there")
            listed = sum(position is not None for node in self._nodes.values() for position in node.listed)
            if listed != sum(map(len, self._orders.all.values())):
                faults.append("index: orders with strangers in them")
            if any(order != sorted(order) for order in self._orders.all.values()):
                faults.append("index: an order out of order")
            waiting = self._ages.count(self.clock).sum()
            if waiting != self._blocks + len(self._ghosts):
                faults.append(f"index: {waiting} blocks and ghosts by age, {self._blocks} are there")
        return faults


Victim = tuple[bytes, bytes, bytes, bool]  # shard key, signature, parent, whether another tier still has it

MAX_TIERS = 4
ROW_BYTES = SHARD_KEY_BYTES + SIGNATURE_BYTES
MAX_FORGOTTEN_PER_TICK = 64
"""The most excess ghosts that one `tick` forgets."""


class ReferenceIndex(AuditedIndex):
    """See the module.

    Args:
        bounds: with `gaps`, the classes of use (`UseClasses`).
        edges: the lowest age of each bin.
        ghosts: how many evicted blocks are remembered for each block that some tier has.
    """

    def __init__(
        self, tiers: int, bounds: Sequence[int], edges: Sequence[int], ghosts: float, gaps: Sequence[int] = ()
    ) -> None:
        if not 1 <= tiers <= MAX_TIERS:
            raise ValueError(f"{tiers} tiers: expected 1 to {MAX_TIERS}")
        self.clock = 0
        self._tiers, self._ghosts_a_block, self._gaps = tiers, ghosts, len(gaps)
        self._nodes: dict[BlockName, Node] = {}
        self._blocks = 0  # nodes that some tier has
        classes = UseClasses(bounds, gaps)
        self._cost_classes: dict[bytes, int] = {}  # by shard key; those without an entry are of class 0
        self._by_cost_class = [[0] * tiers]  # records by class and tier
        self._ages = AgeHistogram(len(classes), edges)
        self._orders = ReferenceOrders(tiers, classes, self._ages)
        self.use_class, self._again = classes.of, classes.again
        self._reused = np.zeros((len(classes), len(edges)), np.int64)
        self._forgotten = np.zeros((len(classes), len(edges)), np.int64)
        self._ghosts = ReferenceGhosts()
        self._recalling = False
        self._lock = threading.RLock()

    def tick(self) -> int:
        """Begin a request; the new time."""
        with self._lock:
            self._recalling = False
            self._ghosts.press(self._most_ghosts(), MAX_FORGOTTEN_PER_TICK)
            self._trim_ghosts()
            self.clock += 1
            self._ages.tick(self.clock)
            return self.clock

    def assign(self, shard_keys: Sequence[bytes], cost_class: int) -> None:
        """Assign these shards, with current and future blocks, to a cost class. Other shards are of class 0."""
        with self._lock:
            self._by_cost_class += [[0] * self._tiers for _ in range(cost_class + 1 - len(self._by_cost_class))]
            moving = [node for node in self._nodes.values() if node.name[0] in shard_keys]
            for node in moving:
                self._orders.leave(node)
                self._count_residents(node, -1)
            self._cost_classes.update(dict.fromkeys(shard_keys, cost_class))
            for node in moving:
                self._orders.enter(node, cost_class)
                self._count_residents(node, 1)

    # lookups

    def match(
        self, shard_keys: Sequence[bytes], needs: Sequence[int], signatures: PackedSignatures
    ) -> tuple[int, tuple[int, ...]]:
        """The longest prefix for which each shard (one per group) has its last `needs` blocks, and its blocks by tier.

        A block counts for the fastest tier at which, or faster, all of its parts are.
        """
        with self._lock:
            masks = [self.tier_masks(shard_key, signatures) for shard_key in shard_keys]
        found = usable_prefix(needs, masks)
        by_tier = [0] * self._tiers
        for i in range(found):
            parts = (mask[i] for mask, need in zip(masks, needs, strict=True) if i >= found - need)
            by_tier[max(((part & -part).bit_length() - 1 for part in parts), default=0)] += 1
        return found, tuple(by_tier)

    def hash_and_match(
        self,
        parent: bytes,
        tokens: NDArray[Any],
        block_tokens: int,
        extras: list[bytes] | None,
        shard_keys: Sequence[bytes],
        needs: Sequence[int],
    ) -> tuple[bytes, int, tuple[int, ...]]:
        """`digest_chain` and `match` of its result in one call: the signatures, then the result of `match`."""
        signatures = digest_chain(parent, tokens, block_tokens, extras)
        return signatures, *self.match(shard_keys, needs, signatures)

    def tier_masks(self, shard_key: bytes, signatures: PackedSignatures) -> bytes:
        """One mask per block."""
        with self._lock:
            found = (self._nodes.get(name) for name in block_names(shard_key, signatures))
            return bytes(node.tiers if node is not None else 0 for node in found)

    def stamp(self, shard_key: bytes, signature: bytes) -> int:
        """The time of its last use; the current time for an unknown block."""
        with self._lock:
            node = self._nodes.get((shard_key, signature))
            return self.clock if node is None else node.stamp

    def uses(self, shard_key: bytes, signatures: PackedSignatures) -> bytes:
        """The use byte of each, for `use_class`, if a tier stored it now: one more use if a ghost returns."""
        with self._lock:
            return bytes(map(self._uses, block_names(shard_key, signatures)))

    def _uses(self, name: BlockName) -> int:
        node, ghost = self._nodes.get(name), self._ghosts.find(name)
        if ghost is not None and (node is None or not node.known):
            return self._again(ghost.uses, self.clock - ghost.stamp)
        return node.uses if node is not None else 0

    def waiting(self) -> NDArray[np.int64]:
        """Blocks that some tier has and ghosts, by (class, age bin)."""
        with self._lock:
            return self._ages.count(self.clock)

    def reused(self) -> NDArray[np.int64]:
        """How often blocks were reused since the start, by class and age bin before that use."""
        with self._lock:
            return np.array(self._reused)

    def forgotten(self) -> NDArray[np.int64]:
        """How many ghosts were forgotten, by (class, age bin) at that time."""
        with self._lock:
            return np.array(self._forgotten)

    def learn(self, reused: NDArray[np.int64], forgotten: NDArray[np.int64]) -> None:
        """Add counts by (class, age bin) from an earlier process."""
        with self._lock:
            self._reused += reused
            self._forgotten += forgotten

    def export_state(self, most: int) -> bytes:
        """The state that outlives a process.

        Returns:
            The hashes' secret, the clock, then at most `most` rows of 8 bytes: ghosts first, then blocks that some tier
            has. A row has 48 bits of a keyed hash, the use byte and the age bin.
        """
        with self._lock:
            resident_nodes = (node for node in self._nodes.values() if node.tiers)
            resident_rows = [
                (self._ghosts.print(n.name), LastUse(n.stamp, n.uses)) for n in islice(resident_nodes, most)
            ]
            rows = [*self._ghosts.newest(most - len(resident_rows)), *resident_rows]
            packed = [p | u.uses << 48 | self._ages.bin(self.clock - u.stamp) << 56 for p, u in rows]
            return np.array([*self._ghosts.secret, self.clock, *packed], "<u8").tobytes()

    def import_state(self, state: bytes) -> None:
        """Restore the `kept` state of another index into a new one, as ghosts.

        A block inserted before the first `tick` continues with its earlier use count, and the insertion is no use.
        Raises ValueError if the state does not fit this index.
        """
        words = np.frombuffer(state, "<u8").tolist()
        with self._lock:
            valid = len(words) >= 4 and not (self.clock or self._nodes or len(self._ghosts)) and words[3] < 1 << 39
            bins, gaps = [word >> 56 for word in words[4:]], [word >> 48 + USES_BITS & 7 for word in words[4:]]
            if not valid or max(bins, default=0) >= len(self._ages.edges) or max(gaps, default=0) > self._gaps:
                raise ValueError("the state does not fit this index, or the index is not new")
            self._ghosts.secret, self.clock, self._recalling = tuple(words[:3]), words[3], True
            self._ages.begin(self.clock)
            for word, b in zip(words[4:], bins, strict=True):
                stamp, uses = max(0, self.clock - self._ages.edges[b]), word >> 48 & 0xFF
                if self._ghosts.put(word & (1 << 48) - 1, LastUse(stamp, uses)):
                    self._ages.add(self.use_class(uses), stamp, 1)
            self._ghosts.spare()

    # changes

    def insert(self, shard_key: bytes, signatures: PackedSignatures, parent: bytes, tier: int) -> None:
        """Record that the tier has these.

        `parent`: the signature before the first, else the namespace; empty: unknown.
        """
        with self._lock:
            for name in block_names(shard_key, signatures):
                node = self._get(name)
                if not node.tiers:
                    self._attach(node, parent)
                if not node.tiers >> tier & 1:
                    self._orders.leave(node)
                    self._by_cost_class[self._cost_class(name)][tier] += 1
                    node.tiers |= 1 << tier
                    self._count_child(node.parent_name, tier, 1)
                    self._orders.enter(node, self._cost_class(node.name))
                parent = name[1]

    def refuse(self, shard_key: bytes, signatures: PackedSignatures) -> None:
        """Record that no tier took these. Unknown blocks become ghosts at once, as if stored and evicted."""
        with self._lock:
            for name in block_names(shard_key, signatures):
                if self._ghosts_a_block and name not in self._nodes:
                    self._remember(name, LastUse(self.clock, self._return(name, 0)))
            self._trim_ghosts()

    def discard(self, shard_key: bytes, signature: bytes, tier: int, unless_held: bool) -> bool:
        """Record that the tier has lost it. True if the tier had it."""
        with self._lock:
            node = self._nodes.get((shard_key, signature))
            if node is None or not node.tiers >> tier & 1 or (unless_held and node.holds):
                return False
            self._drop(node, tier)
            return True

    def touch(self, shard_key: bytes, signatures: PackedSignatures, stamp: int) -> None:
        """Count a use of each at this time, which is at most the current time."""
        with self._lock:
            stamp = min(stamp, self.clock)
            for name in block_names(shard_key, signatures):
                node = self._nodes.get(name)
                if node is not None:
                    age = max(0, stamp - node.stamp)
                    if node.tiers:
                        self._count_reuse(node.uses, age)
                    self._set(node, max(node.stamp, stamp), self._again(node.uses, age))

    def restore_use(self, shard_key: bytes, signatures: PackedSignatures, stamp: int, uses: int) -> None:
        """Restore the last use and use count of each block that some tier has; not counted as a use."""
        with self._lock:
            for name in block_names(shard_key, signatures):
                node = self._nodes.get(name)
                if node is not None and node.tiers:
                    self._set(node, min(stamp, self.clock), uses)

    def hold(self, shard_key: bytes, signatures: PackedSignatures, room: Sequence[int]) -> tuple[int, ...]:
        """Hold leading blocks; the number held, by fastest tier. Release each with `release`.

        Stops at the first block that no tier has or whose fastest tier has no `room` left.
        """
        held = [0] * self._tiers
        with self._lock:
            for name in block_names(shard_key, signatures):
                node = self._nodes.get(name)
                if node is None or not node.tiers:
                    break
                nearest = (node.tiers & -node.tiers).bit_length() - 1
                if held[nearest] == room[nearest]:
                    break
                self._orders.leave(node)
                node.holds += 1
                held[nearest] += 1
        return tuple(held)

    def release(self, shard_key: bytes, signatures: PackedSignatures) -> None:
        with self._lock:
            for name in block_names(shard_key, signatures):
                node = self._nodes.get(name)
                if node is None or not node.holds:
                    raise ValueError("release of a block that is not held: release each hold once")
                node.holds -= 1
                self._orders.enter(node, self._cost_class(node.name))
                self._forget(node)
            self._trim_ghosts()

    def evict(
        self,
        tier: int,
        values: NDArray[np.float64],
        count: int,
        before: int | None,
        stored_below: bool,
        weights: Sequence[float] = (),
        most: float = inf,
    ) -> list[Victim]:
        """Evict at most `count` records of a tier, the least valuable first.

        Among equals, records that a lower tier also has are evicted first, then by order.

        Args:
            values: by (class, age bin); infinity prevents eviction.
            before: evict only records last used before this time.
            stored_below: evict only records that a lower tier also has.
            weights: by cost class, the factor for `values`; infinity prevents eviction. Missing classes weigh 1.
            most: evict nothing worth more.
        """
        victims: list[Victim] = []
        with self._lock:
            worst = partial(self._orders.worst, tier, values, weights, self.clock, before, stored_below, most)
            while len(victims) < count and (found := worst()) is not None:
                node = self._nodes[found[3], found[2]]
                victims.append((*node.name, node.parent, node.tiers != 1 << tier))
                self._drop(node, tier)
        return victims

    def worth(self, tier: int, values: NDArray[np.float64], records: bytes, weights: Sequence[float] = ()) -> float:
        """The total worth of these records to a tier, as `evict` values them.

        Infinity if one cannot be evicted: the tier lacks it, it is held, or its worth is infinite.

        Args:
            records: shard key and signature of each, as in `names`.
        """
        worth = 0.0
        with self._lock:
            for row in range(0, len(records), ROW_BYTES):
                name = records[row : row + SHARD_KEY_BYTES], records[row + SHARD_KEY_BYTES : row + ROW_BYTES]
                node = self._nodes.get(name)
                if node is None or not node.tiers >> tier & 1 or node.holds:
                    return inf
                worth += self._orders.value(node, self._cost_class(name), values, weights, self.clock)
        return worth

    # internal

    def _cost_class(self, name: BlockName) -> int:
        return self._cost_classes.get(name[0], 0)

    def _count_residents(self, node: Node, change: int) -> None:
        for t in range(self._tiers):
            self._by_cost_class[self._cost_class(node.name)][t] += change * (node.tiers >> t & 1)

    def _get(self, name: BlockName) -> Node:  # created if missing
        return self._nodes.get(name) or self._nodes.setdefault(name, Node(name, self._tiers, self.clock))

    def _attach(self, node: Node, parent: bytes) -> None:
        """Link a node that a tier is about to have."""
        shard_key, _ = node.name
        if self._recalling and (ghost := self._ghosts.take(node.name)) is not None:
            self._ages.add(self.use_class(ghost.uses), ghost.stamp, -1)
            node.stamp, node.uses = ghost
        else:
            node.uses = self._return(node.name, node.uses)
        node.parent, node.known, node.depth = parent, True, 0
        if parent not in (UNKNOWN_PARENT, shard_key[:SIGNATURE_BYTES]):
            before = self._get((shard_key, parent))
            if is_descendant(self._nodes, before, node):
                node.parent = UNKNOWN_PARENT
            else:
                node.depth = before.depth + 1
        self._blocks += 1
        self._ages.add(self.use_class(node.uses), node.stamp, 1)

    def _set(self, node: Node, stamp: int, uses: int) -> None:
        self._orders.leave(node)
        self._ages.add(self.use_class(node.uses), node.stamp, -bool(node.tiers))
        node.stamp, node.uses = stamp, uses
        self._ages.add(self.use_class(uses), stamp, bool(node.tiers))
        self._orders.enter(node, self._cost_class(node.name))

    def _drop(self, node: Node, tier: int) -> None:
        parent = node.parent_name
        self._orders.leave(node)
        node.tiers &= ~(1 << tier)
        self._by_cost_class[self._cost_class(node.name)][tier] -= 1
        self._orders.enter(node, self._cost_class(node.name))
        if not node.tiers:
            self._blocks -= 1
            self._ages.add(self.use_class(node.uses), node.stamp, -1)
        self._count_child(parent, tier, -1)
        if parent is not None:
            self._forget(self._nodes[parent])
        self._forget(node)
        self._trim_ghosts()

    def _count_child(self, parent: BlockName | None, tier: int, change: int) -> None:
        if parent is not None:
            node = self._nodes[parent]
            self._orders.leave(node)
            node.children[tier] += change
            self._orders.enter(node, self._cost_class(node.name))

    def _forget(self, node: Node) -> None:
        if node.tiers or node.holds or any(node.children):
            return
        del self._nodes[node.name]
        if node.known and self._ghosts_a_block:
            self._remember(node.name, LastUse(node.stamp, node.uses))

    def _remember(self, name: BlockName, use: LastUse) -> None:
        self._ghosts.add(name, use)
        self._ages.add(self.use_class(use.uses), use.stamp, 1)

    def _return(self, name: BlockName, uses: int) -> int:
        """The use count for a returning block.

        A ghost is removed and its reuse counted; without a ghost, `uses` is returned.
        """
        ghost = self._ghosts.take(name)
        if ghost is None:
            return uses
        self._ages.add(self.use_class(ghost.uses), ghost.stamp, -1)
        self._count_reuse(ghost.uses, self.clock - ghost.stamp)
        return self._again(ghost.uses, self.clock - ghost.stamp)

    def _most_ghosts(self) -> int:
        return int(self._ghosts_a_block * self._blocks)

    def _trim_ghosts(self) -> None:
        for ghost in self._ghosts.trim(self._most_ghosts()):
            c = self.use_class(ghost.uses)
            self._ages.add(c, ghost.stamp, -1)
            self._forgotten[c, self._ages.bin(self.clock - ghost.stamp)] += 1

    def _count_reuse(self, uses: int, age: int) -> None:
        self._reused[self.use_class(uses), self._ages.bin(age)] += 1

    def replay(self, *arguments: Any) -> None:
        """Replay part of a trace on an index of one tier, as a cache would: the twin of csrc/host/replay.cpp.

        A request counts its uses, then stores its missing blocks, heads first. Those evict records worth as much as
        themselves or less, never records that the request used. Other blocks are refused and remembered as ghosts.

        Args:
            arguments: the fields of `TraceRun`, as in the native index.
        """
        shard_key, starts, blocks, signatures, first, end, capacity, values, hits, refuses = TraceRun(*arguments)
        for r in range(first, end):
            chain = signatures[blocks[starts[r] : starts[r + 1]]].tobytes()
            now = self.tick()
            at, _ = self.match([shard_key], [ALL_BLOCKS], chain)
            hits[r - first] = at
            self.touch(shard_key, chain[: at * SIGNATURE_BYTES], now)
            classes = [self.use_class(uses) for uses in self.uses(shard_key, chain)]
            stop, room = at, capacity - self.resident(0)
            while stop < len(classes):
                own, alike = classes[stop], 1
                while stop + alike < len(classes) and classes[stop + alike] == own:
                    alike += 1
                if alike > room:
                    room += len(
                        self.evict(
                            0, values, alike - room, now, False, most=float(values[own, 0]) if refuses else np.inf
                        )
                    )
                fits = min(alike, room)
                stop, room = stop + fits, room - fits
                if fits < alike:
                    break
            parent = chain[(at - 1) * SIGNATURE_BYTES : at * SIGNATURE_BYTES] or shard_key[:SIGNATURE_BYTES]
            self.insert(shard_key, chain[at * SIGNATURE_BYTES : stop * SIGNATURE_BYTES], parent, 0)
            self.refuse(shard_key, chain[stop * SIGNATURE_BYTES :])

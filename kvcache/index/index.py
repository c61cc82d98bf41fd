"""The block index: which tier has a record, when it was last used, and which record to evict next.

`Index` wraps the compiled index (`csrc/host`, `kvcache._native.Index`) or, where nothing was compiled, its reference
twin (`reference/index.py`). The twin defines each call and the tests compare both. This module adds tier names,
addresses, the policy's value table and events; the cores work with tier numbers, shard keys and packed signatures.

Structure. A node is one block of one shard. A shard key is 42 bytes: namespace, group and shard. A node has
its parent, its last use, its use count, its holds and the mask of the tiers that hold it. Each tier keeps its evictable
nodes, those without children in that tier and without holds, in ordered lists. Each list is for one cost class, one
class of use, and whether a lower tier also has the record. The order is least recently used first, then deeper first,
then by name.

Alternatives. Engines often keep prefixes in a radix tree over tokens. This index looks up signatures instead. A
signature is a SHA-256 chain over the whole prefix, so one hash lookup per block finds a prefix, and the index holds no
tokens. A policy could score each block. It ranks classes by age instead (`kvcache/evict/policy.py`). An eviction then
costs the same for a thousand blocks and for a million, and a policy never sees an address. Each tier could have its own
index. One index for all tiers answers a match in one walk, and an eviction knows whether a lower tier has the record.

Invariants.

- A call never does I/O.
- Time is a count of requests (`tick`), so that a simulation of a trace repeats a cache exactly.
- `evict` removes children before their parents, so the head of a long prefix stays.
- `evict` never removes a held record, or one with infinite weight or value.
- An evicted block becomes a ghost: its use count is remembered, for a bounded number of blocks.
- Counters, lists and links agree with a walk over all nodes; `check` compares them.

Threads and locks. Every call is thread-safe. Each core has its own lock. The compiled core releases the interpreter
lock for long calls and while it waits. A call of at most 32 blocks keeps it if the core's lock is free. Calls that
change a tier's contents also hold `kv_events.order` while events are recorded, so that events are in the order of the
changes. `tick` replaces the evidence for the value table at growing intervals. `evict` computes the table from that
evidence when it first needs one, so the table does not depend on the moment of the eviction.

Memory. With two tiers and a million blocks the compiled index takes 78 to 80 bytes per node, with four tiers 94 to 96.

To change it. A new call needs an implementation in `reference/index.py` and one in `csrc/host`, and a test that
compares them. The core supports at most four tiers and 4,096 cost classes. Both limits are compiled in. A new policy
changes nothing here; it states its classes of use (`bounds`, `gaps`) and its number of ghosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from math import inf
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache import native
from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import Shard
from kvcache.block.record import KEY_BYTES, Address
from kvcache.evict.policy import AGE_BINS, AGE_EDGES, Evidence, Policy, table_interval_requests
from kvcache.evict.quotas import UNLIMITED
from kvcache.index.block_run import SHARD_KEY_BYTES, BlockRun, PackedSignatures, as_run, shard_key_of
from kvcache.index.kv_events import KVEvent, KVEvents
from kvcache.index.reference.eviction_order import MAX_USES, UseClasses
from kvcache.index.reference.index import ReferenceIndex
from kvcache.os_env import Clock, OsEnv


def evidence_of(core: Any) -> Evidence:
    counts = (np.frombuffer(part(), np.int64) for part in (core.waiting, core.reused, core.forgotten))
    return Evidence(*(count.reshape(-1, AGE_BINS) for count in counts))


def value_table(policy: Policy, evidence: Evidence) -> NDArray[np.float64]:
    values = np.ascontiguousarray(policy.values(evidence), np.float64)
    if not (values >= 0).all():
        raise ValueError(f"policy {policy.name!r} values blocks below 0, or as NaN")
    return values


class Lookup:
    """One lookup: how many leading blocks are usable, and how many of these each tier has.

    `chain.extend(token_ids, digest=lookup)` hashes and looks up in one call.
    """

    def __init__(self, index: Index, core: Any, shard_keys: Sequence[bytes], needs: Sequence[int]) -> None:
        self._tiers, self._core, self._shard_keys, self._needs = index.tiers, core, shard_keys, needs
        self.blocks = 0
        self.ids: NDArray[Any] | None = None  # the hashed tokens; usually the caller's memory
        self._by_tier: tuple[int, ...] = ()

    def __call__(self, parent: bytes, ids: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
        signatures: bytes
        self.ids = ids
        signatures, self.blocks, self._by_tier = self._core.hash_and_match(
            parent, ids, block_tokens, extras, self._shard_keys, self._needs
        )
        return signatures

    def match(self, signatures: PackedSignatures) -> None:
        """Look up signatures that are already hashed."""
        self.blocks, self._by_tier = self._core.match(self._shard_keys, self._needs, signatures)

    @property
    def by_tier(self) -> dict[str, int]:
        """Usable blocks by tier: each counts at the fastest tier that has all of it, else at its slowest part."""
        return {tier: count for tier, count in zip(self._tiers, self._by_tier, strict=False) if count}


class Victim(NamedTuple):
    """A record that the index has evicted. The address is built on request, because many are evicted at a time."""

    shard_key: bytes
    signature: bytes
    parent: bytes
    kept: bool  # another tier still has it

    @property
    def name(self) -> bytes:
        """The record's name in the tiers."""
        return self.signature[:KEY_BYTES] + self.shard_key[SIGNATURE_BYTES:]

    @property
    def namespace(self) -> bytes:
        return self.shard_key[:SIGNATURE_BYTES]

    @property
    def address(self) -> Address:
        group = int.from_bytes(self.shard_key[SIGNATURE_BYTES : SIGNATURE_BYTES + 2], "little")
        shard = _shard(self.shard_key[SIGNATURE_BYTES + 2 :])
        return Address(self.namespace, self.signature, self.parent, group, shard)


_victim: Callable[[tuple[bytes, bytes, bytes, bool]], Victim] = partial(tuple.__new__, Victim)
"""As `Victim._make`, in half the time: thousands of records are evicted a second."""


@lru_cache(maxsize=1 << 12)
def _shard(packed: bytes) -> Shard:
    return Shard.unpack(packed)


def _kv_event(
    kind: Literal["stored", "removed"], tier: str, shard_key: bytes, packed: bytes, parent: bytes = b""
) -> KVEvent:
    at = SIGNATURE_BYTES
    shard = _shard(shard_key[at + 2 :])
    return KVEvent(
        kind=kind,
        tier=tier,
        namespace=shard_key[:at],
        group=int.from_bytes(shard_key[at : at + 2], "little"),
        shard=(shard.first_layer, shard.end_layer, shard.first_head, shard.end_head),
        parent=parent,
        signatures=packed,
    )


class Index:
    """Thread safety: any thread.

    No call does I/O. `plain` selects the reference twin even if the compiled index exists.
    """

    def __init__(
        self,
        tiers: Sequence[str],
        policy: Policy,
        *,
        plain: bool = False,
        clock: Clock | None = None,
        tenant_of: Callable[[bytes], str] = lambda namespace: "",
    ) -> None:
        """`tenant_of` returns the tenant of a namespace, for KV events."""
        if policy.bounds and max(policy.bounds) > MAX_USES:
            raise ValueError(
                f"policy {policy.name!r} tells {max(policy.bounds)} uses apart: expected {MAX_USES} at most"
            )
        self.tiers = tuple(tiers)
        self.policy = policy
        self._number = {tier: t for t, tier in enumerate(tiers)}
        core = ReferenceIndex if plain or not native.available() else native.core.Index
        self._classes = UseClasses(policy.bounds, policy.gaps)
        self.use_class = self._classes.of
        """The class of use of a byte of `uses`."""
        self._core: Any = core(len(tiers), policy.bounds, AGE_EDGES, policy.ghosts, policy.gaps)
        self._evidence: Evidence | None = None  # the evidence for `_table`
        self._table: NDArray[np.float64] | None = None
        self._due = 0  # the clock at which the evidence is replaced
        self._on_request: Callable[[], object] = lambda: None
        self._on_evicted: Callable[[str, list[bytes]], object] = lambda tier, signatures: None
        self.kv_events = KVEvents(clock or OsEnv().clock, tenant_of)
        """Records stored in and removed from tiers, for followers."""

    def subscribe(
        self,
        *,
        on_request: Callable[[], object] | None = None,
        on_evicted: Callable[[str, list[bytes]], object] | None = None,
    ) -> None:
        """Set the subscriber of an event, at most one for each. Call it before the first request.

        Args:
            on_request: called at each request.
            on_evicted: called with a tier, and the signatures evicted from it that no tier has any more.
        """
        self._on_request = on_request or self._on_request
        self._on_evicted = on_evicted or self._on_evicted

    def __len__(self) -> int:
        return len(self._core)

    @property
    def clock(self) -> int:
        """The number of requests so far."""
        return int(self._core.clock)

    def tick(self) -> int:
        """Begin a request; the new time."""
        self._on_request()
        clock = self.clock
        if clock >= self._due:  # the table is computed at the next eviction
            self._evidence, self._table = self.evidence(), None
            self._due = clock + table_interval_requests(clock)
        return int(self._core.tick())

    # lookups

    def lookup(self, shard_keys: Sequence[bytes], needs: Sequence[int]) -> Lookup:
        """Begin a lookup. `shard_keys`: one per group; `needs`: how many last blocks each group needs."""
        return Lookup(self, self._core, shard_keys, needs)

    def tier_masks(self, run: BlockRun) -> bytes:
        """One mask per block: bit i is tier i, and the lowest bit is the fastest tier."""
        masks: bytes = self._core.tier_masks(*run)
        return masks

    def mask(self, address: Address) -> int:
        return self.tier_masks(BlockRun.of(address))[0]

    def masks(self, addresses: Sequence[Address]) -> list[int]:
        """As `where`, for arbitrary records."""
        masks = [0] * len(addresses)
        shard_keys: dict[bytes, list[int]] = {}
        for i, address in enumerate(addresses):
            shard_keys.setdefault(shard_key_of(address), []).append(i)
        for numbers in shard_keys.values():
            for i, mask in zip(numbers, self.tier_masks(as_run([addresses[i] for i in numbers])), strict=True):
                masks[i] = mask
        return masks

    def contains(self, address: Address, tier: str | None = None) -> bool:
        mask = self.mask(address)
        return bool(mask if tier is None else mask >> self._number[tier] & 1)

    def stamp(self, address: Address) -> int:
        """The time of its last use; the current time for an unknown record."""
        return int(self._core.stamp(*BlockRun.of(address)))

    def resident(self, tier: str) -> int:
        return int(self._core.resident(self._number[tier]))

    def resident_by_class(self, tier: str) -> list[int]:
        """The number of records in the tier, by cost class."""
        counts: list[int] = self._core.resident_by_class(self._number[tier])
        return counts

    # changes

    def assign(self, shard_keys: Sequence[bytes], cost_class: int) -> None:
        """Assign current and future records of these shards to a cost class; the default is class 0.

        Walks over all blocks if some of these shards already have blocks.
        """
        self._core.assign(list(shard_keys), cost_class)

    def insert(self, address: Address, tier: str) -> None:
        """Record that the tier now has this record."""
        self.insert_run(BlockRun.of(address), address.parent, tier)

    def insert_run(self, run: BlockRun, parent: bytes, tier: str) -> None:
        """Record that the tier now has these records. `parent`: the parent of the first, as in an address."""
        with self.kv_events.order:
            self._core.insert(*run, parent, self._number[tier])
            if self.kv_events.on:
                self.kv_events.add(_kv_event("stored", tier, run.shard_key, bytes(run.signatures), parent))

    def discard(self, address: Address, tier: str, *, unless_held: bool = False) -> bool:
        """Record that the tier has lost it. True if the tier had it."""
        run = BlockRun.of(address)
        with self.kv_events.order:
            had = bool(self._core.discard(*run, self._number[tier], unless_held))
            if had and self.kv_events.on:
                self.kv_events.add(_kv_event("removed", tier, run.shard_key, address.signature))
        if had and unless_held and not self.mask(address):
            self._on_evicted(tier, [address.signature])
        return had

    def uses(self, run: BlockRun) -> bytes:
        """The use count of each, as it would be if the block were stored now."""
        uses: bytes = self._core.uses(*run)
        return uses

    def refuse(self, run: BlockRun) -> None:
        """Record that no tier took these. Blocks without a tier become ghosts, as if stored and evicted."""
        self._core.refuse(*run)

    def touch(self, run: BlockRun, stamp: int) -> None:
        """Count a use of each at this time."""
        self._core.touch(*run, stamp)

    def advance_clock(self, clock: int) -> None:
        """Advance the clock to an earlier process's count of requests, unless it is already later."""
        while self._core.clock < clock:
            self._core.tick()

    def restore_use(self, run: BlockRun, stamp: int, uses: int) -> None:
        """Restore the last use and use count from an earlier process; not counted as a use.

        `uses` that this policy has no class for are restored as none.
        """
        self._core.restore_use(*run, stamp, uses if self.use_class(uses) < len(self._classes) else 0)

    def hold(self, run: BlockRun, room: Sequence[int] | None = None) -> tuple[int, ...]:
        """Hold leading blocks; the number held, by fastest tier. Release the same number with `release`.

        Stops at the first block that no tier has or whose fastest tier has no `room` left.
        """
        held: tuple[int, ...] = self._core.hold(*run, room or (UNLIMITED,) * len(self.tiers))
        return held

    def release(self, run: BlockRun) -> None:
        self._core.release(*run)

    def evict(
        self,
        tier: str,
        count: int = 1,
        *,
        before: int | None = None,
        stored_below: bool = False,
        worth: int | None = None,
        weight: float = 1.0,
        weights: Sequence[float] = (),
    ) -> list[Victim]:
        """Evict the least valuable records of a tier, at most `count`.

        Args:
            before: evict only records last used before this time, so that a request never evicts its own chain.
            stored_below: evict only records that a lower tier also has.
            worth: evict nothing worth more than a new record with these `uses` and this `weight`.
            weights: by cost class, the factor for the policy's values; infinity prevents eviction. Missing classes
                weigh 1.
        """
        table, most = self.values(), inf
        if worth is not None and self.policy.bounds:
            most = float(table[self.use_class(worth), 0]) * weight
        with self.kv_events.order:
            victims = self._core.evict(self._number[tier], table, count, before, stored_below, weights, most)
            if victims and self.kv_events.on:
                self._emit_removed(tier, victims)
        evicted = [signature for _, signature, _, kept in victims if not kept]
        if evicted:
            self._on_evicted(tier, evicted)
        return list(map(_victim, victims))

    def worth(self, tier: str, addresses: Sequence[Address], weights: Sequence[float] = ()) -> float:
        """The total worth of these records to a tier, as `evict` values them; infinity if one cannot be evicted."""
        rows = b"".join([shard_key_of(address) + address.signature for address in addresses])
        return float(self._core.worth(self._number[tier], self.values(), rows, weights))

    # audits

    def names(self, tier: str) -> set[bytes]:
        """Names of all records in a tier, as the tiers name them."""
        rows = self._core.names(self._number[tier])
        size = SHARD_KEY_BYTES + SIGNATURE_BYTES
        return {
            rows[at + SHARD_KEY_BYTES : at + SHARD_KEY_BYTES + KEY_BYTES]
            + rows[at + SIGNATURE_BYTES : at + SHARD_KEY_BYTES]
            for at in range(0, len(rows), size)
        }

    def records_by_shard(self, tier: str) -> dict[bytes, int]:
        """The number of records in a tier, by shard key."""
        rows = np.frombuffer(self._core.names(self._number[tier]), np.uint8).reshape(
            -1, SHARD_KEY_BYTES + SIGNATURE_BYTES
        )
        words = np.ascontiguousarray(rows[:, SHARD_KEY_BYTES - 16 : SHARD_KEY_BYTES]).view(np.uint64)
        own = np.ascontiguousarray(rows[:, :8]).view(np.uint64)[:, 0]
        mixed = own ^ words[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ words[:, 1] * np.uint64(0xC2B2AE3D27D4EB4F)
        _, first, counts = np.unique(mixed, return_index=True, return_counts=True)
        return {rows[i, :SHARD_KEY_BYTES].tobytes(): n for i, n in zip(first.tolist(), counts.tolist(), strict=True)}

    def held(self) -> int:
        """The total number of holds."""
        return int(self._core.held())

    def ghosts(self) -> int:
        """The number of evicted blocks that are remembered."""
        return int(self._core.ghosts())

    def memory(self) -> tuple[int, int]:
        """Bytes of memory for blocks and for ghosts; compiled index only."""
        return int(self._core.bytes()), int(self._core.ghost_bytes())

    def evidence(self) -> Evidence:
        """The counts that the policy computes its values from."""
        return evidence_of(self._core)

    def learn(self, reused: NDArray[np.int64], forgotten: NDArray[np.int64]) -> None:
        """Add counts by (class, age bin) from an earlier process: blocks reused, and blocks last seen waiting."""
        self._core.learn(reused, forgotten)
        self._table, self._due = None, 0

    def export_state(self, most: int) -> bytes:
        """The state of single blocks that outlives the process: at most `most` rows of 8 bytes, and 32 bytes more."""
        packed_rows: bytes = self._core.export_state(most)
        return packed_rows

    def import_state(self, packed_rows: bytes) -> None:
        """Restore the rows of an earlier process's `kept` into a new index.

        All rows become ghosts. Blocks inserted before the first request continue with their earlier use count. Raises
        ValueError if the rows do not fit this index.
        """
        self._core.import_state(packed_rows)

    def check(self) -> list[str]:
        """A full audit; one line per fault, empty if sound."""
        faults: list[str] = self._core.check()
        return faults

    # internal

    def _emit_removed(self, tier: str, victims: Sequence[tuple[bytes, bytes, bytes, bool]]) -> None:
        shard_keys: dict[bytes, list[bytes]] = {}
        for shard_key, signature, _, _ in victims:
            shard_keys.setdefault(shard_key, []).append(signature)
        for shard_key, signatures in shard_keys.items():
            self.kv_events.add(_kv_event("removed", tier, shard_key, b"".join(signatures)))

    def values(self) -> NDArray[np.float64]:
        """The policy's current table."""
        table = self._table
        if table is None:
            table = self._table = value_table(self.policy, self._evidence or self.evidence())
        return table

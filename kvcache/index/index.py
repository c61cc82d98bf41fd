"""Which records are in which tier, how they hang together, and who leaves next.

The compiled index where it was built, else its plain twin, which says what each call means (`plain_index.py`). Here
tiers have names, records have addresses, and the policy is asked for its table.
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
from kvcache.index.block_run import PLACE_BYTES, BlockRun, PackedSignatures, as_run, place_of_address
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
    """One question: how many blocks from the first can be used, and by tier how many of these.

    `chain.extend(token_ids, digest=lookup)` hashes and looks up in one call.
    """

    def __init__(self, index: Index, core: Any, places: Sequence[bytes], needs: Sequence[int]) -> None:
        self._tiers, self._core, self._places, self._needs = index.tiers, core, places, needs
        self.blocks = 0
        self.ids: NDArray[Any] | None = None  # those that were hashed: the caller's memory, as a rule
        self._by_tier: tuple[int, ...] = ()

    def __call__(self, parent: bytes, ids: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
        signatures: bytes
        self.ids = ids
        signatures, self.blocks, self._by_tier = self._core.ask(
            parent, ids, block_tokens, extras, self._places, self._needs
        )
        return signatures

    def match(self, signatures: PackedSignatures) -> None:
        """Look up what is hashed already."""
        self.blocks, self._by_tier = self._core.match(self._places, self._needs, signatures)

    @property
    def by_tier(self) -> dict[str, int]:
        """Each block at the nearest tier that has all of it, or its farthest part."""
        return {tier: count for tier, count in zip(self._tiers, self._by_tier, strict=False) if count}


class Victim(NamedTuple):
    """A record that the index let go of. Its address is made only where it is asked for: many leave at a time."""

    place: bytes
    signature: bytes
    parent: bytes
    kept: bool  # another tier still has it

    @property
    def name(self) -> bytes:
        """As tiers name it."""
        return self.signature[:KEY_BYTES] + self.place[SIGNATURE_BYTES:]

    @property
    def namespace(self) -> bytes:
        return self.place[:SIGNATURE_BYTES]

    @property
    def address(self) -> Address:
        group = int.from_bytes(self.place[SIGNATURE_BYTES : SIGNATURE_BYTES + 2], "little")
        shard = _shard(self.place[SIGNATURE_BYTES + 2 :])
        return Address(self.namespace, self.signature, self.parent, group, shard)


_victim: Callable[[tuple[bytes, bytes, bytes, bool]], Victim] = partial(tuple.__new__, Victim)
"""As `Victim._make`, in half its time: thousands leave a second."""


@lru_cache(maxsize=1 << 12)
def _shard(packed: bytes) -> Shard:
    return Shard.unpack(packed)


def _kv_event(
    kind: Literal["stored", "removed"], tier: str, place: bytes, packed: bytes, parent: bytes = b""
) -> KVEvent:
    at = SIGNATURE_BYTES
    shard = _shard(place[at + 2 :])
    return KVEvent(
        kind=kind,
        tier=tier,
        namespace=place[:at],
        group=int.from_bytes(place[at : at + 2], "little"),
        shard=(shard.first_layer, shard.end_layer, shard.first_head, shard.end_head),
        parent=parent,
        signatures=packed,
    )


class Index:
    """Thread-safe; no call does I/O. `plain` takes the twin even where the compiled index is there."""

    def __init__(
        self, tiers: Sequence[str], policy: Policy, *, plain: bool = False, clock: Clock | None = None
    ) -> None:
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
        """By a byte of `uses`."""
        self._core: Any = core(len(tiers), policy.bounds, AGE_EDGES, policy.ghosts, policy.gaps)
        self._evidence: Evidence | None = None  # what the table below is made from, where it is
        self._table: NDArray[np.float64] | None = None
        self._due = 0  # when the next evidence is taken
        self.on_request: Callable[[], object] = lambda: None
        """Told of each request."""
        self.on_evicted: Callable[[str, list[bytes]], None] = lambda tier, signatures: None
        """Told of what made room in the last tier that had it."""
        self.kv_events = KVEvents(clock or OsEnv().clock)
        """All that comes into a tier or leaves it, for those who follow."""

    def __len__(self) -> int:
        return len(self._core)

    @property
    def clock(self) -> int:
        """Requests so far."""
        return int(self._core.clock)

    def tick(self) -> int:
        """A request begins: the new time."""
        self.on_request()
        clock = self.clock
        if clock >= self._due:  # its table is worked out when somebody has to leave
            self._evidence, self._table = self.evidence(), None
            self._due = clock + table_interval_requests(clock)
        return int(self._core.tick())

    # asking

    def lookup(self, places: Sequence[bytes], needs: Sequence[int]) -> Lookup:
        """`places`: one a group, `needs`: how many of the last blocks its rule needs."""
        return Lookup(self, self._core, places, needs)

    def where(self, run: BlockRun) -> bytes:
        """A mask a block: bit i is tier i, the nearest is the lowest bit."""
        masks: bytes = self._core.where(*run)
        return masks

    def mask(self, address: Address) -> int:
        return self.where(BlockRun.of(address))[0]

    def masks(self, addresses: Sequence[Address]) -> list[int]:
        """As `where`, of any records."""
        masks = [0] * len(addresses)
        places: dict[bytes, list[int]] = {}
        for i, address in enumerate(addresses):
            places.setdefault(place_of_address(address), []).append(i)
        for numbers in places.values():
            for i, mask in zip(numbers, self.where(as_run([addresses[i] for i in numbers])), strict=True):
                masks[i] = mask
        return masks

    def contains(self, address: Address, tier: str | None = None) -> bool:
        mask = self.mask(address)
        return bool(mask if tier is None else mask >> self._number[tier] & 1)

    def stamp(self, address: Address) -> int:
        """When it was last used; now, for one that is not here."""
        return int(self._core.stamp(*BlockRun.of(address)))

    def resident(self, tier: str) -> int:
        return int(self._core.resident(self._number[tier]))

    def residents(self, tier: str) -> list[int]:
        """By kind, how many records of it the tier has."""
        counts: list[int] = self._core.residents(self._number[tier])
        return counts

    # changing

    def assign(self, places: Sequence[bytes], kind: int) -> None:
        """What is at these places, now and later, is of this kind; it was of kind 0. Takes as long as a walk over all
        blocks where some are there already."""
        self._core.assign(list(places), kind)

    def insert(self, address: Address, tier: str) -> None:
        """The tier has this record now."""
        self.insert_run(BlockRun.of(address), address.parent, tier)

    def insert_run(self, run: BlockRun, parent: bytes, tier: str) -> None:
        """The tier has these now. `parent` as in an address: of the first of them."""
        with self.kv_events.order:
            self._core.insert(*run, parent, self._number[tier])
            if self.kv_events.on:
                self.kv_events.add(_kv_event("stored", tier, run.place, bytes(run.signatures), parent))

    def discard(self, address: Address, tier: str, *, unless_held: bool = False) -> bool:
        """The tier has it no more. True where it had it."""
        run = BlockRun.of(address)
        with self.kv_events.order:
            had = bool(self._core.discard(*run, self._number[tier], unless_held))
            if had and self.kv_events.on:
                self.kv_events.add(_kv_event("removed", tier, run.place, address.signature))
        if had and unless_held and not self.mask(address):
            self.on_evicted(tier, [address.signature])
        return had

    def uses(self, run: BlockRun) -> bytes:
        """How often each was used, as it would count if it came now."""
        uses: bytes = self._core.uses(*run)
        return uses

    def refuse(self, run: BlockRun) -> None:
        """No tier took these: what no tier has of them is remembered as if it had come and left."""
        self._core.refuse(*run)

    def touch(self, run: BlockRun, stamp: int) -> None:
        """Count a use of each at this time."""
        self._core.touch(*run, stamp)

    def advance_clock(self, clock: int) -> None:
        """The requests of another life count as well: the clock goes on from there, unless it is later already."""
        while self._core.clock < clock:
            self._core.tick()

    def recall(self, run: BlockRun, stamp: int, uses: int) -> None:
        """Last used then, and so often, as another life tells: not counted as a use. `uses` of which this policy knows
        nothing are none."""
        self._core.recall(*run, stamp, uses if self.use_class(uses) < len(self._classes) else 0)

    def hold(self, run: BlockRun, room: Sequence[int] | None = None) -> tuple[int, ...]:
        """Keep blocks from leaving, from the first up to one that no tier has or for which there is no more `room` in
        the nearest tier that has it. How many, by nearest tier. Give that many back with `release`."""
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
        """Take the least valuable records out of a tier, at most `count`.

        `before`: only those last used earlier than this time (a request never evicts its own chain). `stored_below`:
        only those that a tier below has too. `worth`: none that is worth more than one that comes now, with these
        `uses` and of this `weight`. `weights`: by kind, what multiplies the policy's values, infinity for what stays;
        1 for kinds that are not given.
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
            self.on_evicted(tier, evicted)
        return list(map(_victim, victims))

    def worth(self, tier: str, addresses: Sequence[Address], weights: Sequence[float] = ()) -> float:
        """What these are worth to a tier together, as `evict` values them; infinity where one of them may not leave."""
        rows = b"".join([place_of_address(address) + address.signature for address in addresses])
        return float(self._core.worth(self._number[tier], self.values(), rows, weights))

    # audits

    def names(self, tier: str) -> set[bytes]:
        """All that a tier has, as tiers name them."""
        rows = self._core.names(self._number[tier])
        size = PLACE_BYTES + SIGNATURE_BYTES
        return {
            rows[at + PLACE_BYTES : at + PLACE_BYTES + KEY_BYTES] + rows[at + SIGNATURE_BYTES : at + PLACE_BYTES]
            for at in range(0, len(rows), size)
        }

    def places(self, tier: str) -> dict[bytes, int]:
        """How many records a tier has at each place."""
        rows = np.frombuffer(self._core.names(self._number[tier]), np.uint8).reshape(-1, PLACE_BYTES + SIGNATURE_BYTES)
        words = np.ascontiguousarray(rows[:, PLACE_BYTES - 16 : PLACE_BYTES]).view(np.uint64)
        own = np.ascontiguousarray(rows[:, :8]).view(np.uint64)[:, 0]
        mixed = own ^ words[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ words[:, 1] * np.uint64(0xC2B2AE3D27D4EB4F)
        _, first, counts = np.unique(mixed, return_index=True, return_counts=True)
        return {rows[i, :PLACE_BYTES].tobytes(): n for i, n in zip(first.tolist(), counts.tolist(), strict=True)}

    def held(self) -> int:
        """How many holds there are, in all."""
        return int(self._core.held())

    def ghosts(self) -> int:
        """How many blocks that left are remembered."""
        return int(self._core.ghosts())

    def memory(self) -> tuple[int, int]:
        """Bytes of memory for blocks, and for ghosts; of the compiled index only."""
        return int(self._core.bytes()), int(self._core.ghost_bytes())

    def evidence(self) -> Evidence:
        """What the policy judges by."""
        return evidence_of(self._core)

    def learn(self, reused: NDArray[np.int64], forgotten: NDArray[np.int64]) -> None:
        """What another life has seen, as counts by (class, bin of age): used again, and seen waiting last."""
        self._core.learn(reused, forgotten)
        self._table, self._due = None, 0

    def kept(self, most: int) -> bytes:
        """What outlives the process of single blocks, in at most so many rows of 8 bytes and 32 bytes more."""
        packed_rows: bytes = self._core.kept(most)
        return packed_rows

    def remember(self, packed_rows: bytes) -> None:
        """What another life kept, of an index that is new: ghosts all of it, but what is inserted before the first
        request goes on as it was. ValueError where it is no use here."""
        self._core.remember(packed_rows)

    def check(self) -> list[str]:
        """A full audit; one line a fault, none when sound."""
        faults: list[str] = self._core.check()
        return faults

    # within

    def _emit_removed(self, tier: str, victims: Sequence[tuple[bytes, bytes, bytes, bool]]) -> None:
        places: dict[bytes, list[bytes]] = {}
        for place, signature, _, _ in victims:
            places.setdefault(place, []).append(signature)
        for place, signatures in places.items():
            self.kv_events.add(_kv_event("removed", tier, place, b"".join(signatures)))

    def values(self) -> NDArray[np.float64]:
        """The policy's table of these days."""
        table = self._table
        if table is None:
            table = self._table = value_table(self.policy, self._evidence or self.evidence())
        return table

"""What moves between tiers, and what makes room: write-through, demotion, promotion, eviction from host."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from typing import Literal, get_args

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.record import record_bytes
from kvcache.cache.api import FlushReport
from kvcache.cache.canary import Canary
from kvcache.cache.expiry import Expiry
from kvcache.cache.flush import Barrier, Counts, Left, Stores, Watch, settled
from kvcache.cache.holds import Holds
from kvcache.cache.load_plan import Plan
from kvcache.cache.miss_explainer import Why
from kvcache.cache.pins import Pins
from kvcache.cache.promote import Promoter
from kvcache.cache.refused import Scope, WriteMode
from kvcache.cache.shared_lookup import Ask
from kvcache.cache.usage import Uses
from kvcache.cache.write_back import Lane
from kvcache.errors import ConfigError
from kvcache.index.block_run import Chained, place_of_address
from kvcache.index.cost_classes import Kinds
from kvcache.index.index import Index, Lookup, Victim
from kvcache.index.mrc import Curve
from kvcache.log import logger
from kvcache.observe.events import Events
from kvcache.observe.metrics import Counters
from kvcache.os_env import Port
from kvcache.tier.host.arena import Extent, Slot
from kvcache.tier.host.tier import HostTier
from kvcache.tier.record_codec import Coder
from kvcache.tier.tier import Tier

# An operator's switch that takes a cache out of an engine's way at once, without ending either. Loads bypassed: a
# match finds nothing, a load is a miss, and one under way ends with the blocks it has. Stores bypassed: what is
# offered is dropped and counted. What was stored before stays, and goes on down.

Mode = Literal["off", "on", "loads", "stores"]

BYPASS = "bypass"
"""The reason that is said of what was not done."""


class Bypass:
    """Two flags, read on every path without a lock: setting one never waits for anything."""

    def __init__(self) -> None:
        self.loads = False
        self.stores = False

    def set(self, mode: Mode) -> None:
        if mode not in get_args(Mode):
            raise ConfigError(f"bypass = {mode!r}: expected one of {', '.join(get_args(Mode))}")
        self.loads, self.stores = mode in {"on", "loads"}, mode in {"on", "stores"}

    @property
    def mode(self) -> Mode:
        if self.loads:
            return "on" if self.stores else "loads"
        return "stores" if self.stores else "off"


VICTIMS_A_SLOT = 64
"""How many records one slot may cost: more only where sizes are mixed, and then the search ends as 'no room'."""
ASKED, LEAST_ASKED = 1 << 12, 16
"""How many records tell what they are worth before an extent is chosen, and how many of each extent at least: where
that is too many, some of the extents are left out."""
TRIES = 8
"""Of the cheapest extents, how many may turn out to have something in them that cannot leave."""

CLOSE_S = 30.0
"""For what is queued when the cache is closed to be written."""

Wait = Callable[[float | None], bool]
"""Waits so many seconds at most; whether what it waits for is here."""

_log = logger("kvcache.flow")


class Flow:
    def __init__(
        self,
        *,
        index: Index,
        kinds: Kinds,
        curve: Curve,
        host: HostTier,
        below: Sequence[Tier],
        coder: Coder,
        counters: Counters,
        events: Events,
        port: Port,
        ask: Ask,
        canary: Canary,
        write: Mapping[str, WriteMode],
        why: Why,
        uses: Uses,
        plan: Plan,
        queue_blocks: int,
        threads: int,
    ) -> None:
        """`write`: by tier, when records go there."""
        self.index, self.host, self.below, self.port, self.kinds = index, host, below, port, kinds
        self.curve = curve
        self.counters, self.events, self.bypass, self.ask, self.why, self.plan = (
            counters,
            events,
            Bypass(),
            ask,
            why,
            plan,
        )
        self.canary = canary
        self.expiry = Expiry(
            index=index, host=host, below=below, counters=counters, events=events, why=why, clock=port.clock
        )
        self.lanes = [
            Lane(
                tier,
                index=index,
                kinds=kinds,
                host=host,
                coder=coder,
                counters=counters,
                events=events,
                why=why,
                port=port,
                queue_blocks=queue_blocks,
                mode=write[tier.name],
                ask=ask,
                expiry=self.expiry,
            )
            for tier in below
        ]
        self.promoter = Promoter(
            index=index,
            host=host,
            below=below,
            coder=coder,
            counters=counters,
            events=events,
            why=why,
            plan=plan,
            expiry=self.expiry,
            port=port,
        )
        self.holds = Holds(index, [host, *below])
        self.pins = Pins(index, [host, *below], port.clock)
        self.uses = uses
        self.executor = port.executor(threads, "copy")
        self._syncs = port.executor(max(1, len(below)), "sync")
        self._told: Counts = {}  # lost blocks that some caller of `flush` was told of
        self._stores = Stores(port.condition())
        self.submit_store, self.begin_store, self.end_store = self._stores.submit, self._stores.begin, self._stores.end
        self._telling = threading.Lock()

    def lookup(self, places: Sequence[bytes], needs: Sequence[int]) -> Lookup:
        """Of what has not come to its end."""
        self.expiry.sweep()
        return self.index.lookup(places, needs)

    # host memory

    def slot(self, payload_bytes: int, tenant: str, *, before: int) -> Slot | None:
        """As `slots`, one."""
        slots = self.slots(1, payload_bytes, tenant, before=before)
        return slots[0] if slots else None

    def slots(
        self,
        count: int,
        payload_bytes: int,
        tenant: str,
        *,
        before: int,
        worth: int | None = None,
        place: bytes = b"",
    ) -> list[Slot]:
        """Host slots, at most `count`: free ones, then those of victims that a tier below has too, then of others.
        Never of one used at `before` or later. Fewer where there is no more room.

        Victims leave by the value of their bytes, whatever their size and tenant, as far as shares allow; a tenant that
        has its quota makes room by what is its own. What leaves from extents of another kind is of use
        only once a whole extent is empty: by moving what is left of it together or, where an extent's worth of
        victims did not get that far, by letting go of what is in the one whose bytes are worth least.

        `worth`: of newcomers at `place`, how often they were used. Where host is the last tier, they take the place of
        nothing that is worth more; else they go through it on their way down, whatever they are worth.
        """
        size, arena = record_bytes(payload_bytes), self.host.arena
        slots = arena.take(size, tenant, count)
        for stored_below in (True, False) if self.lanes else (False,):
            in_vain = 0  # bytes of victims since the last slot
            while len(slots) < count and in_vain <= arena.extent_bytes:
                own = arena.spare_bytes(tenant) < size
                victims = self.kinds.evict(
                    self.host.name,
                    count - len(slots),
                    tenant=tenant,
                    place=place,
                    own=own,
                    before=before,
                    stored_below=stored_below,
                    worth=None if self.lanes else worth,
                )
                if not victims:
                    break
                in_vain += self._leave_host(victims)
                found = len(slots)
                slots += arena.take(size, tenant, count - found)
                while len(slots) < count and self.host.make_way(size, tenant):
                    slots += arena.take(size, tenant, count - len(slots))
                if len(slots) > found:
                    in_vain = 0
                elif in_vain > arena.extent_bytes and not own and self._clear(size, tenant):
                    slots += arena.take(size, tenant, count - len(slots))
                    in_vain = 0
        return slots

    def _leave_host(self, victims: Sequence[Victim]) -> int:
        """The index let go of these; so does the tier. Their bytes."""
        handed = self._hand_down(victims)
        names = [victim.name for victim in victims]
        for lane in self.lanes:
            lane.refused.left_host(names)
        gone = self.host.withdraw_named(names, [victim.signature for victim in victims])
        fates = Counter(
            (victim.place, victim.kept or name in handed, held.slot.extent.slot_bytes)
            for held, victim, name in zip(gone, victims, names, strict=True)
            if held is not None
        )
        tier = self.host.name
        for (place, kept, size), blocks in fates.items():
            said, space = "yes" if kept else "no", place[:SIGNATURE_BYTES]
            self.counters.add("evicted_blocks", blocks, tier=tier, kept=said)
            self.events.add(
                "evicted", tier=tier, namespace=space, blocks=blocks, bytes=blocks * size, reason=f"kept: {said}"
            )
        return sum(blocks * size for (_, _, size), blocks in fates.items())

    def _clear(self, slot_bytes: int, tenant: str) -> bool:
        """Let go of all in the extent of another kind whose bytes are worth least, of those that may go. True where
        that emptied it."""
        for extent in self._cheapest(slot_bytes, tenant)[:TRIES]:
            there = self.host.some_within(extent, len(extent.slots) or 1, 0)
            if there is not None and self.kinds.worth(self.host.name, there) < inf:
                break
        else:
            return False
        gone = [a for a in there if self.index.discard(a, self.host.name, unless_held=True)]
        self._leave_host([Victim(place_of_address(a), a.signature, a.parent, self.index.contains(a)) for a in gone])
        return not extent.slots

    def _cheapest(self, slot_bytes: int, tenant: str) -> list[Extent]:
        """Extents of other kinds, those whose bytes are worth least first, among equals the emptier; so far as is seen
        from some of what is in them."""
        extents = self.host.arena.others(slot_bytes, tenant)
        step = -(-len(extents) * LEAST_ASKED // ASKED) or 1
        extents = extents[self.index.clock % step :: step]
        may = {owner: self.kinds.losable_bytes(self.host.name, owner, tenant) for owner in {e.tenant for e in extents}}
        extents = [e for e in extents if len(e.slots) * e.slot_bytes <= may[e.tenant]]
        worths = {e: self._worth(e, ASKED // len(extents)) for e in extents}
        return sorted((e for e in extents if worths[e] < inf), key=worths.__getitem__)

    def _worth(self, extent: Extent, most: int) -> float:
        """A byte of it, by at most so many of its records; infinity where one of these may not leave."""
        there = self.host.some_within(extent, most, self.index.clock)
        if there is None:
            return inf
        filled = len(extent.slots) * extent.slot_bytes / extent.region.bytes
        return self.kinds.worth(self.host.name, there) / max(1, len(there)) * filled

    # down

    def write_through(self, chain: Chained, first: int, end: int) -> None:
        """What was stored, the chain's blocks `first` to `end`: to the tiers that take it at once."""
        for lane in self.lanes:
            if lane.mode == "write_through":
                self._offer(lane, chain, first, end)

    def write_used(self, chains: Sequence[Chained], blocks: int) -> None:
        """What is used again, the first blocks of these chains: to the tiers that wait for that. Returns at once."""
        lanes = [lane for lane in self.lanes if lane.mode == "on_second_use"]

        def offer() -> None:
            for lane in lanes:
                try:
                    for chain in chains:
                        self._offer(lane, chain, 0, blocks)
                except Exception:  # noqa: BLE001  law: never in the way
                    _log.exception("%s was not offered %d blocks that are used again", lane.tier.name, blocks)

        if lanes and blocks:
            self.submit_store(offer, self.executor.submit)

    def _offer(self, lane: Lane, chain: Chained, first: int, end: int) -> None:
        try:
            dropped = lane.offer(chain, first, end)
        except Exception:
            lane.refused.add(chain.addresses(range(first, end)))
            raise
        self.drop(dropped, f"{lane.tier.name} queue", chain.namespace, tier=lane.tier.name)

    def _hand_down(self, victims: Sequence[Victim]) -> set[bytes]:
        """Records that are about to leave host: to the tiers that take them then. The names of those that one will
        have."""
        taken: set[bytes] = set()
        for lane in self.lanes:
            if lane.mode != "write_back":
                continue
            for victim in victims:
                held = None if lane.wrote(victim.address) else self.host.borrow(victim.address)
                if held is None:
                    continue
                if lane.demote(held):
                    taken.add(victim.name)
                else:
                    self.drop(1, f"{lane.tier.name} queue", victim.namespace, tier=lane.tier.name)
                self.host.arena.release(held.slot)
        return taken

    def drop(self, blocks: int, reason: str, namespace: bytes, *, tier: str) -> None:
        """Say that these were offered to a tier and not kept."""
        self.counters.add("drops", blocks, reason=reason)
        self.events.add("dropped", tier=tier, namespace=namespace, blocks=blocks, reason=reason)

    # barriers

    def wipe(self) -> None:
        """Overwrite what records on their way down were copied to."""
        for lane in self.lanes:
            lane.leaving.wipe()

    def settle(self, timeout_s: float | None = None, *, first: Sequence[Wait] = ()) -> bool:
        """Whether what goes down now is written, or could not be, in time. `first` as of `flush`."""
        left = self._left(timeout_s)
        return all(wait(left()) for wait in first) and not self._wait_begun(left) and settled(self.lanes, left)

    def watch(self, *, anew: bool = False) -> Watch:
        """For a new caller of `flush`. `anew`: losses count from now on; else from what was reported to anybody."""
        return Watch.begin(self.lanes, self.index.clock, None if anew else self._told)

    def flush(
        self,
        timeout_s: float | None = None,
        *,
        watch: Watch | None = None,
        first: Sequence[Wait] = (),
        scope: Scope | None = None,
        fleet: bool = False,
    ) -> FlushReport:
        """As of `KVCache`. Blocks that are stored meanwhile keep nobody waiting.

        Args:
            watch: what the caller was told before; without one, losses count from now on.
            first: called before, with the time that is left; each returns whether what comes from outside is here.
            scope: reports only blocks of these namespaces.
            fleet: reports only tiers that others share, and of the blocks that they refused only those that were used
                since the watch's last report: for a caller that asks whether these can be read elsewhere.
        """
        watch, left = watch or self.watch(anew=True), self._left(timeout_s)
        faults = [] if all(wait(left()) for wait in first) else ["stores that clients have begun have not ended"]
        faults += self._wait_begun(left)
        return self._flush(left, watch, scope, fleet=fleet, fault="; ".join(faults))

    def _flush(self, left: Left, watch: Watch, scope: Scope | None, *, fleet: bool, fault: str = "") -> FlushReport:
        """What the tiers are meant to have by now, into them; what became of it."""
        lanes = [lane for lane in self.lanes if lane.mode != "off" and (lane.tier.shared or not fleet)]
        barriers = {lane.tier.name: Barrier(lane, scope) for lane in lanes}
        for left_s in (lambda: 0.0, left):  # a tier that takes nothing keeps no other from what it has room for
            for barrier in barriers.values():
                barrier.offer_again(left_s)
        for barrier in barriers.values():
            barrier.wait(self._syncs, left)
        before = watch.clock if fleet else -1
        with self._telling:
            tiers = {
                tier: barrier.report(watch, self._told, lambda address: self.index.stamp(address) > before)
                for tier, barrier in barriers.items()
            }
            watch.clock = self.index.clock
        return FlushReport(tiers, fault)

    def _left(self, timeout_s: float | None) -> Left:
        clock = self.port.clock
        end = None if timeout_s is None else clock.now() + timeout_s
        return lambda: None if end is None else max(0.0, end - clock.now())

    def _wait_begun(self, left: Left) -> list[str]:
        """Until the stores that were begun have ended, and what is over has left; why not, where time ran out."""
        if stores := self._stores.wait(left()):
            return [f"{stores} stores have not ended"]
        more = True
        while more:
            more = self.expiry.sweep()
            if not all(ticket.wait(left()) for ticket in self.expiry.leaving()):
                return ["expired blocks have not left yet"]
        return []

    def close(self, watch: Watch) -> FlushReport:
        """End the threads; what is queued, or was refused, is written first. As `flush`."""
        self.expiry.close()
        self.executor.close()
        self.ask.close()
        self.promoter.wait_idle()
        report = self._flush(self._left(CLOSE_S), watch, None, fleet=False)  # a store that hangs has stored nothing
        for lane in self.lanes:
            if len(lane):
                lane.give_up()
            lane.close()
        self.canary.close()
        self._syncs.close()
        return report

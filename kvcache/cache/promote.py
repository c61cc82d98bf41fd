"""The way up: records of the tiers below host, read into host slots, shared by all who wait for the same one."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.block.record import Address, header_area
from kvcache.cache.expiry import Expiry
from kvcache.cache.load_plan import Plan
from kvcache.cache.miss_explainer import Why
from kvcache.index.index import Index
from kvcache.observe.events import Events
from kvcache.observe.metrics import Counters
from kvcache.os_env import Port
from kvcache.tier.host.arena import Slot
from kvcache.tier.host.tier import HostTier
from kvcache.tier.record_codec import Coder
from kvcache.tier.tier import BACKGROUND, Outcome, Tier

Room = Callable[[int, int], "list[Slot]"]
"""So many host slots for payloads of so many bytes each, or as many as there is room for."""

_log = logging.getLogger("kvcache")


@dataclass(slots=True, eq=False)
class Arrival:
    """A record on its way into host. Once its outcome is DONE it is there like any other, and `borrow` finds it."""

    address: Address
    payload_bytes: int
    slot: Slot
    tiers: list[Tier]  # where it can be asked for, the nearest first
    priority: int
    deadline: float | None
    outcome: Outcome = Outcome.PENDING
    refused: Outcome = Outcome.PENDING  # why it did not come from a tier before
    source: str = ""


class Promoter:
    def __init__(
        self,
        *,
        index: Index,
        host: HostTier,
        below: Sequence[Tier],
        coder: Coder,
        counters: Counters,
        events: Events,
        why: Why,
        plan: Plan,
        expiry: Expiry,
        port: Port,
    ) -> None:
        self._expiry = expiry
        self._index, self._host, self._below, self._coder = index, host, below, coder
        self._counters, self._events, self._why, self._plan = counters, events, why, plan
        self._arrivals: dict[bytes, Arrival] = {}
        self.foreign: set[bytes] = set()  # names of records that were left where they are, since they cannot be read
        self._changed = port.condition()

    def __len__(self) -> int:
        return len(self._arrivals)

    def begin(
        self,
        wanted: Sequence[tuple[Address, int]],
        room: Room,
        *,
        priority: int,
        deadline: float | None,
    ) -> list[Arrival | Outcome]:
        """Start bringing these (address, payload bytes) into host, or join who does: an arrival each, or the outcome
        where there is nothing to start: ABSENT, NO_ROOM."""
        masks = self._index.masks([address for address, _ in wanted])
        answers: list[Arrival | Outcome] = []
        started: list[Arrival] = []
        shared = [tier for tier in self._below if tier.shared]
        with self._changed:
            fresh = [
                (mask > 1 or shared) and address.name not in self._arrivals
                for (address, _), mask in zip(wanted, masks, strict=True)
            ]
            sizes = Counter(size for (_, size), new in zip(wanted, fresh, strict=True) if new)
            slots = {size: iter(room(count, size)) for size, count in sizes.items()}
            for (address, payload_bytes), mask in zip(wanted, masks, strict=True):
                arrival = self._arrivals.get(address.name)
                if arrival is None:
                    # others write to a shared tier: it is asked last for what is not known to be there, too
                    tiers = [tier for t, tier in enumerate(self._below, 1) if mask >> t & 1]
                    tiers += [tier for tier in shared if tier not in tiers]
                    slot = next(slots[payload_bytes], None) if tiers else None
                    if slot is None:
                        answers.append(Outcome.NO_ROOM if tiers else Outcome.ABSENT)
                        continue
                    arrival = Arrival(address, payload_bytes, slot, tiers, priority, deadline)
                    self._arrivals[address.name] = arrival
                    started.append(arrival)
                answers.append(arrival)
            self._host.arena.release(*[slot for left in slots.values() for slot in left])  # asked for twice in one call
        # who is asked for what is settled first: what one tier answers at once to be missing goes to the next by itself
        asked = [(tier, [arrival for arrival in started if arrival.tiers[0] is tier]) for tier in self._below]
        for tier, arrivals in asked:
            self._ask(tier, arrivals)
        return answers

    def wait(self, arrival: Arrival, timeout_s: float | None) -> Outcome:
        """Its outcome; LATE where time ran out (the record still arrives, for whoever comes next)."""
        with self._changed:
            if self._changed.wait_for(lambda: arrival.outcome.settled, timeout_s):
                return arrival.outcome
            return Outcome.LATE

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._arrivals, timeout_s)

    def _ask(self, tier: Tier, arrivals: Sequence[Arrival]) -> None:
        """One batch; the first one's priority and deadline stand for all, since a batch comes from one request."""
        if not arrivals:
            return
        views = []
        failed: list[Arrival] = []  # here; the next tier is asked for them together
        left, brought, late, told = len(arrivals), 0, False, [False] * len(arrivals)
        reading = self._plan.begun(tier.name, sum(arrival.payload_bytes for arrival in arrivals))

        def arrived(i: int, outcome: Outcome) -> None:
            nonlocal left, brought, late
            told[i] = True
            elsewhere = self._arrived(tier, arrivals[i], outcome)
            with self._changed:
                failed.extend([arrivals[i]] if elsewhere else [])
                left -= 1
                brought += arrivals[i].payload_bytes if outcome is Outcome.DONE else 0
                late = late or outcome is Outcome.LATE
                if left:
                    return
            self._plan.ended(reading, brought, late=late)
            for other in self._below:
                self._ask(other, [arrival for arrival in failed if arrival.tiers[0] is other])

        for arrival in arrivals:
            view, area = arrival.slot.view, header_area(arrival.payload_bytes)
            views.append([view[:area], view[area:]])
        try:
            tier.submit(
                "read",
                [arrival.address for arrival in arrivals],
                views,
                priority=arrivals[0].priority,
                deadline=arrivals[0].deadline,
                on_outcome=arrived,
            )
        except Exception:  # noqa: BLE001  law: never in the way; without an end nobody could load these again
            _log.exception("%s took no reads; %d blocks are a miss", tier.name, len(arrivals))
            for i in [i for i, settled in enumerate(told) if not settled]:
                arrived(i, Outcome.FAILED)

    def _arrived(self, tier: Tier, arrival: Arrival, outcome: Outcome) -> bool:
        """Whether another tier is to be asked for it."""
        address = arrival.address
        if outcome is Outcome.DONE:
            outcome = self._coder.decode(address, arrival.slot, arrival.payload_bytes)
            if outcome is Outcome.DAMAGED:  # to the tier it is sound
                tier.submit("remove", [address], priority=BACKGROUND)
        if outcome is Outcome.DONE and self._expiry.over(arrival.slot.expires_ms):
            outcome = Outcome.ABSENT
            tier.submit("remove", [address], priority=BACKGROUND)
        if outcome is Outcome.DONE:
            expires_ms = arrival.slot.expires_ms
            if self._host.publish(address, arrival.slot, arrival.payload_bytes):
                self._index.insert(address, self._host.name)
                self._expiry.note([address], expires_ms)
            else:  # stored anew meanwhile
                self._host.arena.release(arrival.slot)
            arrival.source = tier.name
            self._counters.add("promoted_blocks", tier=tier.name)
            self._end(arrival, outcome)
            return False
        if outcome in (Outcome.ABSENT, Outcome.DAMAGED, Outcome.FOREIGN):
            known = self._index.discard(address, tier.name)
            if outcome is Outcome.FOREIGN:
                self.foreign.add(address.name)
            if known or outcome is not Outcome.ABSENT:
                self._counters.add("refused_records", tier=tier.name, check=outcome.value)
                self._events.add("refused", tier=tier.name, namespace=address.namespace, reason=outcome.value)
                self._why.refused(tier.name, address.signature, outcome.value)
        if outcome is not Outcome.ABSENT or not arrival.refused.settled:
            arrival.refused = outcome
        arrival.tiers.remove(tier)
        if arrival.tiers:
            return True
        self._host.arena.release(arrival.slot)
        self._end(arrival, arrival.refused)
        return False

    def _end(self, arrival: Arrival, outcome: Outcome) -> None:
        with self._changed:
            arrival.outcome = outcome
            del self._arrivals[arrival.address.name]
            self._changed.notify_all()

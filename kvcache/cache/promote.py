"""Promotion: reads records of lower tiers into host slots, once for all requests that wait for the same record."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.block.record import Address, header_area
from kvcache.cache.context import CacheContext
from kvcache.tier.host.arena import Slot
from kvcache.tier.tier import BACKGROUND, Outcome, Tier

SlotSource = Callable[[int, int], "list[Slot]"]
"""Returns host slots, at most `count`, each for a payload of this many bytes."""

_log = logging.getLogger("kvcache")


@dataclass(slots=True, eq=False)
class InflightRead:
    """A record being read into host.

    Once its outcome is DONE it is an ordinary host record, and `HostTier.acquire` finds it.
    """

    address: Address
    payload_bytes: int
    slot: Slot
    tiers: list[Tier]  # tiers still to try, the fastest first
    priority: int
    deadline: float | None
    outcome: Outcome = Outcome.PENDING
    refused: Outcome = Outcome.PENDING  # why earlier tiers did not return it
    source: str = ""


class Promoter:
    def __init__(self, context: CacheContext) -> None:
        self._index, self._host, self._lower_tiers = context.index, context.host, context.lower_tiers
        self._record_codec, self._plan, self._expiry = context.record_codec, context.plan, context.expiry
        self._counters, self._events, self._miss_explainer = context.counters, context.events, context.miss_explainer
        self._inflight_reads: dict[bytes, InflightRead] = {}
        self.foreign: set[bytes] = set()  # names of records that cannot be read here and were left in their tier
        self._changed = context.os_env.condition()

    def __len__(self) -> int:
        return len(self._inflight_reads)

    def begin(
        self,
        wanted: Sequence[tuple[Address, int]],
        slot_source: SlotSource,
        *,
        priority: int,
        deadline: float | None,
    ) -> list[InflightRead | Outcome]:
        """Start to read these (address, payload bytes) into host, or join reads in progress.

        Returns one read each, or the outcome if no read can start: NOT_FOUND, NO_CAPACITY.
        """
        masks = self._index.masks([address for address, _ in wanted])
        answers: list[InflightRead | Outcome] = []
        started: list[InflightRead] = []
        shared = [tier for tier in self._lower_tiers if tier.shared]
        with self._changed:
            fresh = [
                (mask > 1 or shared) and address.name not in self._inflight_reads
                for (address, _), mask in zip(wanted, masks, strict=True)
            ]
            sizes = Counter(size for (_, size), new in zip(wanted, fresh, strict=True) if new)
            slots = {size: iter(slot_source(count, size)) for size, count in sizes.items()}
            for (address, payload_bytes), mask in zip(wanted, masks, strict=True):
                read = self._inflight_reads.get(address.name)
                if read is None:
                    # other caches write to shared tiers, so these are tried last even for records not known to be there
                    tiers = [tier for t, tier in enumerate(self._lower_tiers, 1) if mask >> t & 1]
                    tiers += [tier for tier in shared if tier not in tiers]
                    slot = next(slots[payload_bytes], None) if tiers else None
                    if slot is None:
                        answers.append(Outcome.NO_CAPACITY if tiers else Outcome.NOT_FOUND)
                        continue
                    read = InflightRead(address, payload_bytes, slot, tiers, priority, deadline)
                    self._inflight_reads[address.name] = read
                    started.append(read)
                answers.append(read)
            self._host.arena.release(
                *[slot for remaining in slots.values() for slot in remaining]
            )  # slots for a record that is in `wanted` twice
        # batches are fixed before the first is submitted: a record that a tier reports missing at once is moved on by
        # its callback
        batches = [(tier, [read for read in started if read.tiers[0] is tier]) for tier in self._lower_tiers]
        for tier, reads in batches:
            self._ask(tier, reads)
        return answers

    def wait(self, read: InflightRead, timeout_s: float | None) -> Outcome:
        """Its outcome; TIMED_OUT if time ran out. The record still arrives, for later requests."""
        with self._changed:
            if self._changed.wait_for(lambda: read.outcome.settled, timeout_s):
                return read.outcome
            return Outcome.TIMED_OUT

    def wait_idle(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._inflight_reads, timeout_s)

    def _ask(self, tier: Tier, reads: Sequence[InflightRead]) -> None:
        """Submit one batch.

        The first read's priority and deadline apply to all, because a batch is from one request.
        """
        if not reads:
            return
        views = []
        failed: list[InflightRead] = []  # failed in this tier; read together from the next tier
        remaining, loaded_bytes, late, reported = len(reads), 0, False, [False] * len(reads)
        reading = self._plan.read_started(tier.name, sum(read.payload_bytes for read in reads))

        def arrived(i: int, outcome: Outcome) -> None:
            nonlocal remaining, loaded_bytes, late
            reported[i] = True
            retry = self._arrived(tier, reads[i], outcome)
            with self._changed:
                failed.extend([reads[i]] if retry else [])
                remaining -= 1
                loaded_bytes += reads[i].payload_bytes if outcome is Outcome.DONE else 0
                late = late or outcome is Outcome.TIMED_OUT
                if remaining:
                    return
            self._plan.read_ended(reading, loaded_bytes, late=late)
            for other in self._lower_tiers:
                self._ask(other, [read for read in failed if read.tiers[0] is other])

        for read in reads:
            view, area = read.slot.view, header_area(read.payload_bytes)
            views.append([view[:area], view[area:]])
        try:
            tier.submit(
                "read",
                [read.address for read in reads],
                views,
                priority=reads[0].priority,
                deadline=reads[0].deadline,
                on_outcome=arrived,
            )
        except Exception:  # noqa: BLE001  boundary to foreign code: a tier may be a user's
            # without an outcome these records could not be loaded again
            _log.exception("%s accepted no reads; blocks=%d count as misses", tier.name, len(reads))
            for i in [i for i, settled in enumerate(reported) if not settled]:
                arrived(i, Outcome.FAILED)

    def _arrived(self, tier: Tier, read: InflightRead, outcome: Outcome) -> bool:
        """Publish a record or note its failure; whether to try another tier."""
        address = read.address
        if outcome is Outcome.DONE:
            outcome = self._record_codec.decode(address, read.slot, read.payload_bytes)
            if outcome is Outcome.DAMAGED:  # the tier itself sees no damage
                tier.submit("remove", [address], priority=BACKGROUND)
        if outcome is Outcome.DONE and self._expiry.is_expired(read.slot.expires_ms):
            outcome = Outcome.NOT_FOUND
            tier.submit("remove", [address], priority=BACKGROUND)
        if outcome is Outcome.DONE:
            expires_ms = read.slot.expires_ms
            if self._host.publish(address, read.slot, read.payload_bytes):
                self._index.insert(address, self._host.name)
                self._expiry.note([address], expires_ms)
            else:  # stored again meanwhile
                self._host.arena.release(read.slot)
            read.source = tier.name
            self._counters.add("promoted_blocks", tier=tier.name)
            self._end(read, outcome)
            return False
        if outcome in (Outcome.NOT_FOUND, Outcome.DAMAGED, Outcome.INCOMPATIBLE):
            was_indexed = self._index.discard(address, tier.name)
            if outcome is Outcome.INCOMPATIBLE:
                self.foreign.add(address.name)
            if was_indexed or outcome is not Outcome.NOT_FOUND:
                self._counters.add("refused_records", tier=tier.name, check=outcome.value)
                self._events.add("refused", tier=tier.name, namespace=address.namespace, reason=outcome.value)
                self._miss_explainer.refused(tier.name, address.signature, outcome.value)
        if outcome is not Outcome.NOT_FOUND or not read.refused.settled:
            read.refused = outcome
        read.tiers.remove(tier)
        if read.tiers:
            return True
        self._host.arena.release(read.slot)
        self._end(read, read.refused)
        return False

    def _end(self, read: InflightRead, outcome: Outcome) -> None:
        with self._changed:
            read.outcome = outcome
            del self._inflight_reads[read.address.name]
            self._changed.notify_all()

"""Movement of records between tiers: write-through, demotion, promotion, eviction from host memory, flush."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from math import inf

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.record import record_bytes
from kvcache.cache.api import FlushReport
from kvcache.cache.context import CacheContext
from kvcache.cache.flush import Barrier, Counts, Remaining, Stores, Watch, settled
from kvcache.cache.promote import Promoter
from kvcache.cache.refused import Scope
from kvcache.cache.write_back import WriteBackQueue
from kvcache.index.block_run import ChainView, shard_key_of
from kvcache.index.index import Victim
from kvcache.log import log_faults, logger
from kvcache.tier.host.arena import Slab, Slot

MAX_VICTIMS_PER_SLOT = 64
"""The most records evicted for one slot.

More are needed only where sizes are mixed; the search then ends without a slot.
"""
MAX_SAMPLED_RECORDS, MIN_SAMPLED_RECORDS = 1 << 12, 16
"""The most records sampled to choose a slab, and the fewest for each slab.

Where the first limit is too small for all slabs, some slabs are skipped.
"""
MAX_SLAB_TRIES = 8
"""The most of the cheapest slabs to try: each may turn out to contain a record that cannot be evicted."""

CLOSE_S = 30.0
"""Time to write the queued blocks when the cache is closed."""

Wait = Callable[[float | None], bool]
"""Waits at most this many seconds; returns whether the awaited state is reached."""

_log = logger("kvcache.tier_manager")


class TierManager:
    def __init__(self, context: CacheContext) -> None:
        settings = context.settings
        self._context, self._os_env = context, context.os_env
        self._index, self._host, self._cost_classes = context.index, context.host, context.cost_classes
        self._counters, self._events, self._expiry = context.counters, context.events, context.expiry
        self.write_back_queues = [
            WriteBackQueue(tier, context, settings.write_mode(tier.name)) for tier in context.lower_tiers
        ]
        self.promoter = Promoter(context)
        self.executor = self._os_env.executor(settings.flow.threads, "copy")
        self._syncs = self._os_env.executor(max(1, len(context.lower_tiers)), "sync")
        self._reported_losses: Counts = {}  # lost blocks that some `flush` caller has had reported
        self.stores = Stores(self._os_env.condition())
        self._reporting = threading.Lock()

    # host memory

    def slot(self, payload_bytes: int, tenant: str, *, before: int) -> Slot | None:
        """One slot, as `slots`."""
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
        shard_key: bytes = b"",
    ) -> list[Slot]:
        """At most `count` host slots: free ones first, then those of victims.

        Victims that a lower tier also has are evicted before others. A record last used at `before` or later is never
        evicted. Fewer slots are returned where nothing more can be evicted.

        Victims are chosen by the value of their bytes, whatever their size and tenant, within the tenants' quotas and
        guaranteed shares. A tenant at its quota evicts only its own records. Victims in slabs of another size class
        help only once a whole slab is empty. The remaining records are moved together for that. If one slab's worth of
        victims did not achieve it, the cheapest slab is cleared.

        Args:
            worth: how often the new records of the shard were used. If host memory is the last tier, they evict nothing
                worth more. Otherwise they pass through host memory to lower tiers, whatever they are worth.
        """
        size, arena = record_bytes(payload_bytes), self._host.arena
        slots = arena.allocate_many(size, tenant, count)
        for stored_below in (True, False) if self.write_back_queues else (False,):
            futile_bytes = 0  # of victims since the last slot
            while len(slots) < count and futile_bytes <= arena.slab_bytes:
                own = arena.spare_bytes(tenant) < size
                victims = self._cost_classes.evict(
                    self._host.name,
                    count - len(slots),
                    tenant=tenant,
                    shard_key=shard_key,
                    own=own,
                    before=before,
                    stored_below=stored_below,
                    worth=None if self.write_back_queues else worth,
                )
                if not victims:
                    break
                futile_bytes += self._evict_from_host(victims)
                had = len(slots)
                slots += arena.allocate_many(size, tenant, count - had)
                while len(slots) < count and self._host.evacuate_slab(size, tenant):
                    slots += arena.allocate_many(size, tenant, count - len(slots))
                if len(slots) > had:
                    futile_bytes = 0
                elif futile_bytes > arena.slab_bytes and not own and self._clear(size, tenant):
                    slots += arena.allocate_many(size, tenant, count - len(slots))
                    futile_bytes = 0
        return slots

    def _evict_from_host(self, victims: Sequence[Victim]) -> int:
        """Demote victims that the index has removed, and remove them from the host tier; their bytes."""
        handed = self._demote(victims)
        names = [victim.name for victim in victims]
        for queue in self.write_back_queues:
            queue.refused.left_host(names)
        removed = self._host.unpublish_named(names, [victim.signature for victim in victims])
        fates = Counter(
            (victim.shard_key, victim.kept or name in handed, held.slot.slab.slot_bytes)
            for held, victim, name in zip(removed, victims, names, strict=True)
            if held is not None
        )
        tier = self._host.name
        for (shard_key, kept, size), blocks in fates.items():
            kept_label, namespace_id = "yes" if kept else "no", shard_key[:SIGNATURE_BYTES]
            self._counters.add("evicted_blocks", blocks, tier=tier, kept=kept_label)
            self._events.add(
                "evicted",
                tier=tier,
                namespace=namespace_id,
                blocks=blocks,
                bytes=blocks * size,
                reason=f"kept: {kept_label}",
            )
        return sum(blocks * size for (_, _, size), blocks in fates.items())

    def _clear(self, slot_bytes: int, tenant: str) -> bool:
        """Evict everything in the cheapest evictable slab of another size class. True if the slab is then empty."""
        for slab in self._cheapest_slabs(slot_bytes, tenant)[:MAX_SLAB_TRIES]:
            resident = self._host.sample_slab(slab, len(slab.slots) or 1, 0)
            if resident is not None and self._cost_classes.worth(self._host.name, resident) < inf:
                break
        else:
            return False
        removed = [a for a in resident if self._index.discard(a, self._host.name, unless_held=True)]
        self._evict_from_host(
            [Victim(shard_key_of(a), a.signature, a.parent, self._index.contains(a)) for a in removed]
        )
        return not slab.slots

    def _cheapest_slabs(self, slot_bytes: int, tenant: str) -> list[Slab]:
        """Slabs of other size classes, the cheapest bytes first, among equals the emptier.

        A slab's worth is an estimate from a sample of its records.
        """
        slabs = self._host.arena.other_classes(slot_bytes, tenant)
        step = -(-len(slabs) * MIN_SAMPLED_RECORDS // MAX_SAMPLED_RECORDS) or 1
        slabs = slabs[self._index.clock % step :: step]
        evictable = {
            owner: self._cost_classes.evictable_bytes(self._host.name, owner, tenant)
            for owner in {e.tenant for e in slabs}
        }
        slabs = [e for e in slabs if len(e.slots) * e.slot_bytes <= evictable[e.tenant]]
        worths = {e: self._worth(e, MAX_SAMPLED_RECORDS // len(slabs)) for e in slabs}
        return sorted((e for e in slabs if worths[e] < inf), key=worths.__getitem__)

    def _worth(self, slab: Slab, most: int) -> float:
        """The worth of one byte of a slab, from a sample of its records; infinity if one of these cannot be evicted."""
        resident = self._host.sample_slab(slab, most, self._index.clock)
        if resident is None:
            return inf
        filled = len(slab.slots) * slab.slot_bytes / slab.region.bytes
        return self._cost_classes.worth(self._host.name, resident) / max(1, len(resident)) * filled

    # demotion

    def write_through(self, chain: ChainView, first: int, end: int) -> None:
        """Offer the stored blocks `first` to `end` of the chain to tiers in write-through mode."""
        for queue in self.write_back_queues:
            if queue.mode == "write_through":
                self._offer(queue, chain, first, end)

    def write_on_second_use(self, chains: Sequence[ChainView], blocks: int) -> None:
        """Offer the first blocks of these chains, used again, to tiers in on-second-use mode. Returns at once."""
        write_back_queues = [queue for queue in self.write_back_queues if queue.mode == "on_second_use"]

        def offer() -> None:
            for queue in write_back_queues:
                with log_faults(_log, "%s was not offered blocks on second use: blocks=%d", queue.tier.name, blocks):
                    for chain in chains:
                        self._offer(queue, chain, 0, blocks)

        if write_back_queues and blocks:
            self.stores.submit(offer, self.executor.submit)

    def _offer(self, queue: WriteBackQueue, chain: ChainView, first: int, end: int) -> None:
        with ExitStack() as on_fault:
            on_fault.callback(lambda: queue.refused.add(chain.addresses(range(first, end))))
            dropped = queue.offer(chain, first, end)
            on_fault.pop_all()
        self.drop(dropped, f"{queue.tier.name} queue", chain.namespace, tier=queue.tier.name)

    def _demote(self, victims: Sequence[Victim]) -> set[bytes]:
        """Offer victims to the tiers in write-back mode; the names of those that a tier takes."""
        demoted: set[bytes] = set()
        for queue in self.write_back_queues:
            if queue.mode != "write_back":
                continue
            for victim in victims:
                held = None if queue.is_written(victim.address) else self._host.acquire(victim.address)
                if held is None:
                    continue
                if queue.demote(held):
                    demoted.add(victim.name)
                else:
                    self.drop(1, f"{queue.tier.name} queue", victim.namespace, tier=queue.tier.name)
                self._host.arena.release(held.slot)
        return demoted

    def drop(self, blocks: int, reason: str, namespace: bytes, *, tier: str) -> None:
        """Count and report blocks that were offered to a tier and dropped."""
        self._counters.add("drops", blocks, reason=reason)
        self._events.add("dropped", tier=tier, namespace=namespace, blocks=blocks, reason=reason)

    # flush

    def wipe(self) -> None:
        """Overwrite the buffers that held copies of records for lower tiers."""
        for queue in self.write_back_queues:
            queue.victim_buffer.wipe()

    def settle(self, timeout_s: float | None = None, *, first: Sequence[Wait] = ()) -> bool:
        """Whether all current writes to lower tiers have ended in time, successful or not. `first`: as in `flush`."""
        remaining_s = self._remaining(timeout_s)
        return (
            all(wait(remaining_s()) for wait in first)
            and not self._wait_begun(remaining_s)
            and settled(self.write_back_queues, remaining_s)
        )

    def watch(self, *, anew: bool = False) -> Watch:
        """Start the record of a new `flush` caller.

        `anew`: losses count from now on; else since the last report to any caller.
        """
        return Watch.begin(self.write_back_queues, self._index.clock, None if anew else self._reported_losses)

    def flush(
        self,
        timeout_s: float | None = None,
        *,
        watch: Watch | None = None,
        first: Sequence[Wait] = (),
        scope: Scope | None = None,
        fleet: bool = False,
    ) -> FlushReport:
        """As `KVCache.flush`. Blocks stored meanwhile do not extend the wait.

        Args:
            watch: the caller's earlier reports; without one, losses count from now on.
            first: called first, with the remaining time; each returns whether outside stores are complete.
            scope: reports only blocks of these namespaces.
            fleet: reports only shared tiers, and of the blocks that they refused only those used since the watch's last
                report. A caller that asks whether other nodes can read its blocks needs only these.
        """
        watch, remaining_s = watch or self.watch(anew=True), self._remaining(timeout_s)
        faults = [] if all(wait(remaining_s()) for wait in first) else ["stores that clients have begun have not ended"]
        faults += self._wait_begun(remaining_s)
        return self._flush(remaining_s, watch, scope, fleet=fleet, fault="; ".join(faults))

    def _flush(
        self, remaining_s: Remaining, watch: Watch, scope: Scope | None, *, fleet: bool, fault: str = ""
    ) -> FlushReport:
        """Write the intended blocks to the tiers and report the result."""
        write_back_queues = [
            queue for queue in self.write_back_queues if queue.mode != "off" and (queue.tier.shared or not fleet)
        ]
        barriers = {queue.tier.name: Barrier(queue, scope) for queue in write_back_queues}
        # the first round does not wait: a tier that accepts nothing must not delay the others
        for left_s in (lambda: 0.0, remaining_s):
            for barrier in barriers.values():
                barrier.offer_again(left_s)
        for barrier in barriers.values():
            barrier.wait(self._syncs, remaining_s)
        before = watch.clock if fleet else -1
        with self._reporting:
            tiers = {
                tier: barrier.report(watch, self._reported_losses, lambda address: self._index.stamp(address) > before)
                for tier, barrier in barriers.items()
            }
            watch.clock = self._index.clock
        return FlushReport(tiers, fault)

    def _remaining(self, timeout_s: float | None) -> Remaining:
        clock = self._os_env.clock
        end = None if timeout_s is None else clock.now() + timeout_s
        return lambda: None if end is None else max(0.0, end - clock.now())

    def _wait_begun(self, remaining_s: Remaining) -> list[str]:
        """Wait for stores in progress and removals of expired blocks; the reasons where time ran out."""
        if stores := self.stores.wait(remaining_s()):
            return [f"{stores} stores have not ended"]
        more = True
        while more:
            more = self._expiry.sweep()
            if not all(ticket.wait(remaining_s()) for ticket in self._expiry.pending_removals()):
                return ["expired blocks are not removed yet"]
        return []

    def close(self, watch: Watch) -> FlushReport:
        """Write queued and refused blocks, then end the threads. Returns the report of that flush."""
        self._expiry.close()
        self.executor.close()
        self._context.shared_lookup.close()
        self.promoter.wait_idle()
        # a hung store has stored nothing, so it is not awaited
        report = self._flush(self._remaining(CLOSE_S), watch, None, fleet=False)
        for queue in self.write_back_queues:
            if len(queue):
                queue.give_up()
            queue.close()
        self._context.canary.close()
        self._syncs.close()
        return report

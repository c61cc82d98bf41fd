"""What moves between tiers, and what makes room: write-through, demotion, promotion, eviction from host."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block.address import Address
from kvcache.block.record import record_bytes
from kvcache.hierarchy.ask import Ask
from kvcache.hierarchy.bypass import Bypass
from kvcache.hierarchy.coder import Coder
from kvcache.hierarchy.holds import Holds
from kvcache.hierarchy.index import Index
from kvcache.hierarchy.lane import Lane
from kvcache.hierarchy.promote import Promoter
from kvcache.hierarchy.run import Chained
from kvcache.observe.events import Events
from kvcache.observe.metrics import Counters
from kvcache.port import Port
from kvcache.tier.arena import Slot
from kvcache.tier.host import HostTier
from kvcache.tier.tier import Tier

VICTIMS_A_SLOT = 64
"""How many records one slot may cost: more only where sizes are mixed, and then the search ends as 'no room'."""


class Flow:
    def __init__(
        self,
        *,
        index: Index,
        host: HostTier,
        below: Sequence[Tier],
        coder: Coder,
        counters: Counters,
        events: Events,
        port: Port,
        ask: Ask,
        queue_blocks: int,
        threads: int,
    ) -> None:
        self.index, self.host, self.below, self.port = index, host, below, port
        self.counters, self.events, self.bypass, self.ask = counters, events, Bypass(), ask
        self.lanes = [
            Lane(
                tier,
                index=index,
                host=host,
                coder=coder,
                counters=counters,
                events=events,
                port=port,
                queue_blocks=queue_blocks,
                ask=ask,
            )
            for tier in below
        ]
        self.promoter = Promoter(
            index=index, host=host, below=below, coder=coder, counters=counters, events=events, port=port
        )
        self.holds = Holds(index, [host, *below])
        self.executor = port.executor(threads, "copy")
        self._storing = 0
        self._changed = port.condition()

    # host memory

    def slot(self, payload_bytes: int, tenant: str, *, before: int) -> Slot | None:
        """A host slot: a free one, else a victim's that a tier below has too, else one whose record is handed down
        or, where the queue has no room, dropped. Never one used at `before` or later. None where there is none."""
        size = record_bytes(payload_bytes)
        slot = self.host.allocate(size, tenant)
        for stored_below in (True, False) if self.lanes else (False,):
            for _ in range(VICTIMS_A_SLOT):
                if slot is not None:
                    return slot
                victims = self.index.evict(self.host.name, before=before, stored_below=stored_below)
                if not victims:
                    break
                self._leave_host(*victims[0], size, tenant)
                slot = self.host.allocate(size, tenant)
        return slot

    def _leave_host(self, victim: Address, kept: bool, size: int, tenant: str) -> None:
        held = self.host.borrow(victim)
        if held is None:
            return
        extent = held.slot.extent
        others = []
        if (extent.slot_bytes, extent.tenant) != (size, tenant):
            # its slot is of no use: the whole extent goes, so that it can be cut anew
            others = [a for a in self.host.siblings(victim) if a.name != victim.name]
        self.host.arena.release(held.slot)
        self._withdraw(victim, kept, extent.slot_bytes)
        for address in others:
            if self.index.discard(address, self.host.name, unless_held=True):
                self._withdraw(address, self.index.contains(address), extent.slot_bytes)

    def _withdraw(self, address: Address, kept: bool, size: int) -> None:
        self.host.withdraw(address)
        said = "yes" if kept else "no"
        self.counters.add("evicted_blocks", tier=self.host.name, kept=said)
        self.events.add("evicted", tier=self.host.name, namespace=address.namespace, bytes=size, reason=f"kept: {said}")

    # down

    def write_through(self, chain: Chained, first: int, end: int) -> None:
        """Offer the chain's blocks `first` to `end` to every lane, and what of those before it a lane lacks."""
        for lane in self.lanes:
            head = first
            while head and not lane.has(chain[head - 1]):
                head -= 1
            offered = [address for address in map(chain.__getitem__, range(head, end)) if not lane.has(address)]
            dropped = lane.offer(offered)
            self.drop(dropped, f"{lane.tier.name} queue", chain.namespace, tier=lane.tier.name)

    def drop(self, blocks: int, reason: str, namespace: bytes, *, tier: str) -> None:
        """Say that these were offered to a tier and not kept."""
        self.counters.add("drops", blocks, reason=reason)
        self.events.add("dropped", tier=tier, namespace=namespace, blocks=blocks, reason=reason)

    # barriers

    def begin_store(self) -> None:
        with self._changed:
            self._storing += 1

    def end_store(self) -> None:
        with self._changed:
            self._storing -= 1
            self._changed.notify_all()

    def flush(self, timeout_s: float | None = None) -> bool:
        clock = self.port.clock
        end = None if timeout_s is None else clock.now() + timeout_s

        def left() -> float | None:
            return None if end is None else max(0.0, end - clock.now())

        with self._changed:
            if not self._changed.wait_for(lambda: self._storing == 0, left()):
                return False
        for lane in self.lanes:
            if not lane.wait_empty(left()):
                return False
            if not lane.tier.sync():
                return False
        return True

    def close(self) -> bool:
        """End the threads; what is queued is written first. As `flush`, whether everything is where it should be."""
        self.executor.close()
        self.ask.close()
        self.promoter.wait_idle()
        for lane in self.lanes:
            lane.close()
        synced = [lane.tier.sync() for lane in self.lanes]  # each, also where one failed
        return all(synced)

"""The way down into one tier: a bounded queue of host records to write there, emptied in the background.

Heads go before tails: a record is queued only where its parent is in the tier or in the queue. While a record is
queued the index holds it, so that it does not leave host before it was written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from kvcache.block.address import Address
from kvcache.block.record import record_bytes
from kvcache.hierarchy.ask import Ask
from kvcache.hierarchy.coder import Coder
from kvcache.hierarchy.index import Index
from kvcache.hierarchy.run import Run
from kvcache.observe.events import Events, Kind
from kvcache.observe.metrics import Counters
from kvcache.port import Port
from kvcache.tier.host import Held, HostTier, segments
from kvcache.tier.tier import BACKGROUND, Outcome, Segments, Tier

BATCH_BYTES = 32 << 20


class Lane:
    def __init__(
        self,
        tier: Tier,
        *,
        index: Index,
        host: HostTier,
        coder: Coder,
        counters: Counters,
        events: Events,
        port: Port,
        queue_blocks: int,
        ask: Ask,
    ) -> None:
        self.tier, self.queue_blocks, self._ask = tier, queue_blocks, ask
        self._index, self._host, self._coder = index, host, coder
        self._counters, self._events = counters, events
        self._queue: deque[Address] = deque()
        self._names: set[bytes] = set()  # queued or being written
        self._changed = port.condition()
        self._draining = False
        self._executor = port.executor(1, f"{tier.name}-writer")

    def __len__(self) -> int:
        return len(self._names)

    def has(self, address: Address) -> bool:
        """The tier has it, or will."""
        return address.name in self._names or self._index.contains(address, self.tier.name)

    def offer(self, chain: Sequence[Address]) -> int:
        """Queue these, heads first; how many the queue could not take (the last ones)."""
        with self._changed:
            new = [a for a in chain if a.name not in self._names]
            taken = new[: max(0, self.queue_blocks - len(self._names))]
            for address in taken:
                if any(self._index.hold(Run.of(address))):
                    self._names.add(address.name)
                    self._queue.append(address)
            start = bool(self._queue) and not self._draining
            if start:
                self._draining = True
        if start:
            self._executor.submit(self._drain)
        return len(new) - len(taken)

    def wait_empty(self, timeout_s: float | None = None) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._names, timeout_s)

    def _drain(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._draining = False
                    return
                batch, size = [], 0
                while self._queue and size < BATCH_BYTES:
                    batch.append(self._queue.popleft())
                    held = self._host.borrow(batch[-1])
                    if held is None:
                        self._end(batch.pop())
                        continue
                    self._host.arena.release(held.slot)
                    size += record_bytes(held.payload_bytes)
            try:
                self._write(batch)
            finally:
                with self._changed:
                    for address in batch:
                        self._end(address)

    def _end(self, address: Address) -> None:
        self._names.discard(address.name)
        self._index.release(Run.of(address))
        self._changed.notify_all()

    def _write(self, batch: Sequence[Address]) -> None:
        records: list[Held] = []
        forms: list[Segments] = []  # of each record, as the tier keeps it
        try:
            for address in batch:
                held = self._host.borrow(address)
                if held is None:  # cleared while it was queued
                    continue
                records.append(held)
                forms.append(self._form(held))
            fit = len(records) if self.tier.shared else self._with_room(records, forms)
            addresses = [held.address for held in records[:fit]]
            ticket = self.tier.submit("write", addresses, forms[:fit], priority=BACKGROUND)
            ticket.wait()
            for held, outcome in zip(records[:fit], ticket.outcomes, strict=True):
                if outcome is Outcome.DONE:
                    self._index.insert(held.address, self.tier.name)
                    self._counters.add("written_blocks", tier=self.tier.name)
                else:
                    self._counters.add("write_failures", tier=self.tier.name, outcome=outcome.value)
                    self._say("dropped", held.address, outcome.value)
            if self.tier.shared:
                self._ask.bound(self.tier)
        finally:
            for held in records:
                self._host.arena.release(held.slot)

    def _form(self, held: Held) -> Segments:
        """The record as it goes: as its slot has it, but for a codec."""
        encoded = self._coder.encoded(held, self.tier.name)
        if encoded is not None:
            return encoded
        self._host.seal(held)
        return segments(held)

    def _with_room(self, records: Sequence[Held], forms: Sequence[Segments]) -> int:
        """Evict from the tier until these fit; how many, from the front, do."""
        for i, (held, form) in enumerate(zip(records, forms, strict=True)):
            size = sum(map(len, form))
            # the tier counts what it has written, not the records of this batch that are still to come
            while self.tier.room(size) <= i:
                victims = self._index.evict(self.tier.name, before=self._index.stamp(held.address))
                if not victims or not self._leave(victims[0][0], size):
                    reason = f"{self.tier.name} full"
                    self._counters.add("drops", len(records) - i, reason=reason)
                    self._say("dropped", held.address, reason, len(records) - i)
                    return i
        return len(records)

    def _leave(self, victim: Address, size: int) -> bool:
        """The index let go of it; the tier lets go of it too, and of all its siblings where their size is another.

        Whether that made room. A tier that cannot write may not be able to forget either: what it keeps is found as
        before, and nobody asks it for more.
        """
        room = self.tier.room(size)
        siblings = [a for a in self.tier.siblings(victim) if a.name != victim.name]
        if not self._remove([victim]):
            return False
        if self.tier.room(size) == room:
            self._remove([a for a in siblings if self._index.discard(a, self.tier.name, unless_held=True)])
        return self.tier.room(size) > room

    def _remove(self, victims: Sequence[Address]) -> bool:
        """Take these, which the index let go of, out of the tier; True if all went."""
        gone = True
        for address, outcome in zip(victims, self.tier.remove(victims), strict=True):
            if outcome in (Outcome.DONE, Outcome.ABSENT):
                kept = "yes" if self._index.contains(address) else "no"
                self._counters.add("evicted_blocks", tier=self.tier.name, kept=kept)
                self._say("evicted", address, f"kept: {kept}")
            else:
                self._index.insert(address, self.tier.name)
                gone = False
        return gone

    def _say(self, kind: Kind, address: Address, reason: str, blocks: int = 1) -> None:
        self._events.add(kind, tier=self.tier.name, namespace=address.namespace, blocks=blocks, reason=reason)

    def close(self) -> None:
        self._executor.close()

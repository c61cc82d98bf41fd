"""The write queue of one lower tier: a bounded queue of host records, written in the background.

Heads are written before tails: a record is written only if its parent is in the tier. The index holds a queued record,
so that host memory cannot evict it before it is written. A record that host evicts is queued as a copy, and its missing
heads are queued before it without a hold. If such a head is evicted too, its queue entry gets a copy as well.

Writes to the tier evict its own records within tenants' quotas. `VictimBuffer` holds the copies.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Sequence
from itertools import groupby

from kvcache.block.record import Address, record_bytes
from kvcache.cache.context import CacheContext
from kvcache.cache.refused import Refused, Scope
from kvcache.evict.quotas import UNLIMITED
from kvcache.index.block_run import BlockRun, ChainView, as_run, chained_runs, shard_key_of
from kvcache.log import logger
from kvcache.observe.events import EventKind
from kvcache.settings.tiers import WriteMode
from kvcache.tier.host.arena import Region, Slab, Slot
from kvcache.tier.host.tier import HostRecord, segments
from kvcache.tier.tier import BACKGROUND, Outcome, Segments, SupportsColocation, Ticket, Tier, call

# Copies of records that host has evicted, in bounded, reused memory.

MAX_BUFFER_BYTES = 64 << 20


class VictimBuffer:
    """Copies of evicted records that are not written yet, by name.

    Thread safety: any thread.
    """

    def __init__(self, max_bytes: int = MAX_BUFFER_BYTES) -> None:
        self._most_bytes = max_bytes
        self._copies: dict[bytes, HostRecord] = {}
        self._free: list[Region] = []  # kept for reuse: fresh memory costs more than the copy
        self._taken_bytes = 0  # of copies and free regions
        self._lock = threading.Lock()

    def take(self, held: HostRecord) -> bool:
        """Copy a record to which the caller holds a reference. False if there is no space."""
        size = record_bytes(held.payload_bytes)
        with self._lock:
            if held.address.name in self._copies:
                return True
            region = self._region(size)
            if region is None:
                return False
            slot = Slot(Slab(region, size, held.slot.slab.tenant), 0)
            slot.view[:] = held.slot.view[:size]
            slot.sealed, slot.expires_ms = held.slot.sealed, held.slot.expires_ms
            self._copies[held.address.name] = HostRecord(held.address, slot, held.payload_bytes)
            return True

    def find(self, address: Address) -> HostRecord | None:
        return self._copies.get(address.name)

    def release(self, addresses: Sequence[Address]) -> None:
        """Remove the copies of these records, where there are any."""
        with self._lock:
            found = (self._copies.pop(address.name, None) for address in addresses)
            self._free += [held.slot.slab.region for held in found if held is not None]

    def wipe(self) -> None:
        """Overwrite the memory of removed copies."""
        with self._lock:
            for region in self._free:
                region.view[:] = bytes(region.bytes)

    def _region(self, size: int) -> Region | None:
        at = next((i for i, region in enumerate(self._free) if region.bytes == size), None)
        if at is not None:
            return self._free.pop(at)
        while self._free and self._taken_bytes + size > self._most_bytes:
            self._taken_bytes -= self._free.pop().bytes
        if self._taken_bytes + size > self._most_bytes:
            return None
        self._taken_bytes += size
        return Region(size)


MAX_BATCH_BYTES = 32 << 20
MAX_BATCH_RECORDS = 256
"""The most records in a batch, however small."""
MAX_VICTIMS_PER_CALL = 32
"""The most records evicted at a time: a limit on useless evictions if the tier turns out to remove none."""
FUTILE_EVICTION_DIVISOR = 8
"""A tier may evict 1/8 of itself without a gain in space, as evictions of another size do until they free enough."""


PendingWrite = tuple[HostRecord, Segments]
"""A queued record, and its encoded form in the tier."""

_log = logger("kvcache.lane")


class WriteBackQueue:
    def __init__(self, tier: Tier, context: CacheContext, mode: WriteMode) -> None:
        self.tier, self.mode, self.queue_blocks = tier, mode, context.settings.flow.queue_blocks
        self._index, self._host, self._cost_classes = context.index, context.host, context.cost_classes
        self._record_codec, self._expiry, self._shared_lookup = (
            context.record_codec,
            context.expiry,
            context.shared_lookup,
        )
        self._counters, self._events, self._miss_explainer = context.counters, context.events, context.miss_explainer
        self._queue: deque[Address] = deque()
        self._names: dict[bytes, bytes] = {}  # queued or being written; the namespace of each
        self._held: set[bytes] = set()  # those that the index holds for this queue
        self._again: set[bytes] = set()  # those that `offer_again` queued: their refusals are counted already
        self.refused = Refused(self._index, tier.name)
        self.victim_buffer = VictimBuffer()
        self._writing: Ticket | None = None
        self._given_up = False
        self._changed = context.os_env.condition()
        self._draining = False
        self._batch_records = 1  # the number of records of the last written size that MAX_BATCH_BYTES holds
        self._number = self._index.tiers.index(tier.name)
        self._executor = context.os_env.executor(1, f"{tier.name}-writer")

    def __len__(self) -> int:
        return len(self._names)

    def has(self, address: Address) -> bool:
        """Whether the tier has the record or will have it."""
        return address.name in self._names or self.is_written(address)

    def is_written(self, address: Address) -> bool:
        return self._index.contains(address, self.tier.name)

    def offer(self, chain: ChainView, first: int, end: int) -> int:
        """Queue the blocks `first` to `end` (excluded) that the tier lacks, and missing earlier ones, heads first.

        Returns the number of blocks that did not fit into the queue, which are the last ones.
        """
        offered = first
        while first and not self.has(chain[first - 1]):
            first -= 1
        masks = self._index.tier_masks(chain.run(first, end))
        heads = offered - first  # of these, only records in host memory can be written
        lacking = [
            first + i for i, mask in enumerate(masks) if not mask >> self._number & 1 and (i >= heads or mask & 1)
        ]
        with self._changed:
            new = [address for address in chain.addresses(lacking) if address.name not in self._names]
            taken = new[: max(0, self.queue_blocks - len(self._names))]
            at, all_removed = 0, list[Address]()
            while at < len(taken):  # skip blocks that no tier has any more
                held = sum(self._index.hold(as_run(taken[at:])))
                names = [address.name for address in taken[at : at + held]]
                self._names.update(dict.fromkeys(names, chain.namespace))
                self._held.update(names)
                self._queue += taken[at : at + held]
                all_removed += taken[at + held : at + held + 1]
                at += held + 1
        self._start()
        self.refused.add(all_removed)
        if len(taken) < len(new):
            dropped = new[len(taken) :]
            self.refused.add(dropped)
            self._miss_explainer.dropped(
                self.tier.name, [address.signature for address in dropped], f"{self.tier.name} queue"
            )
        return len(new) - len(taken)

    def offer_again(self, address: Address, timeout_s: float | None) -> bool:
        """Queue a block that the tier refused before, once the queue has space; False if time ran out first."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._names) < self.queue_blocks, timeout_s):
                return address.name in self._names
            if address.name not in self._names and any(self._index.hold(BlockRun.of(address))):
                self._names[address.name] = address.namespace
                self._held.add(address.name)
                self._again.add(address.name)
                self._queue.append(address)
        self._start()
        return True

    def demote(self, held: HostRecord) -> bool:
        """Queue a copy of a record that host is about to evict, after those of its heads that the tier lacks.

        The caller holds a reference. False if there is no space or a head is missing everywhere.
        """
        address = held.address
        heads = self.heads(address)
        with self._changed:
            new = [a for a in (*(heads or ()), address) if a.name not in self._names]
            fits = heads is not None and len(self._names) + len(new) <= self.queue_blocks
            taken = fits and self.victim_buffer.take(held)
            if taken:
                self._names.update((a.name, a.namespace) for a in new)
                self._queue += new
        if taken:
            self._start()
        else:
            self.refused.add([address])
        return taken

    def heads(self, address: Address, known: Collection[bytes] = ()) -> list[Address] | None:
        """The blocks before this one that the tier lacks, down to a `known` one, first to last.

        None if one of them is not in host.
        """
        heads: list[Address] = []
        while (parent := self._head(address)) is not None and parent.name not in known and not self.has(parent):
            held = self._host.acquire(parent)
            if held is None:
                return None
            self._host.arena.release(held.slot)
            address = held.address
            heads.append(address)
        return heads[::-1]

    def _head(self, address: Address) -> Address | None:
        """The previous block, without which this one is unusable."""
        if address.parent in (b"", address.namespace) or not self._record_codec.requires_prefix(address):
            return None
        return Address(address.namespace, address.parent, b"", address.group, address.shard)

    def _start(self) -> None:
        with self._changed:
            start = bool(self._queue) and not self._draining
            if start:
                self._draining = True
        if start:
            self._executor.submit(self._drain)

    def queued(self, scope: Scope | None = None) -> set[bytes]:
        """Names of the records queued or being written."""
        with self._changed:
            return {name for name, namespace in self._names.items() if scope is None or scope(namespace)}

    def wait_written(self, names: Collection[bytes], timeout_s: float | None = None) -> bool:
        """Wait until none of these is queued any more, whether it was written or not."""
        with self._changed:
            return self._changed.wait_for(lambda: self._names.keys().isdisjoint(names), timeout_s)

    def give_up(self) -> None:
        """Settle a hung write, and those after it, as failed. Only `close` may follow."""
        self._given_up = True
        if (ticket := self._writing) is not None:
            ticket.settle_many(0, [Outcome.FAILED] * len(ticket.outcomes))

    def _drain(self) -> None:
        while True:
            with self._changed:
                if not self._queue:
                    self._draining = False
                    return
                batch = [self._queue.popleft() for _ in range(min(len(self._queue), self._batch_records))]
            try:
                self._write(batch)
            except Exception:  # noqa: BLE001  worker thread that must survive: the next batch may succeed
                self._counters.add("write_failures", len(batch), tier=self.tier.name, outcome=Outcome.FAILED.value)
                self._miss_explainer.dropped(
                    self.tier.name, [a.signature for a in batch], Outcome.FAILED.value, failed=True
                )
                self._refuse(batch)
                _log.exception("write to %s failed; blocks=%d are dropped there", self.tier.name, len(batch))
            finally:
                with self._changed:
                    self._end(batch)
                    self._changed.notify_all()

    def _end(self, batch: Sequence[Address]) -> None:
        self.victim_buffer.release(batch)
        held = [address for address in batch if address.name in self._held]
        for _, addresses in groupby(held, key=shard_key_of):
            self._index.release(as_run(list(addresses)))
        for address in batch:
            self._names.pop(address.name, None)
            self._held.discard(address.name)
            self._again.discard(address.name)

    def _write(self, batch: Sequence[Address]) -> None:
        # records that were cleared while queued are not in host any more, unless a copy exists
        pairs = zip(batch, self._host.acquire_all(batch), strict=True)
        borrowed = [held for _, held in pairs if held is not None]
        try:
            by_name = {held.address.name: held for held in borrowed}
            found = [by_name.get(a.name) or self.victim_buffer.find(a) for a in batch]
            records = self._with_parents([held for held in found if held is not None])
            pending = list(zip(records, map(self._encode, records), strict=True))
            pending = pending if self.tier.shared else self._evict_for(self._within_quota(pending))
            addresses = [held.address for held, _ in pending]
            encoded_records = [encoded_record for _, encoded_record in pending]
            ticket = self._writing = self.tier.submit("write", addresses, encoded_records, priority=BACKGROUND)
            if self._given_up:
                self.give_up()
            ticket.wait()
            self._settle(addresses, ticket.outcomes)
            done = zip(pending, ticket.outcomes, strict=True)
            self._expiry.keep([(h.address, h.slot.expires_ms) for (h, _), o in done if o is Outcome.DONE])
            if self.tier.shared:
                self._shared_lookup.trim_index(self.tier)
            if encoded_records:
                self._batch_records = max(
                    1,
                    min(
                        MAX_BATCH_RECORDS,
                        MAX_BATCH_BYTES // max(sum(map(len, encoded_record)) for encoded_record in encoded_records),
                    ),
                )
        finally:
            self._host.arena.release(*[held.slot for held in borrowed])

    def _with_parents(self, records: Sequence[HostRecord]) -> list[HostRecord]:
        """The records whose parent is in the tier or is written before them."""
        pending: set[bytes] = set()
        fit = []
        for held in records:
            head = self._head(held.address)
            if head is None or head.name in pending or self.is_written(head):
                pending.add(held.address.name)
                fit.append(held)
            else:
                self._drop(held.address, "orphan")
        return fit

    def _settle(self, addresses: Sequence[Address], outcomes: Sequence[Outcome]) -> None:
        written = [a for a, outcome in zip(addresses, outcomes, strict=True) if outcome is Outcome.DONE]
        if len(written) < len(addresses) and not self.tier.shared:
            written = self._without_tails(written)
        for run, parent in chained_runs(written):
            self._index.insert_run(run, parent, self.tier.name)
        self.refused.reached(written)
        self._counters.add("written_blocks", len(written), tier=self.tier.name)
        self._refuse([a for a, outcome in zip(addresses, outcomes, strict=True) if outcome is not Outcome.DONE])
        for address, outcome in zip(addresses, outcomes, strict=True):
            if outcome is not Outcome.DONE and address.name not in self._again:
                self._counters.add("write_failures", tier=self.tier.name, outcome=outcome.value)
                self._say("dropped", address, outcome.value)
                self._miss_explainer.dropped(self.tier.name, [address.signature], outcome.value, failed=True)

    def _without_tails(self, written: Sequence[Address]) -> list[Address]:
        """The written records without those whose parent failed in the same batch, which are removed again."""
        pending: set[bytes] = set()
        headless = []
        for address in written:
            head = self._head(address)
            if head is None or head.name in pending or self.is_written(head):
                pending.add(address.name)
            else:
                headless.append(address)
        call(self.tier, "remove", headless)
        self._counters.add("drops", sum(address.name not in self._again for address in headless), reason="orphan")
        self._refuse(headless)
        return [address for address in written if address.name in pending]

    def _encode(self, held: HostRecord) -> Segments:
        """The record's form in the tier: as in its slot, unless a codec encodes it."""
        encoded = self._record_codec.encode(held, self.tier.name)
        if encoded is not None:
            return encoded
        self._host.seal(held)
        return segments(held)

    def _within_quota(self, pending: Sequence[PendingWrite]) -> list[PendingWrite]:
        """The records that fit each tenant's quota after eviction of its own records; the others are dropped."""
        kept: list[PendingWrite] = []
        lacking: dict[str, int] = {}  # by tenant, from its first record that did not fit
        planned_bytes: dict[str, int] = {}
        for held, encoded_record in pending:
            tenant, size = held.slot.slab.tenant, sum(map(len, encoded_record))
            if self._cost_classes.quotas.of(tenant, self.tier.name).quota_bytes != UNLIMITED and tenant not in lacking:
                need = planned_bytes.get(tenant, 0) + size
                while (spare := self._cost_classes.spare_bytes(self.tier.name, tenant)) < need:
                    before = self._index.stamp(held.address)
                    victims = self._cost_classes.evict(self.tier.name, 1, tenant=tenant, own=True, before=before)
                    if not victims or not self._remove([victim.address for victim in victims]):
                        break
                if spare >= need:
                    planned_bytes[tenant] = need
                else:
                    lacking[tenant] = 0
            if tenant in lacking:
                self._drop_for_capacity(held, f"{self.tier.name} quota")
            else:
                kept.append((held, encoded_record))
        return kept

    def _evict_for(self, pending: Sequence[PendingWrite]) -> list[PendingWrite]:
        """Evict from the tier until these records fit; those that do.

        A tenant that finds no space costs other tenants nothing.
        """
        kept: list[PendingWrite] = []
        lacking: set[str] = set()
        free_slots: dict[int, int] = {}  # by size, as the tier counts it: without the records of this batch
        for i, (held, encoded_record) in enumerate(pending):
            tenant, size = held.slot.slab.tenant, sum(map(len, encoded_record))
            if size not in free_slots:
                free_slots[size] = self.tier.free_slots(size)
            futile_bytes = 0  # bytes evicted since the space last grew
            while free_slots[size] <= len(kept) and tenant not in lacking:
                stamp = self._index.stamp(held.address)
                same_size = sum(1 for h, f in pending[i:] if sum(map(len, f)) == size and h.slot.slab.tenant == tenant)
                victims = self._cost_classes.evict(
                    self.tier.name, min(same_size, MAX_VICTIMS_PER_CALL), tenant=tenant, before=stamp
                )
                freed = self._leave([victim.address for victim in victims], size, tenant) if victims else 0
                found = self.tier.free_slots(size)
                futile_bytes = 0 if found > free_slots[size] else futile_bytes + freed
                free_slots = {size: found}
                if not freed or futile_bytes > self.tier.usage().capacity_bytes // FUTILE_EVICTION_DIVISOR:
                    lacking.add(tenant)
            if tenant in lacking:
                self._drop_for_capacity(held, f"{self.tier.name} full")
            else:
                kept.append((held, encoded_record))
        return kept

    def _drop_for_capacity(self, held: HostRecord, reason: str) -> None:
        """Count and report that there was no space for this record."""
        if held.address.name not in self._again:  # the first refusal is the reason that a later miss gives
            self._miss_explainer.dropped(self.tier.name, [held.address.signature], reason)
        self._drop(held.address, reason)

    def _drop(self, address: Address, reason: str) -> None:
        self._refuse([address])
        if address.name not in self._again:
            self._counters.add("drops", reason=reason)
            self._say("dropped", address, reason)

    def _refuse(self, addresses: Sequence[Address]) -> None:
        """Record that the tier did not take these. In write-back mode, host offers a resident block at its eviction."""
        self.refused.add(addresses, keep=self.mode != "write_back")

    def _leave(self, victims: Sequence[Address], size: int, tenant: str) -> int:
        """Remove from the tier the records that the index has evicted; the bytes freed.

        If that adds no space for `size`, all colocated records of the first one are removed too, within quotas. A tier
        that cannot write may also fail to remove records. Those that it keeps stay in the index, and the eviction ends.
        """
        free_slots, used = self.tier.free_slots(size), self.tier.usage().used_bytes
        names = {address.name for address in victims}
        colocated: list[Address] = []
        if isinstance(self.tier, SupportsColocation):
            colocated = [a for a in self.tier.colocated(victims[0]) if a.name not in names]
        if self._remove(victims) and colocated and self.tier.free_slots(size) == free_slots:
            evictable = self._cost_classes.evictable(self.tier.name, colocated, tenant)
            self._remove([a for a in evictable if self._index.discard(a, self.tier.name, unless_held=True)])
        return used - self.tier.usage().used_bytes

    def _remove(self, victims: Sequence[Address]) -> bool:
        """Remove evicted records from the tier; True if all were removed."""
        all_removed = True
        for address, outcome in zip(victims, call(self.tier, "remove", victims), strict=True):
            if outcome in (Outcome.DONE, Outcome.NOT_FOUND):
                kept = "yes" if self._index.contains(address) else "no"
                self._counters.add("evicted_blocks", tier=self.tier.name, kept=kept)
                self._say("evicted", address, f"kept: {kept}")
            else:
                self._index.insert(address, self.tier.name)
                all_removed = False
        return all_removed

    def _say(self, kind: EventKind, address: Address, reason: str, blocks: int = 1) -> None:
        self._events.add(kind, tier=self.tier.name, namespace=address.namespace, blocks=blocks, reason=reason)

    def close(self) -> None:
        self._executor.close()

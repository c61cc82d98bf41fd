"""Expiry: records with an end are a miss in every tier afterwards, and are removed from this cache's own tiers.

The end is a field of the record, so every later reader knows it, after a restart or in another process. In memory there
is one entry for each run of blocks that were stored together, and the newest end of each block. No timer runs: each
lookup first removes expired records. One sweep is bounded, so that no caller waits long. It costs one comparison if
nothing has expired.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcache.block.record import Address
from kvcache.cache.miss_explainer import MissExplainer
from kvcache.index.index import Index
from kvcache.log import log_faults, logger
from kvcache.observe.events import EventLog
from kvcache.observe.metrics import Counters
from kvcache.os_env import Clock
from kvcache.tier.host.tier import HostTier
from kvcache.tier.tier import BACKGROUND, Outcome, Ticket, Tier

EXPIRED_REASON = "expired"
"""The reason given for removed records."""

MAX_SWEEP_RECORDS = 1024
"""The most records in one sweep."""
RETRY_AFTER_MS = 1000
"""The delay before a removal that a tier did not perform is tried again."""
MIN_COMPACT_RECORDS = 1 << 14
"""The number of noted ends up to which no check for stale entries is made."""

_log = logger("kvcache.expiry")


class _ExpiryRun(NamedTuple):
    due_ms: int
    order: int
    expires_ms: int
    addresses: Sequence[Address]


class Expiry:
    def __init__(
        self,
        *,
        index: Index,
        host: HostTier,
        lower_tiers: Sequence[Tier],
        counters: Counters,
        events: EventLog,
        miss_explainer: MissExplainer,
        clock: Clock,
    ) -> None:
        self._index, self._host, self._lower_tiers, self._clock = index, host, lower_tiers, clock
        self._counters, self._events, self._miss_explainer = counters, events, miss_explainer
        # a heap by due time; for a name with several entries, `_expiry_by_name` has the valid end
        self._ends: list[_ExpiryRun] = []
        self._expiry_by_name: dict[bytes, int] = {}
        self._noted = 0  # addresses in `_ends`
        self._closed = False
        self._order = itertools.count()
        self._pending_removals: list[Ticket] = []
        self._lock = threading.Lock()

    def end_ms(self, ttl_s: float | None) -> int:
        """The end of a record stored now, in milliseconds since 1970; 0 for never."""
        return 0 if ttl_s is None else int((self._clock.wall() + ttl_s) * 1000)

    def is_expired(self, expires_ms: int) -> bool:
        return 0 < expires_ms <= self._clock.wall() * 1000

    def note(self, addresses: Sequence[Address], expires_ms: int) -> None:
        """Set the end of these indexed records, whatever it was before; 0 for never."""
        if not addresses or not (expires_ms or self._expiry_by_name):
            return
        with self._lock:
            if not expires_ms:
                for address in addresses:
                    self._expiry_by_name.pop(address.name, None)
                return
            new = [address for address in addresses if self._expiry_by_name.get(address.name) != expires_ms]
            self._expiry_by_name.update((address.name, expires_ms) for address in new)
            self._push(expires_ms, expires_ms, new)
            if self._noted > max(MIN_COMPACT_RECORDS, 2 * sum(map(self._index.resident, self._index.tiers))):
                self._compact()

    def keep(self, ends: Sequence[tuple[Address, int]]) -> None:
        """Note the ends of records written to a tier, unless they have one already.

        A record that host evicted while it was queued may have lost its entry, or have expired meanwhile.
        """
        for expires_ms in {expires_ms for _, expires_ms in ends if expires_ms}:
            self.note([a for a, end in ends if end == expires_ms and a.name not in self._expiry_by_name], expires_ms)

    def learn(self, tell: Callable[[], Iterable[tuple[Address, int]]]) -> None:
        """Note the ends of records that a tier had at start. Run it on a background thread."""
        with log_faults(_log, "expirations could not be read"):
            for address, expires_ms in tell():
                if self._closed:
                    return
                self.note([address], expires_ms)

    def sweep(self) -> bool:
        """Remove expired records, at most MAX_SWEEP_RECORDS since an engine may wait; True if there are more."""
        first = self._ends[:1]  # a copy: other threads pop from it
        if not first or not self.is_expired(first[0].due_ms):
            return False
        over: list[tuple[int, Address]] = []
        with self._lock:
            scanned = 0
            while scanned < MAX_SWEEP_RECORDS and self._ends and self.is_expired(self._ends[0].due_ms):
                due_ms, _, expires_ms, addresses = heapq.heappop(self._ends)
                self._noted -= len(addresses)
                cut = max(0, len(addresses) - (MAX_SWEEP_RECORDS - scanned))
                self._push(due_ms, expires_ms, addresses[:cut])
                scanned += len(addresses) - cut
                for address in addresses[cut:]:
                    if self._expiry_by_name.get(address.name) == expires_ms:
                        del self._expiry_by_name[address.name]
                        over.append((expires_ms, address))
            more = bool(self._ends) and self.is_expired(self._ends[0].due_ms)
        self._leave([each for each in over[::-1] if self._is_unchanged(each[1], each[0])])
        return more

    def close(self) -> None:
        """Stop `learn`."""
        self._closed = True

    def _push(self, due_ms: int, expires_ms: int, addresses: Sequence[Address]) -> None:
        if addresses:
            heapq.heappush(self._ends, _ExpiryRun(due_ms, next(self._order), expires_ms, addresses))
            self._noted += len(addresses)

    def _compact(self) -> None:
        """Drop entries whose records are in no tier any more, or have a newer end."""
        newest, entries = self._expiry_by_name, self._ends
        self._expiry_by_name, self._ends, self._noted = {}, [], 0
        masks = iter(self._index.masks([address for entry in entries for address in entry.addresses]))
        for due_ms, _, expires_ms, addresses in entries:
            kept = []
            for address, mask in zip(addresses, masks, strict=False):
                if mask and newest.get(address.name) == expires_ms and address.name not in self._expiry_by_name:
                    self._expiry_by_name[address.name] = expires_ms
                    kept.append(address)
            self._push(due_ms, expires_ms, kept)

    def pending_removals(self, more: Sequence[Ticket] = ()) -> list[Ticket]:
        """Removals that tiers have not finished, after adding `more`."""
        with self._lock:
            self._pending_removals = [ticket for ticket in self._pending_removals if not ticket.done] + list(more)
            return list(self._pending_removals)

    def _is_unchanged(self, address: Address, expires_ms: int) -> bool:
        """False if host has the record with another end: it was removed and stored again meanwhile."""
        held = self._host.acquire(address)
        if held is None:
            return True
        self._host.arena.release(held.slot)
        return held.slot.expires_ms == expires_ms

    def _leave(self, over: Sequence[tuple[int, Address]]) -> None:
        """Remove expired records, tails first.

        Shared tiers do it alone: a server removes them, a store's reader skips them.
        """
        if not over:
            return
        for tier in (self._host, *self._lower_tiers):
            removed = [address for _, address in over if self._index.discard(address, tier.name)]
            if removed:
                self._miss_explainer.expired(tier.name, [address.signature for address in removed])
            if tier.shared:
                self._say(tier, removed)
            else:
                self._remove(tier, over, removed)

    def _remove(self, tier: Tier, over: Sequence[tuple[int, Address]], removed: Sequence[Address]) -> None:
        """Remove expired records from a tier; `removed` are those that the index has discarded.

        Records that the tier fails to remove are indexed again, so that they can be found and evicted, and are retried
        later.
        """
        had = {address.name for address in removed}
        remaining, retained = len(over), set[bytes]()

        def settled(i: int, outcome: Outcome) -> None:
            nonlocal remaining
            _, address = over[i]
            still_stored = address.name in had and outcome not in (Outcome.DONE, Outcome.NOT_FOUND)
            if still_stored:
                self._index.insert(address, tier.name)
            with self._lock:
                remaining -= 1
                retained.update([address.name] if still_stored else [])
                if remaining:
                    return
                self._again([each for each in over if each[1].name in retained])
            self._say(tier, [address for address in removed if address.name not in retained])

        self.pending_removals([tier.submit("remove", [a for _, a in over], priority=BACKGROUND, on_outcome=settled)])

    def _again(self, over: Sequence[tuple[int, Address]]) -> None:
        """Note these again for a retry, heads first as they were noted. Call with the lock held."""
        due_ms = int(self._clock.wall() * 1000) + RETRY_AFTER_MS
        ends: dict[int, list[Address]] = {}
        for expires_ms, address in over[::-1]:
            if self._expiry_by_name.setdefault(address.name, expires_ms) == expires_ms:
                ends.setdefault(expires_ms, []).append(address)
        for expires_ms, addresses in ends.items():
            self._push(due_ms, expires_ms, addresses)

    def _say(self, tier: Tier, removed: Sequence[Address]) -> None:
        self._counters.add("expired_blocks", len(removed), tier=tier.name)
        for namespace in dict.fromkeys(address.namespace for address in removed):
            blocks = sum(address.namespace == namespace for address in removed)
            self._events.add("evicted", tier=tier.name, namespace=namespace, blocks=blocks, reason=EXPIRED_REASON)

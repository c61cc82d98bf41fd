"""Records that have an end: when it has come they are a miss in every tier, and leave those that are this cache's own.

An end is a record's own field, so that whoever reads it later, after a restart or in another process, knows it too. In
memory there is one entry for a run of blocks that were stored together, and the newest end of each. Nothing runs by
itself: whatever is asked of the cache first lets go of what is over, of so much at a time that nobody waits for it,
which costs one comparison where nothing is.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from kvcache.block.record import Address
from kvcache.cache.miss_explainer import Why
from kvcache.index.index import Index
from kvcache.log import logger
from kvcache.observe.events import Events
from kvcache.observe.metrics import Counters
from kvcache.os_env import Clock
from kvcache.tier.host.tier import HostTier
from kvcache.tier.tier import BACKGROUND, Outcome, Ticket, Tier

EXPIRED = "expired"
"""The reason that is said of what was let go of."""

MOST = 1024
"""Records that one sweep looks at."""
AGAIN_MS = 1000
"""After which what a tier did not remove is tried again."""
LEAST = 1 << 14
"""Ends that may be noted without a look at what is still here."""

_log = logger("kvcache.expiry")


class _Run(NamedTuple):
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
        below: Sequence[Tier],
        counters: Counters,
        events: Events,
        why: Why,
        clock: Clock,
    ) -> None:
        self._index, self._host, self._below, self._clock = index, host, below, clock
        self._counters, self._events, self._why = counters, events, why
        self._ends: list[_Run] = []  # by when they are due; of a name that is there twice the last word counts:
        self._end_of: dict[bytes, int] = {}
        self._noted = 0  # addresses in `_ends`
        self._closed = False
        self._order = itertools.count()
        self._leaving: list[Ticket] = []
        self._lock = threading.Lock()

    def end_ms(self, ttl_s: float | None) -> int:
        """When what is stored now ends, in milliseconds since 1970; 0 for never."""
        return 0 if ttl_s is None else int((self._clock.wall() + ttl_s) * 1000)

    def over(self, expires_ms: int) -> bool:
        return 0 < expires_ms <= self._clock.wall() * 1000

    def note(self, addresses: Sequence[Address], expires_ms: int) -> None:
        """These are in the index and end then, whatever was said of them before; 0 for never."""
        if not addresses or not (expires_ms or self._end_of):
            return
        with self._lock:
            if not expires_ms:
                for address in addresses:
                    self._end_of.pop(address.name, None)
                return
            new = [address for address in addresses if self._end_of.get(address.name) != expires_ms]
            self._end_of.update((address.name, expires_ms) for address in new)
            self._push(expires_ms, expires_ms, new)
            if self._noted > max(LEAST, 2 * sum(map(self._index.resident, self._index.tiers))):
                self._compact()

    def keep(self, ends: Sequence[tuple[Address, int]]) -> None:
        """These came into a tier and have an end. It is noted where none is: of what left host on its way there, it may
        have been forgotten meanwhile, or have come."""
        for expires_ms in {expires_ms for _, expires_ms in ends if expires_ms}:
            self.note([a for a, end in ends if end == expires_ms and a.name not in self._end_of], expires_ms)

    def learn(self, tell: Callable[[], Iterable[tuple[Address, int]]]) -> None:
        """What a tier has from before: its records that end, and when. Run where reading them is in nobody's way."""
        try:
            for address, expires_ms in tell():
                if self._closed:
                    return
                self.note([address], expires_ms)
        except Exception:  # noqa: BLE001  law: never in the way; what has ended is a miss all the same when it is read
            _log.exception("what ends was not learned")

    def sweep(self) -> bool:
        """Let go of what is over, of `MOST` at a time, since an engine may wait; True where there is more."""
        first = self._ends[:1]  # others take from it
        if not first or not self.over(first[0].due_ms):
            return False
        over: list[tuple[int, Address]] = []
        with self._lock:
            looked = 0
            while looked < MOST and self._ends and self.over(self._ends[0].due_ms):
                due_ms, _, expires_ms, addresses = heapq.heappop(self._ends)
                self._noted -= len(addresses)
                cut = max(0, len(addresses) - (MOST - looked))
                self._push(due_ms, expires_ms, addresses[:cut])
                looked += len(addresses) - cut
                for address in addresses[cut:]:
                    if self._end_of.get(address.name) == expires_ms:
                        del self._end_of[address.name]
                        over.append((expires_ms, address))
            more = bool(self._ends) and self.over(self._ends[0].due_ms)
        self._leave([each for each in over[::-1] if self._is_same(each[1], each[0])])
        return more

    def close(self) -> None:
        """Learn no more."""
        self._closed = True

    def _push(self, due_ms: int, expires_ms: int, addresses: Sequence[Address]) -> None:
        if addresses:
            heapq.heappush(self._ends, _Run(due_ms, next(self._order), expires_ms, addresses))
            self._noted += len(addresses)

    def _compact(self) -> None:
        """Forget what left by another way, and what was said before the last word."""
        said, entries = self._end_of, self._ends
        self._end_of, self._ends, self._noted = {}, [], 0
        masks = iter(self._index.masks([address for entry in entries for address in entry.addresses]))
        for due_ms, _, expires_ms, addresses in entries:
            kept = []
            for address, mask in zip(addresses, masks, strict=False):
                if mask and said.get(address.name) == expires_ms and address.name not in self._end_of:
                    self._end_of[address.name] = expires_ms
                    kept.append(address)
            self._push(due_ms, expires_ms, kept)

    def leaving(self, more: Sequence[Ticket] = ()) -> list[Ticket]:
        """What was let go of and has not left yet, with these."""
        with self._lock:
            self._leaving = [ticket for ticket in self._leaving if not ticket.done] + list(more)
            return list(self._leaving)

    def _is_same(self, address: Address, expires_ms: int) -> bool:
        """Not one that left meanwhile and was stored anew, with another end."""
        held = self._host.borrow(address)
        if held is None:
            return True
        self._host.arena.release(held.slot)
        return held.slot.expires_ms == expires_ms

    def _leave(self, over: Sequence[tuple[int, Address]]) -> None:
        """Tails first. What others share goes by itself there: a server removes it, a store's reader passes it over."""
        if not over:
            return
        for tier in (self._host, *self._below):
            gone = [address for _, address in over if self._index.discard(address, tier.name)]
            if gone:
                self._why.expired(tier.name, [address.signature for address in gone])
            if tier.shared:
                self._say(tier, gone)
            else:
                self._remove(tier, over, gone)

    def _remove(self, tier: Tier, over: Sequence[tuple[int, Address]], gone: Sequence[Address]) -> None:
        """Take these out of a tier whose index let go of `gone`. What stays there is in the index again, so that it
        can be found and evicted, and is tried again later."""
        had = {address.name for address in gone}
        left, stays = len(over), set[bytes]()

        def settled(i: int, outcome: Outcome) -> None:
            nonlocal left
            _, address = over[i]
            here = address.name in had and outcome not in (Outcome.DONE, Outcome.ABSENT)
            if here:
                self._index.insert(address, tier.name)
            with self._lock:
                left -= 1
                stays.update([address.name] if here else [])
                if left:
                    return
                self._again([each for each in over if each[1].name in stays])
            self._say(tier, [address for address in gone if address.name not in stays])

        self.leaving([tier.submit("remove", [a for _, a in over], priority=BACKGROUND, on_outcome=settled)])

    def _again(self, over: Sequence[tuple[int, Address]]) -> None:
        """Heads first, as they were noted; under the lock."""
        due_ms = int(self._clock.wall() * 1000) + AGAIN_MS
        ends: dict[int, list[Address]] = {}
        for expires_ms, address in over[::-1]:
            if self._end_of.setdefault(address.name, expires_ms) == expires_ms:
                ends.setdefault(expires_ms, []).append(address)
        for expires_ms, addresses in ends.items():
            self._push(due_ms, expires_ms, addresses)

    def _say(self, tier: Tier, gone: Sequence[Address]) -> None:
        self._counters.add("expired_blocks", len(gone), tier=tier.name)
        for namespace in dict.fromkeys(address.namespace for address in gone):
            blocks = sum(address.namespace == namespace for address in gone)
            self._events.add("evicted", tier=tier.name, namespace=namespace, blocks=blocks, reason=EXPIRED)

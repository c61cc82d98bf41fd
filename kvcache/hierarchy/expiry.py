"""Records that have an end: when it has come they are a miss in every tier, and leave those that are this cache's own.

An end is a record's own field, so that whoever reads it later, after a restart or in another process, knows it too. In
memory there is one entry for a run of blocks that were stored together. Nothing runs by itself: whatever is asked of
the cache first lets go of what is over, which costs one comparison where nothing is.
"""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable, Sequence

from kvcache.block.address import Address
from kvcache.hierarchy.index import Index
from kvcache.hierarchy.why import Why
from kvcache.observe.events import Events
from kvcache.observe.metrics import Counters
from kvcache.observe.request import logger
from kvcache.port import Clock
from kvcache.tier.host import HostTier
from kvcache.tier.tier import BACKGROUND, Ticket, Tier

EXPIRED = "expired"
"""The reason that is said of what was let go of."""

_log = logger("kvcache.expiry")


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
        self._ends: list[tuple[int, int, Sequence[Address]]] = []
        self._order = itertools.count()
        self._leaving: list[Ticket] = []
        self._lock = threading.Lock()

    def end_ms(self, ttl_s: float | None) -> int:
        """When what is stored now ends, in milliseconds since 1970; 0 for never."""
        return 0 if ttl_s is None else int((self._clock.wall() + ttl_s) * 1000)

    def over(self, expires_ms: int) -> bool:
        return 0 < expires_ms <= self._clock.wall() * 1000

    def note(self, addresses: Sequence[Address], expires_ms: int) -> None:
        """These are here and end then."""
        if expires_ms and addresses:
            with self._lock:
                heapq.heappush(self._ends, (expires_ms, next(self._order), addresses))

    def learn(self, tell: Callable[[], Sequence[tuple[Address, int]]]) -> None:
        """What a tier has from before: its records that end, and when. Run where reading them is in nobody's way."""
        try:
            for address, expires_ms in tell():
                self.note([address], expires_ms)
        except Exception:  # noqa: BLE001  law: never in the way; what has ended is a miss all the same when it is read
            _log.exception("what ends was not learned")

    def sweep(self) -> None:
        """Let go of what is over."""
        if not self._ends or not self.over(self._ends[0][0]):
            return
        due: list[tuple[int, Address]] = []
        with self._lock:
            while self._ends and self.over(self._ends[0][0]):
                expires_ms, _, addresses = heapq.heappop(self._ends)
                due += ((expires_ms, address) for address in addresses)
        self._leave([address for expires_ms, address in due[::-1] if self._is_same(address, expires_ms)])

    def wait(self, timeout_s: float | None) -> bool:
        """Until what was let go of has left; False where time ran out first."""
        return all(ticket.wait(timeout_s) for ticket in self._going())

    def _going(self, more: Sequence[Ticket] = ()) -> list[Ticket]:
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

    def _leave(self, addresses: Sequence[Address]) -> None:
        """Tails first. What others share goes by itself there: a server removes it, a store's reader passes it over."""
        for tier in (self._host, *self._below):
            gone = [address for address in addresses if self._index.discard(address, tier.name)]
            if not tier.shared:
                self._going([tier.submit("remove", addresses, priority=BACKGROUND)])
            self._counters.add("expired_blocks", len(gone), tier=tier.name)
            for namespace in dict.fromkeys(address.namespace for address in gone):
                blocks = sum(address.namespace == namespace for address in gone)
                self._events.add("evicted", tier=tier.name, namespace=namespace, blocks=blocks, reason=EXPIRED)
            if gone:
                self._why.expired(tier.name, [address.signature for address in gone])

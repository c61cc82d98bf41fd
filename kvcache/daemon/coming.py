"""Stores that clients have begun and that have not come yet: what a flush waits for before it looks at what is here.

A client says that a store begins before its engine goes on, and copies afterwards. So whoever has heard the engine's
answer, and asks for a flush then, waits for the blocks of that answer: what a client said before is taken in first.
Over TCP that is what has arrived; between processes of this host it is all that was said.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcache.daemon.peer import Peer
from kvcache.daemon.protocol import STORE_S
from kvcache.os_env import Clock

if TYPE_CHECKING:
    from kvcache.daemon.session import Session

STORES = 8192
"""Of one client at a time; beyond them a flush does not wait."""

COMES_S = 2 * STORE_S
"""Since it began, beyond which nobody waits for a store: what it takes, and as much in its client's queue before."""

HEAR_S = 0.5
"""For the loop to take in what was said, however little time there is to wait for what that tells of."""


class Coming:
    """Thread-safe; `wait` is for any thread but the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clients: Mapping[Peer, Session], clock: Clock) -> None:
        """`clients`: by the connections on which they say so; the loop's own."""
        self._loop, self._clients, self._clock = loop, clients, clock
        self._begun = 0
        self._open: defaultdict[str, OrderedDict[int, float]] = defaultdict(OrderedDict)
        """By tenant the numbers that are open and when each began, the oldest first."""
        self._asked: set[str | None] = set()  # whose clients are heard in the next turn, which is on its way then
        self._turns = self._heard = 0  # that have begun, and the last that is over
        self._over = False
        self._changed = threading.Condition()

    def begin(self, tenant: str) -> int:
        """A store of this tenant is on its way; the number to `end` it by."""
        with self._changed:
            self._begun += 1
            self._open[tenant][self._begun] = self._clock.now()
            return self._begun

    def end(self, tenant: str, number: int) -> None:
        """It has come, or never will. Idempotent."""
        with self._changed:
            of_tenant = self._open[tenant]
            oldest = next(iter(of_tenant), None)
            of_tenant.pop(number, None)
            if number == oldest:  # what others wait for
                self._changed.notify_all()

    def wait(self, timeout_s: float | None, tenant: str | None = None) -> bool:
        """Until what was begun by now has ended; whether it has. `tenant`: who waits for nobody else's."""
        until = float("inf") if timeout_s is None else self._clock.now() + timeout_s
        with self._changed:
            if not self._over and not self._asked:
                self._loop.call_soon_threadsafe(self._hear)
            self._asked.add(tenant)
            turn = self._turns + 1
            hear_s = None if timeout_s is None else max(HEAR_S, timeout_s)
            if not self._changed.wait_for(lambda: self._heard >= turn or self._over, hear_s):
                return False
            last = self._begun
            while (since := self._oldest(tenant, last)) is not None:
                now = self._clock.now()
                if now >= until:
                    return False
                self._changed.wait(min(until, since + COMES_S) - now)
            return True

    def close(self) -> None:
        """The loop hears nobody any more: nobody waits for it."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _hear(self) -> None:
        """Once for all who have asked by now, on the loop's thread."""
        with self._changed:
            asked, self._asked = self._asked, set()
            self._turns += 1
        for peer, session in list(self._clients.items()):
            if not asked.isdisjoint((None, session.tenant.name)):
                peer.catch_up()
        with self._changed:
            self._heard = self._turns
            self._changed.notify_all()

    def _oldest(self, tenant: str | None, last: int) -> float | None:
        """When the oldest began that is open and no later than number `last`; what is too old ends here."""
        began = []
        for of_tenant in self._open.values() if tenant is None else [self._open[tenant]]:
            while of_tenant:
                number, since = next(iter(of_tenant.items()))
                if since + COMES_S > self._clock.now():
                    if number <= last:
                        began.append(since)
                    break
                del of_tenant[number]
        return min(began, default=None)

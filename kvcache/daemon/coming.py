"""Stores that clients have begun and that have not come yet: what a flush waits for before it looks at what is here.

A client says that a store begins before its engine goes on, and copies afterwards. So whoever has heard the engine's
answer, and asks for a flush then, waits for the blocks of that answer: what a client said before is taken in first.
Over TCP that is what has arrived; between processes of this host it is all that was said.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Callable, Iterable

from kvcache.daemon.peer import Peer

STORES = 8192
"""Of one client at a time; beyond them a flush does not wait."""

HEAR_S = 0.5
"""For the loop to take in what was said, however little time there is to wait for what that tells of."""


class Coming:
    """Thread-safe; `wait` is for any thread but the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peers: Callable[[], Iterable[Peer]]) -> None:
        """`peers`: the connections on which clients say so."""
        self._loop, self._peers = loop, peers
        self._numbers = itertools.count()
        self._open: dict[int, str] = {}  # whose
        self._over = False
        self._changed = threading.Condition()

    def begin(self, tenant: str) -> int:
        """A store of this tenant is on its way; the number to `end` it by."""
        with self._changed:
            number = next(self._numbers)
            self._open[number] = tenant
        return number

    def end(self, number: int) -> None:
        """It has come, or never will."""
        with self._changed:
            self._open.pop(number, None)
            self._changed.notify_all()

    def wait(self, timeout_s: float | None, tenant: str | None = None) -> bool:
        """Until what was begun by now has ended; whether it has. `tenant`: who waits for nobody else's."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        heard = False

        def left(least: float = 0.0) -> float | None:
            return None if end is None else max(least, end - time.monotonic())

        def hear() -> None:
            nonlocal heard
            for peer in list(self._peers()):
                peer.catch_up()
            with self._changed:
                heard = True
                self._changed.notify_all()

        with self._changed:
            if not self._over:
                self._loop.call_soon_threadsafe(hear)
            if not self._changed.wait_for(lambda: heard or self._over, left(HEAR_S)):
                return False
            begun = {number for number, whose in self._open.items() if tenant in (None, whose)}
            return self._changed.wait_for(lambda: begun.isdisjoint(self._open), left())

    def close(self) -> None:
        """The loop hears nobody any more: nobody waits for it."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

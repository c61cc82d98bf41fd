"""Connections of which nobody knows yet whose they are. They wait apart from those that are known, so that whoever
only connects shuts nobody out.

So many wait at a time, for so long. Where one more comes, the one that waited longest leaves, of those that come from
where most of them do: whoever connects without end pushes out itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter

from kvcache.daemon.peer import Peer
from kvcache.log import logger

WAITING = 64
"""At a time, a descriptor each, beside those of `daemon.connections`."""
HELLO_S = 5.0
"""For a connection to say who it is."""

_log = logger("kvcache.daemon")


class Hall:
    """Of the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Peer, asyncio.TimerHandle] = {}  # the longest first
        self._quiet_until = loop.time()  # a crowd writes no log

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, peer: Peer) -> None:
        self._waiting[peer] = self._loop.call_later(HELLO_S, peer.close)
        if len(self._waiting) > WAITING:
            crowd, count = Counter(each.origin for each in self._waiting).most_common(1)[0]
            first = next(each for each in self._waiting if each.origin == crowd)
            if self._loop.time() >= self._quiet_until:
                self._quiet_until = self._loop.time() + HELLO_S
                _log.warning("%d connections of %s do not say who they are: the first of them go", count, crowd)
            first.close()

    def leave(self, peer: Peer) -> None:
        """It is known now, or gone. Idempotent."""
        timer = self._waiting.pop(peer, None)
        if timer is not None:
            timer.cancel()

"""Sees the end of the processes behind sessions, whoever else has their descriptors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from kvcache.daemon.session import Session


class Watch:
    """Of the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ended: Callable[[Session], object]) -> None:
        self._loop, self._ended = loop, ended
        self._watched: dict[bytes, int] = {}  # by session, the descriptor of its process

    def begin(self, session: Session) -> None:
        if not session.pid:
            return
        try:
            descriptor = os.pidfd_open(session.pid)
        except (OSError, AttributeError):  # of another pid namespace: its connection alone tells
            return
        self._watched[session.secret] = descriptor
        self._loop.add_reader(descriptor, self._ended, session)

    def end(self, session: Session) -> None:
        descriptor = self._watched.pop(session.secret, None)
        if descriptor is not None:
            self._loop.remove_reader(descriptor)
            os.close(descriptor)

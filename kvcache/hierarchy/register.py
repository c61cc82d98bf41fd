"""Which requests are open, so that an engine's ranks join the one that its scheduler opened."""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Generic, TypeVar
from weakref import WeakSet

from kvcache.errors import RequestError

R = TypeVar("R")


class Register(Generic[R]):
    """By name, whatever that is made of. Thread-safe; keeps no request alive."""

    def __init__(self) -> None:
        self._open: dict[Hashable, WeakSet[R]] = {}
        self._lock = threading.Lock()

    def add(self, name: Hashable, request: R) -> None:
        with self._lock:
            self._open.setdefault(name, WeakSet()).add(request)

    def remove(self, name: Hashable, request: R) -> None:
        """Idempotent."""
        with self._lock:
            there = self._open.get(name)
            if there is not None:
                there.discard(request)
                if not there:
                    del self._open[name]

    def find(self, name: Hashable) -> R:
        """The one of this name. RequestError where there is none, and where there are several: to guess between them
        could hand one prompt's blocks to another."""
        with self._lock:
            there = list(self._open.get(name, ()))
        if len(there) == 1:
            return there[0]
        if not there:
            raise RequestError("no open request has this id in this namespace; open it first, and close it last")
        raise RequestError(f"{len(there)} open requests have this id; name the engine when connecting, or the requests")

"""A cache of which any call may raise: the face does not allow it, and a connector must bear it all the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

OPENED = frozenset({"namespace", "request", "join", "load", "store"})
"""Calls whose answers raise in the same way."""
PLAIN = frozenset({"id", "layout", "outcomes", "done", "blocks", "signatures"})


class Raising:
    """In front of a cache, and of the bounds, requests and transfers that it gives. `fails` is asked for each call and
    each property of a transfer, by name; what raises has not been done."""

    def __init__(self, inner: Any, fails: Callable[[str], bool]) -> None:
        self._inner, self._fails = inner, fails

    def __getattr__(self, name: str) -> Any:
        if name in PLAIN:
            if name not in {"id", "layout"}:
                self._perhaps(name)
            return getattr(self._inner, name)
        there = getattr(self._inner, name)

        @wraps(there)
        def call(*args: Any, **named: Any) -> Any:
            self._perhaps(name)
            answer = there(*args, **named)
            return Raising(answer, self._fails) if name in OPENED else answer

        return call

    def _perhaps(self, name: str) -> None:
        if self._fails(name):
            raise ZeroDivisionError(f"{name} fails, as it was told to")

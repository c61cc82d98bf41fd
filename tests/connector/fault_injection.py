"""A face that breaks its own promises: whichever method a test names raises, or answers what makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache.cache.api import Hit
from kvcache.errors import ClosedError

FACE = ("request", "match", "admit", "load", "store", "close", "wait", "wait_layer", "outcomes", "blocks", "done",
        "cancel")  # fmt: skip
"""Of a bound, a request and a transfer."""


def _raising(error: BaseException) -> Callable[..., Any]:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


def _lie(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


WAYS: dict[str, Callable[..., Any]] = {
    "an error of ours": _raising(ClosedError("said the test")),
    "a mistake": _raising(ZeroDivisionError("said the test")),
    "no memory": _raising(MemoryError()),
    "nothing": _lie(None),
    "a hit of everything": _lie(Hit(tokens=1 << 20, blocks=1 << 16, by_tier={"host": 1 << 16})),
    "too few": _lie(()),
    "never": _lie(False),
}


@dataclass
class Sabotage:
    """Shared by all that stands before one cache. Nothing is wrong while `method` is empty."""

    method: str = ""
    way: str = ""

    def before(self, thing: Any) -> Any:
        return Sabotaged(self, thing)


class Sabotaged:
    def __init__(self, sabotage: Sabotage, thing: Any) -> None:
        self._sabotage, self._thing = sabotage, thing

    def __getattr__(self, name: str) -> Any:
        sabotage, value = self._sabotage, getattr(self._thing, name)
        if name == sabotage.method:
            broken = WAYS[sabotage.way]
            return broken if callable(value) else broken()
        if name in {"namespace", "request", "load", "store"}:
            return lambda *given, **named: sabotage.before(value(*given, **named))
        return value

    def __enter__(self) -> Sabotaged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

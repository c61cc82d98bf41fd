"""A face that breaks its own promises: whichever method a test names raises, or answers what makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache.cache.api import Hit
from kvcache.errors import ClosedError

METHODS = ("request", "match", "admit", "load", "store", "close", "wait", "wait_layer", "outcomes", "blocks", "done",
        "cancel")  # fmt: skip
"""Of a bound, a request and a transfer."""


def _raising(error: BaseException) -> Callable[..., Any]:
    def broken(*_: Any, **__: Any) -> Any:
        raise error

    return broken


def _returning(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


FAULTS: dict[str, Callable[..., Any]] = {
    "an error of ours": _raising(ClosedError("said the test")),
    "a mistake": _raising(ZeroDivisionError("said the test")),
    "no memory": _raising(MemoryError()),
    "nothing": _returning(None),
    "a hit of everything": _returning(Hit(tokens=1 << 20, blocks=1 << 16, by_tier={"host": 1 << 16})),
    "too few": _returning(()),
    "never": _returning(False),
}


@dataclass
class FaultInjector:
    """Shared by all that stands before one cache. Nothing is wrong while `method` is empty."""

    method: str = ""
    fault: str = ""

    def wrap(self, thing: Any) -> Any:
        return FaultyProxy(self, thing)


class FaultyProxy:
    def __init__(self, injector: FaultInjector, thing: Any) -> None:
        self._injector, self._thing = injector, thing

    def __getattr__(self, name: str) -> Any:
        injector, value = self._injector, getattr(self._thing, name)
        if name == injector.method:
            broken = FAULTS[injector.fault]
            return broken if callable(value) else broken()
        if name in {"namespace", "request", "load", "store"}:
            return lambda *given, **named: injector.wrap(value(*given, **named))
        return value

    def __enter__(self) -> FaultyProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

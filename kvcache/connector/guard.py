"""Guards an engine's hooks: no exception of the cache is raised in the engine, which sees an empty cache instead.

The API raises for misuse only, so an exception caught here is a defect of the connector. It is logged with its
traceback, once a kind, and the request continues.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from kvcache.cache.api import Transfer

MAX_LOGGED_ERRORS = 256
"""Limit of different log lines."""

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger("kvcache.connector")
_logged: set[tuple[str, str]] = set()


def recover(call: Callable[[], T], on_fault: Callable[[Exception], T]) -> T:
    """Return the result of `call`, or of `on_fault`, which gets the error, where it raises."""
    try:
        return call()
    except Exception as error:  # noqa: BLE001  boundary to an engine: a cache fault never fails a request
        return on_fault(error)


def call_guarded(default: T, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """Return the result of `call`, or `default` where it raises, which is logged once a kind."""

    def fault(error: Exception) -> T:
        name = getattr(call, "__qualname__", repr(call))
        log_once(f"{name} failed; the engine continues without the cache", error)
        return default

    return recover(lambda: call(*args, **named), fault)


def guarded(default: Any = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorate a hook to return `default` where it raises."""

    def of(hook: Callable[P, T]) -> Callable[P, T]:
        @wraps(hook)
        def calm(*args: P.args, **named: P.kwargs) -> T:
            return call_guarded(cast("T", default), hook, *args, **named)

        return calm

    return of


def log_once(what: str, error: Exception) -> None:
    """Log an error once a kind. `what` names the call and the consequence."""
    key = (what, type(error).__name__)
    if key not in _logged and len(_logged) < MAX_LOGGED_ERRORS:
        _logged.add(key)
        _log.error("%s: %s: %s; logged once a kind", what, type(error).__name__, error, exc_info=error)


class GuardedTransfer:
    """A transfer that reads as ended without blocks where it raises."""

    def __init__(self, transfer: Transfer) -> None:
        self._transfer = transfer

    @property
    def done(self) -> bool:
        return call_guarded(True, lambda: self._transfer.done)

    @property
    def blocks(self) -> int:
        return call_guarded(0, lambda: self._transfer.blocks)

    def wait(self, timeout_s: float) -> bool:
        return call_guarded(True, self._transfer.wait, timeout_s)

    def wait_layer(self, layer: int, timeout_s: float) -> bool:
        return call_guarded(True, self._transfer.wait_layer, layer, timeout_s)

    def cancel(self) -> None:
        call_guarded(None, self._transfer.cancel)

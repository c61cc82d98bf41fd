"""Nothing of ours is raised at an engine: where the cache fails, the answer is that of a cache that has nothing.

The face raises for misuse only, so that what is caught here is a mistake of ours. It is logged with its place, once a
kind, and the request goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar, cast

from kvcache.cache.api import Transfer

MAX_LOGGED_ERRORS = 256
"""Different lines."""

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger("kvcache.connector.vllm")
_logged: set[tuple[str, str]] = set()


def call_guarded(default: T, call: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
    """What `call` answers, and `otherwise` where it raises."""
    try:
        return call(*args, **named)
    except Exception as error:  # noqa: BLE001  law: never in the way
        log_once(getattr(call, "__qualname__", repr(call)), error)
        return default


def guarded(default: Any = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """A hook that answers `otherwise` where it raises."""

    def of(hook: Callable[P, T]) -> Callable[P, T]:
        @wraps(hook)
        def calm(*args: P.args, **named: P.kwargs) -> T:
            return call_guarded(cast("T", default), hook, *args, **named)

        return calm

    return of


def log_once(where: str, error: Exception) -> None:
    key = (where, type(error).__name__)
    if key not in _logged and len(_logged) < MAX_LOGGED_ERRORS:
        _logged.add(key)
        _log.error("%s failed, and the engine goes on without; said once", where, exc_info=error)


class GuardedTransfer:
    """A transfer that brought nothing where it cannot be asked."""

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

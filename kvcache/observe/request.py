"""Which request a thread works for, so that a log line and an event can say it without being told.

log = logger("kvcache.store")
with working_for("42"):
    log.warning("late")  # the record has request_id = "42"
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

_request: ContextVar[str] = ContextVar("kvcache_request", default="")


@contextmanager
def working_for(request_id: str) -> Iterator[None]:
    token = _request.set(request_id)
    try:
        yield
    finally:
        _request.reset(token)


def current_request() -> str:
    """Its id; "" where the work is for no single request."""
    return _request.get()


class RequestLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only for type checkers before 3.11
    """Puts `request_id` on every record, for whatever handler and formatter the program around has."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {"request_id": current_request(), **(kwargs.get("extra") or {})}
        return msg, kwargs


def logger(name: str) -> RequestLogger:
    return RequestLogger(logging.getLogger(name), {})

"""Which request a thread works for, so that a log line and an event can say it without being told.

log = logger("kvcache.store")
with working_for(Work.of("42", agent="planner")):
    log.warning("late")  # the record has request_id = "42"
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

LONGEST = 128
"""Characters of an agent's and a session's name that are kept."""


class Work(NamedTuple):
    """A request's id, and whose it is as it said itself: these label what is told of it, and are no part of a key. ""
    for what is not known, or for no single request."""

    request: str = ""
    agent: str = ""
    session: str = ""

    @classmethod
    def of(cls, request: str, agent: str | None = None, session: str | None = None) -> Work:
        return cls(request, (agent or "")[:LONGEST], (session or "")[:LONGEST])


_NOBODY = Work()
_work: ContextVar[Work] = ContextVar("kvcache_request", default=_NOBODY)


@contextmanager
def working_for(work: Work) -> Iterator[None]:
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def current_work() -> Work:
    return _work.get()


class RequestLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only for type checkers before 3.11
    """Puts `request_id` on every record, for whatever handler and formatter the program around has."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {"request_id": current_work().request, **(kwargs.get("extra") or {})}
        return msg, kwargs


def logger(name: str) -> RequestLogger:
    return RequestLogger(logging.getLogger(name), {})

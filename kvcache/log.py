"""What the package says through `logging`, made as the settings ask.

A library leaves logging to the program around it, so nothing happens unless `log.format` asks for lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

from kvcache.settings.service import Log

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TEXT_WITH_REQUEST = "%(asctime)s %(levelname)s %(name)s request=%(request_id)s: %(message)s"


class TextFormatter(logging.Formatter):
    """One line, with the id of the request where the thread that says it works for one."""

    def __init__(self) -> None:
        super().__init__(_TEXT)
        self._request_formatter = logging.Formatter(_TEXT_WITH_REQUEST)

    def format(self, record: logging.LogRecord) -> str:
        return self._request_formatter.format(record) if getattr(record, "request_id", "") else super().format(record)


class JsonFormatter(logging.Formatter):
    """One object a line: time (seconds since 1970), level, name, message, the id of the request where the thread works
    for one, and the trace of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "name": record.name,
            "message": record.getMessage(),
        }
        if getattr(record, "request_id", ""):
            fields["request"] = record.request_id  # type: ignore[attr-defined]  # from kvcache.log
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields)


class _LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only for type checkers before Python 3.11
    """A handler of ours, so that a second call finds and replaces it."""


def configure_logging(log: Log) -> None:
    """Write the lines of this process to standard error in the form asked for; called again, replaces what was."""
    logger = logging.getLogger("kvcache")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _LogHandler)]:
        logger.removeHandler(handler)
    if log.format == "none":
        return
    handler = _LogHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log.format == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(log.level.upper())


# Which request a thread works for, so that a log line and an event can say it without being told. log =
# logger("kvcache.store") with working_for(Work.of("42", agent="planner")): log.warning("late") # the record has
# request_id = "42"

MAX_LABEL_CHARS = 128
"""Characters of an agent's and a session's name that are kept."""


class RequestContext(NamedTuple):
    """A request's id, and whose it is as it said itself: these label what is told of it, and are no part of a key. ""
    for what is not known, or for no single request."""

    request: str = ""
    agent: str = ""
    session: str = ""

    @classmethod
    def of(cls, request: str, agent: str | None = None, session: str | None = None) -> RequestContext:
        return cls(request, (agent or "")[:MAX_LABEL_CHARS], (session or "")[:MAX_LABEL_CHARS])


_NO_REQUEST = RequestContext()
_work: ContextVar[RequestContext] = ContextVar("kvcache_request", default=_NO_REQUEST)


@contextmanager
def request_context(work: RequestContext) -> Iterator[None]:
    token = _work.set(work)
    try:
        yield
    finally:
        _work.reset(token)


def current_request() -> RequestContext:
    return _work.get()


class RequestLogger(logging.LoggerAdapter):  # type: ignore[type-arg]  # generic only for type checkers before 3.11
    """Puts `request_id` on every record, for whatever handler and formatter the program around has."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {"request_id": current_request().request, **(kwargs.get("extra") or {})}
        return msg, kwargs


def logger(name: str) -> RequestLogger:
    return RequestLogger(logging.getLogger(name), {})

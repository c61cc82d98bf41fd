"""Logging of the package: formatters, the handler that `log.format` turns on, and the request of each log line.

A library leaves logging to its host program, so the package installs no handler unless `log.format` is set.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Any, NamedTuple

from kvcache.settings.service import LogSettings

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_TEXT_WITH_REQUEST = "%(asctime)s %(levelname)s %(name)s request=%(request_id)s: %(message)s"


class TextFormatter(logging.Formatter):
    """One line, with the request's id where the logging thread works for a request."""

    def __init__(self) -> None:
        super().__init__(_TEXT)
        self._request_formatter = logging.Formatter(_TEXT_WITH_REQUEST)

    def format(self, record: logging.LogRecord) -> str:
        return self._request_formatter.format(record) if getattr(record, "request_id", "") else super().format(record)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (seconds since 1970), level, name, message, request id and exception trace.

    The request id is there where the logging thread works for a request.
    """

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


class log_faults:  # noqa: N801  used like `contextlib.suppress`
    """Logs an exception of the block with its traceback, and continues after the block.

    For threads that must survive, and for work whose failure no engine may see:

        with log_faults(_log, "store failed; its blocks are dropped"):
            ...
    """

    def __init__(self, log: logging.Logger | logging.LoggerAdapter[Any], text: str, *args: object) -> None:
        self._log, self._text, self._args = log, text, args

    def __enter__(self) -> None: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._log.error(self._text, *self._args, exc_info=error)
        return True


class _LogHandler(logging.StreamHandler):  # type: ignore[type-arg]  # generic only for type checkers before Python 3.11
    """The package's handler; its type lets `configure_logging` find and replace it."""


def configure_logging(log: LogSettings) -> None:
    """Write this process's log lines to standard error as the settings say. A second call replaces the first."""
    logger = logging.getLogger("kvcache")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _LogHandler)]:
        logger.removeHandler(handler)
    if log.format == "none":
        return
    handler = _LogHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log.format == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(log.level.upper())


# The request that a thread works for, as a context variable that log lines and events read:
#
#     log = logger("kvcache.store")
#     with request_context(RequestContext.of("42", agent="planner")):
#         log.warning("late")  # the log record has request_id = "42"

MAX_LABEL_CHARS = 128
"""Longest name of an agent or a session; longer names are cut."""


class RequestContext(NamedTuple):
    """A request's id, agent and session, as the request names them. "" where unknown, or for no single request.

    They label logs and events, and are no part of a key.
    """

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
    """Puts `request_id` on every log record, for any handler and formatter of the host program."""

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        kwargs["extra"] = {"request_id": current_request().request, **(kwargs.get("extra") or {})}
        return msg, kwargs


def logger(name: str) -> RequestLogger:
    return RequestLogger(logging.getLogger(name), {})

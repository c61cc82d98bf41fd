"""What the package says through `logging`, made as the settings ask.

A library leaves logging to the program around it, so nothing happens unless `log.format` asks for lines.
"""

from __future__ import annotations

import json
import logging
import sys

from kvcache.settings import Log

_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLines(logging.Formatter):
    """One object a line: time (seconds since 1970), level, name, message, and the trace of an exception."""

    def format(self, record: logging.LogRecord) -> str:
        said = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "name": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["trace"] = self.formatException(record.exc_info)
        return json.dumps(said)


class _Lines(logging.StreamHandler):  # type: ignore[type-arg]  # generic only for type checkers before Python 3.11
    """A handler of ours, so that a second call finds and replaces it."""


def apply(log: Log) -> None:
    """Write the lines of this process to standard error in the form asked for; called again, replaces what was."""
    logger = logging.getLogger("kvcache")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Lines)]:
        logger.removeHandler(handler)
    if log.format == "none":
        return
    handler = _Lines(sys.stderr)
    handler.setFormatter(JsonLines() if log.format == "json" else logging.Formatter(_TEXT))
    logger.addHandler(handler)
    logger.setLevel(log.level.upper())

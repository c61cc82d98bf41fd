"""Errors of ours under SGLang's calls: each is a miss, and said once a kind, so that no fault can fill the log."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from kvcache.cache.api import Request

MOST = 64

_log = logging.getLogger("kvcache.sglang")
_said: set[str] = set()


def failed(what: str, error: Exception) -> None:
    """`what`: the call, and what becomes of it."""
    kind = f"{what}: {type(error).__name__}"
    if kind not in _said and len(_said) < MOST:
        _said.add(kind)
        _log.error("%s: %s: %s; others that end so are not told", what, type(error).__name__, error, exc_info=error)


def give_back(requests: Iterable[Request]) -> None:
    """Close each of these, also where one cannot be."""
    for request in requests:
        try:
            request.close()
        except Exception as error:  # noqa: BLE001  law: never in the way
            failed("a request was not closed; what it holds comes back when it is forgotten", error)

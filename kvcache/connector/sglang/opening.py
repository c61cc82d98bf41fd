"""The cache of a process: opened with SGLang's backend or linker, closed with it, within a bound."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import kvcache
from kvcache.cache.api import KVCache
from kvcache.connector.sglang.pool import Ranks
from kvcache.connector.sglang.wishes import Wishes
from kvcache.daemon.client.autostart import find_or_start

CLOSE_S = 5.0

_log = logging.getLogger("kvcache.sglang")
_closing: list[threading.Thread] = []  # a directory that one of these still holds cannot be opened again


def engine_name(served: Any, ranks: Ranks, wishes: Wishes) -> str | None:
    """What the processes of one server know each other by; None where there is only one."""
    replicas = getattr(served, "dp_size", 1) or 1
    if ranks.alone and replicas == 1:
        return None
    at = f"{getattr(served, 'host', '')}:{getattr(served, 'port', '')}"
    told = sha256(repr((at, sorted(wishes.settings.items()))).encode()).hexdigest()
    return f"sglang-{told[:16]}"


def open_cache(wishes: Wishes, engine: str | None = None) -> KVCache:
    """ConfigError for settings that make no sense, StoreError where a tier cannot be opened: SGLang does not start.

    `engine`: the server's name where it is several processes. They share a daemon, of their own where none is given.
    """
    for thread in _closing[:]:
        thread.join(CLOSE_S)
        _closing.remove(thread)
    where, settings = wishes.where, dict(wishes.settings)
    if where is None and engine is not None:
        where, settings = find_or_start(engine, **settings), {}
    if where is not None and where.startswith("unix:") and engine is not None:
        settings["engine"] = engine
    return kvcache.open(where, **settings)


def close_cache(cache: KVCache) -> None:
    """Returns within `CLOSE_S`; what has not reached the drive by then goes on in the background."""
    left = apart(cache.close, "closing")
    if left is not None:
        _closing.append(left)


def apart(work: Callable[[], object], what: str) -> threading.Thread | None:
    """Do this and return within `CLOSE_S`, since SGLang's scheduler waits; the thread where it goes on."""

    def run() -> None:
        try:
            work()
        except Exception:  # noqa: BLE001  law: never in the way
            _log.exception("%s failed", what)

    thread = threading.Thread(target=run, name=f"kvcache-{what}", daemon=True)
    thread.start()
    thread.join(CLOSE_S)
    if not thread.is_alive():
        return None
    _log.warning("%s takes longer than %s s and goes on in the background", what, CLOSE_S)
    return thread

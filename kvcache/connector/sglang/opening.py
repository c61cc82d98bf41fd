"""The cache of a process: opened with SGLang's backend or linker, closed with it, within a bound."""

from __future__ import annotations

import logging
import threading
from typing import Any

import kvcache
from kvcache.connector.sglang.pool import Ranks
from kvcache.connector.sglang.wishes import Wishes
from kvcache.errors import ConfigError
from kvcache.hierarchy.face import KVCache

CLOSE_S = 5.0

_log = logging.getLogger("kvcache.sglang")
_closing: list[threading.Thread] = []  # a directory that one of these still holds cannot be opened again


def open_cache(wishes: Wishes, ranks: Ranks) -> KVCache:
    """ConfigError for settings that make no sense, StoreError where a tier cannot be opened: SGLang does not start."""
    for thread in _closing[:]:
        thread.join(CLOSE_S)
        _closing.remove(thread)
    settings = dict(wishes.settings)
    if not ranks.alone and wishes.where is None:
        raise ConfigError(
            f"{ranks.tp_size * ranks.pp_size} ranks are separate processes, which share a cache by a daemon: "
            'give "where": "unix:..." under "kvcache" in the extra configuration'
        )
    return kvcache.open(wishes.where, **settings)


def close_cache(cache: KVCache) -> None:
    """Returns within `CLOSE_S`; what has not reached the drive by then goes on in the background."""
    thread = threading.Thread(target=_close, args=(cache,), name="kvcache-close", daemon=True)
    thread.start()
    thread.join(CLOSE_S)
    if thread.is_alive():
        _log.warning("closing takes longer than %s s and goes on in the background", CLOSE_S)
        _closing.append(thread)


def _close(cache: Any) -> None:
    try:
        cache.close()
    except Exception:  # noqa: BLE001  law: never in the way
        _log.exception("closing failed")

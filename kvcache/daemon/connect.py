"""From what `kvcache.open` is given to a cache behind a socket."""

from __future__ import annotations

import inspect
from typing import Any

from kvcache.daemon.address import socket_of
from kvcache.daemon.client import RemoteCache
from kvcache.errors import ConfigError


def connect(where: str, **settings: Any) -> RemoteCache:
    known = [name for name in inspect.signature(RemoteCache).parameters if name not in ("path", "port")]
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(
            f"{unknown[0]} = {settings[unknown[0]]!r:.60}: {where} has settings of its own; here are {', '.join(known)}"
        )
    return RemoteCache(str(socket_of(where)), **settings)

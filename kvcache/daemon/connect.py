"""From what `kvcache.open` is given to a cache behind a socket."""

from __future__ import annotations

import inspect
from typing import Any

from kvcache.daemon.address import socket_of
from kvcache.daemon.client import RemoteCache
from kvcache.daemon.route import Token, UnixRoute
from kvcache.errors import ConfigError


def connect(where: str, *, token_file: str = "", **settings: Any) -> RemoteCache:
    """`token_file` holds the token to show; without one, that of the variable KVCACHE_TOKEN is shown."""
    known = [name for name in inspect.signature(RemoteCache).parameters if name not in ("route", "port")]
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(
            f"{unknown[0]} = {settings[unknown[0]]!r:.60}: {where} has settings of its own; here are "
            f"{', '.join([*known, 'token_file'])}"
        )
    return RemoteCache(UnixRoute(str(socket_of(where)), Token(token_file)), **settings)

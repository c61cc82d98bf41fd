"""From what `kvcache.open` is given to a cache behind a socket."""

from __future__ import annotations

import inspect
from typing import Any

from kvcache.daemon.address import socket_of
from kvcache.daemon.client import RemoteCache
from kvcache.daemon.route import Route, Token, UnixRoute
from kvcache.daemon.tcp import TcpRoute
from kvcache.errors import ConfigError

FILES = ("ca_file", "cert_file", "key_file", "server_name")
"""Of a route with TLS: whom to trust, what to show, and the name in the daemon's certificate where it is another."""


def connect(where: str, *, token_file: str = "", **settings: Any) -> RemoteCache:
    """`token_file` holds the token to show; without one, that of the variable KVCACHE_TOKEN is shown."""
    secure = where.startswith("tls:")
    files = {name: settings.pop(name) for name in FILES if secure and name in settings}
    known = [name for name in inspect.signature(RemoteCache).parameters if name not in ("route", "port")]
    unknown = sorted(settings.keys() - known)
    if unknown:
        known += ["token_file", *(FILES if secure else ())]
        raise ConfigError(
            f"{unknown[0]} = {settings[unknown[0]]!r:.60}: {where} has settings of its own; here are {', '.join(known)}"
        )
    return RemoteCache(route_of(where, Token(token_file), **files), **settings)


def route_of(where: str, token: Token | None = None, **files: str) -> Route:
    """To the daemon at `unix:PATH`, `tls://HOST:PORT` or, on loopback, `tcp://HOST:PORT`."""
    token = token or Token()
    if where.startswith("unix:"):
        return UnixRoute(str(socket_of(where)), token)
    return TcpRoute(where.partition(":")[2].removeprefix("//"), token, secure=where.startswith("tls:"), **files)

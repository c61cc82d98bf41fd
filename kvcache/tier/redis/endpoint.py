"""Where the server is and how one gets in. The only file that knows credentials, and it shows them to nobody."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, parse_url
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from kvcache.errors import ConfigError

PASSWORD = "KVCACHE_REDIS_PASSWORD"  # noqa: S105  the name of a variable, not its value


class RefusedError(OSError):
    """No connection: `reason` is a word that tells why and holds nothing secret."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Endpoint:
    """`redis://host:port/db`, `rediss://...` (TLS; `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` in the query) or
    `unix:///path?db=0`, as redis-py reads them. The password comes from the URL, from a file, read anew for each
    connection so that it can be changed, or from the environment variable KVCACHE_REDIS_PASSWORD."""

    def __init__(self, url: str, *, username: str = "", password_file: str = "") -> None:
        try:
            options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
            self.name = _shown(url)
        except ValueError:
            # The URL may hold a password, and so may the text of the error.
            raise ConfigError("redis.url: expected redis://host:port/db, rediss://... or unix:///path") from None
        self._url = url
        self._username = username or options.get("username")
        self._password = options.get("password")
        self._password_file = password_file

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r})"

    def connect(self, timeout_s: float) -> tuple[Any, Any]:
        """A connection of redis-py, connected, authenticated, its database selected, and its socket. RefusedError where
        there is none."""
        try:
            # Made with the time that is left: redis-py takes it over for each step, and gives no other chance.
            pool = ConnectionPool.from_url(
                self._url,
                protocol=2,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
            )
            pool.connection_kwargs.update(self._credentials())
            made: Any = pool.make_connection()
            made.connect()
        except (RedisTimeout, TimeoutError):
            raise TimeoutError("connect") from None
        except (RedisError, OSError) as error:
            raise RefusedError(_reason(error)) from None
        sock = made._sock  # noqa: SLF001  redis-py has no public way to a connected socket
        if sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made, sock

    def _credentials(self) -> dict[str, str]:
        password = self._password or os.environ.get(PASSWORD)
        if self._password_file:
            password = Path(self._password_file).read_text(encoding="utf-8").strip()
        given = {"username": self._username, "password": password}
        return {name: value for name, value in given.items() if value}


def _reason(error: Exception) -> str:
    """The kind of an error. Its text is left out: it may quote what was sent."""
    cause = error.__cause__ or error.__context__
    return type(cause if isinstance(cause, OSError) else error).__name__


def _shown(url: str) -> str:
    """The URL without whatever is secret."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    database = parts.path.strip("/") or (parse_qs(parts.query).get("db") or ["0"])[0]
    return f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or 6379}/{database}"

"""Endpoints of servers: URL, TLS and credentials. Credentials stay in this file; no name, error or repr shows them."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from redis.backoff import NoBackoff
from redis.connection import ConnectionPool, parse_url
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from kvcache.errors import ConfigError

PASSWORD_VARIABLE = "KVCACHE_REDIS_PASSWORD"  # noqa: S105  the name of an environment variable, not its value
SENTINEL_PASSWORD_VARIABLE = "KVCACHE_REDIS_SENTINEL_PASSWORD"  # noqa: S105  the same


class RefusedError(OSError):
    """No connection, or a refused command. `reason` is one word without secrets."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Endpoint:
    """A server by its URL, with TLS files and credentials.

    The URL is `redis://host:port/db`, `rediss://...` (TLS; `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile` in the query)
    or `unix:///path?db=0`, as redis-py reads them. The password is that of the URL, of the environment variable
    `variable`, or of a file. Each connection reads the file anew, so that the password can be changed.
    """

    def __init__(
        self,
        url: str,
        *,
        username: str = "",
        password_file: str = "",
        tls_ca_file: str = "",
        tls_cert_file: str = "",
        tls_key_file: str = "",
        variable: str = PASSWORD_VARIABLE,
    ) -> None:
        try:
            options: dict[str, Any] = parse_url(url)  # type: ignore[no-untyped-call]
            self.name = _redacted(url)
        except ValueError:
            # The URL may hold a password, and so may the text of the error.
            raise ConfigError("redis.url: expected redis://host:port/db, rediss://... or unix:///path") from None
        self._url = url
        self.host = str(options.get("host") or "")
        self._username = username or options.get("username")
        self._password = options.get("password")
        self._password_file = password_file
        self._variable = variable
        given = {"ssl_ca_certs": tls_ca_file, "ssl_certfile": tls_cert_file, "ssl_keyfile": tls_key_file}
        self._tls = {name: file for name, file in given.items() if file}
        if self._tls and not url.startswith("rediss://"):
            raise ConfigError(f"redis.url = {self.name!r}: no TLS, but its files are given; expected rediss://")

    def with_host(self, host: str, port: int) -> Endpoint:
        """Return an endpoint for another server with the same credentials and TLS files."""
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        url = urlsplit(self._url)._replace(netloc=address).geturl()
        other = Endpoint(url, username=self._username or "", password_file=self._password_file, variable=self._variable)
        other._password, other._tls = self._password, self._tls
        return other

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r})"

    def connect(self, timeout_s: float, *, protocol: int = 2) -> tuple[Any, Any]:
        """Return an authenticated redis-py connection with its database selected, and its socket.

        Args:
            protocol: The version of RESP.

        Raises:
            RefusedError: No connection could be made.
            TimeoutError: The time is over.
        """
        try:
            # redis-py takes its timeout only here, and applies it to each step.
            pool = ConnectionPool.from_url(
                self._url,
                protocol=protocol,
                retry=Retry(NoBackoff(), 0),
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
            )
            pool.connection_kwargs.update(self._credentials() | self._tls)
            made: Any = pool.make_connection()
            made.connect()
        except (RedisTimeout, TimeoutError):
            raise TimeoutError("connect") from None
        except (RedisError, OSError) as error:
            raise RefusedError(_error_kind(error)) from None
        sock = made._sock  # noqa: SLF001  redis-py has no public way to a connected socket
        if sock.family != getattr(socket, "AF_UNIX", None):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return made, sock

    def _credentials(self) -> dict[str, str]:
        password = self._password or os.environ.get(self._variable)
        if self._password_file:
            password = Path(self._password_file).read_text(encoding="utf-8").strip()
        given = {"username": self._username, "password": password}
        return {name: value for name, value in given.items() if value}


class SentinelEndpoint:
    """The current master of a name; the sentinels are queried for each connection."""

    def __init__(self, endpoints: Sequence[Endpoint], master: str, server: Endpoint) -> None:
        """`server` holds the credentials and TLS files of the master."""
        self.name = f"sentinel {master}"
        self._endpoints, self._master, self._server = list(endpoints), master, server
        self._last_master = ("", 0)  # host and port of the master at the last query

    def __repr__(self) -> str:
        return f"Sentinels({self._master!r})"

    def connect(self, timeout_s: float, *, protocol: int = 2) -> tuple[Any, Any]:
        self._last_master = self._find(timeout_s / 2)
        return self._server.with_host(*self._last_master).connect(timeout_s / 2, protocol=protocol)

    def master_changed(self, timeout_s: float) -> bool:
        """Return whether the master changed since the last query. Raises RefusedError where no sentinel answers."""
        before, self._last_master = self._last_master, self._find(timeout_s)
        return before != self._last_master

    def _find(self, timeout_s: float) -> tuple[str, int]:
        endpoints = self._endpoints
        for i, sentinel in enumerate(endpoints):
            try:
                found = self._ask(sentinel, timeout_s / len(endpoints))
            except (OSError, RedisError, ValueError):
                continue
            self._endpoints = endpoints[i:] + endpoints[:i]  # query the sentinel that answered first next time
            return found
        raise RefusedError("sentinels")

    def _ask(self, sentinel: Endpoint, timeout_s: float) -> tuple[str, int]:
        made, _ = sentinel.connect(timeout_s)
        try:
            made.send_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", self._master)
            host, port = made.read_response() or (b"", "unknown")
            return host.decode(), int(port)
        finally:
            made.disconnect()


def split_hosts(url: str) -> list[str]:
    """Return one URL for each host of a URL that names several: `redis://one:6379,two:6379/0`."""
    parts = urlsplit(url)
    return [parts._replace(netloc=host).geturl() for host in parts.netloc.split(",")] if parts.netloc else [url]


def _error_kind(error: Exception) -> str:
    """Return the type name of an error. Its text may quote the command, so it is left out."""
    cause = error.__cause__ or error.__context__
    return type(cause if isinstance(cause, OSError) else error).__name__


def _redacted(url: str) -> str:
    """Return the URL without credentials."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return f"unix://{parts.path}"
    database = parts.path.strip("/") or (parse_qs(parts.query).get("db") or ["0"])[0]
    return f"{parts.scheme}://{parts.hostname or 'localhost'}:{parts.port or 6379}/{database}"

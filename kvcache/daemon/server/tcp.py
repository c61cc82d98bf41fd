"""TCP and TLS: the daemon's listener, the client's endpoint, and a TCP connection on the event loop.

The listener refuses settings that would admit anyone who reaches the port. Clients show tokens or certificates over
TLS. With `--insecure-loopback` the port is plain, and it is on loopback, where only processes of this host reach it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from kvcache.daemon.client.connection import TokenSource
from kvcache.daemon.server.admission import Admission, Credentials
from kvcache.daemon.server.connection import RECEIVE_BUFFER, Connection
from kvcache.daemon.tls import certificate_identities, client_context, server_context
from kvcache.daemon.wire import Wire
from kvcache.errors import AccessError, ConfigError, StoreError, UnreachableError
from kvcache.settings.service import DaemonSettings

_BACKLOG = 512
_KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 30_000))


def parse_host_port(where: str, setting: str) -> tuple[str, int]:
    """Split `HOST:PORT`, with an IPv6 address in brackets; ConfigError for anything else."""
    host, _, port = where.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 0xFFFF:
        raise ConfigError(f"{setting} = {where!r}: expected HOST:PORT, for instance 10.0.0.5:8090 or [::1]:8090")
    return host, int(port)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def enable_keepalive(connection: socket.socket) -> None:
    """Set TCP options so that the end of a silent host is detected within half a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            with suppress(OSError):
                connection.setsockopt(socket.IPPROTO_TCP, option, value)


class TcpListener:
    """A listening socket, with TLS except on loopback; ConfigError for settings that are not allowed."""

    def __init__(self, settings: DaemonSettings, admission: Admission, *, insecure: bool) -> None:
        self.host, self.number = parse_host_port(settings.listen, "daemon.listen")
        self.context: ssl.SSLContext | None = None
        if insecure and not is_loopback(self.host):
            raise ConfigError(
                f"daemon.listen = {settings.listen!r} with --insecure-loopback: expected an address of this "
                "host alone, 127.0.0.1 or [::1]"
            )
        if not insecure:
            _check_authenticated(settings, admission)
        self._settings, self._admission = settings, admission
        if settings.tls_cert_file:
            self.context = self._build_context()
        family = socket.AF_INET6 if ":" in self.host else socket.AF_INET
        self.listener = socket.socket(family, socket.SOCK_STREAM)

    def reload(self) -> None:
        """Reload certificate, key and client CA for new connections.

        Raises:
            ConfigError: A file cannot be used; the previous ones stay in use.
        """
        if self.context is not None:
            self.context = self._build_context()

    def _build_context(self) -> ssl.SSLContext:
        tenants = self._admission.tenants
        return server_context(
            self._settings.tls_cert_file,
            self._settings.tls_key_file,
            self._settings.tls_client_ca_file,
            required=tenants is None or not tenants.tokens,
        )

    def listen(self) -> None:
        """Bind and listen; StoreError where the system refuses the address."""
        try:
            self.listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.listener.bind((self.host, self.number))
            self.listener.listen(_BACKLOG)
            self.listener.setblocking(False)
        except OSError as error:
            raise StoreError(f"daemon.listen: {self}: {error.strerror or error}") from None
        self.number = self.listener.getsockname()[1]

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'tcp' if self.context is None else 'tls'}://{host}:{self.number}"

    def close(self) -> None:
        self.listener.close()


def _check_authenticated(settings: DaemonSettings, admission: Admission) -> None:
    if not settings.tls_cert_file:
        raise ConfigError(
            f"daemon.listen = {settings.listen!r} without TLS: give daemon.tls_cert_file and daemon.tls_key_file; or "
            "--insecure-loopback, on 127.0.0.1 only"
        )
    tokens = admission.tenants is not None and (admission.tenants.tokens or admission.tenants.certificates)
    if not tokens and not settings.tls_client_ca_file:
        raise ConfigError(
            f"daemon.listen = {settings.listen!r} accepts any client that reaches it: give "
            "daemon.tenants_file with tokens, or daemon.tls_client_ca_file; or --insecure-loopback, on 127.0.0.1 only"
        )
    if admission.tenants is not None and not admission.tenants.tokens and not settings.tls_client_ca_file:
        raise ConfigError(
            f"daemon.tenants_file = {admission.path!r}: names client certificates, but the daemon requests none; give "
            "daemon.tls_client_ca_file"
        )


class TcpEndpoint:
    """Endpoint of a daemon at `HOST:PORT`. ConfigError for files that cannot be used."""

    def __init__(
        self,
        where: str,
        token: TokenSource,
        *,
        secure: bool,
        ca_file: str = "",
        cert_file: str = "",
        key_file: str = "",
        server_name: str = "",
    ) -> None:
        self.token, self._name = token, f"{'tls' if secure else 'tcp'}://{where}"
        self._host, self._port = parse_host_port(where.rstrip("/"), "where")
        self._server_name = server_name or self._host
        if not secure and not is_loopback(self._host):
            raise ConfigError(f"where = {self._name!r}: without TLS only on this host; give tls://{where}")
        self._context = client_context(ca_file, cert_file, key_file) if secure else None

    def __str__(self) -> str:
        return self._name

    def connect(self, timeout_s: float) -> Wire:
        connection: socket.socket | None = None
        try:
            connection = socket.create_connection((self._host, self._port), timeout_s)
            enable_keepalive(connection)
            if self._context is not None:
                connection = self._context.wrap_socket(connection, server_hostname=self._server_name)
        except ssl.SSLCertVerificationError as error:
            _close(connection)
            raise AccessError(
                f"{self}: its certificate is not trusted ({error.verify_message}); give ca_file, or server_name"
            ) from None
        except OSError as error:
            _close(connection)
            raise UnreachableError(f"{self}: {error.strerror or error}; is `kvcache daemon` running?") from None
        return Wire(connection, accepts_descriptors=False)


def _close(connection: socket.socket | None) -> None:
    if connection is not None:
        connection.close()


# A TCP connection, with or without TLS, as the daemon's loop sees it.


class TcpConnection(Connection):
    """A `Connection` over TCP; without TLS where `context` is None."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        context: ssl.SSLContext | None,
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_close: Callable[[Connection], None],
    ) -> None:
        """OSError where the client has hung up."""
        host, port = connection.getpeername()[:2]
        self._where, self._origin = f"{host}:{port}", client_network(host)
        enable_keepalive(connection)
        connection.setblocking(False)
        self._handshake_done = context is None
        if context is not None:
            connection = context.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        super().__init__(loop, connection, on_message, on_close)

    def _identify(self, connection: socket.socket) -> None:
        """Set no process and no user: the kernel knows neither for TCP."""
        self.pid, self.uid = 0, -1

    def __str__(self) -> str:
        return self._where

    @property
    def origin(self) -> str:
        return self._origin

    def credentials(self, token_hash: str) -> Credentials:
        certificates = certificate_identities(self.connection) if isinstance(self.connection, ssl.SSLSocket) else ()
        return Credentials(token_hash=token_hash, certificates=certificates, remote=True)

    def _readable(self) -> bool:
        return (self._handshake_done or self._handshake()) and super()._readable()

    def _handshake(self) -> bool:
        """Advance the handshake; return whether it is done."""
        assert isinstance(self.connection, ssl.SSLSocket)
        try:
            self.connection.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLWantWriteError:
            self._loop.add_writer(self.connection, self._continue_handshake)
            return False
        except (OSError, ValueError):  # no TLS, a certificate that is not trusted, or the end of the connection
            self.close()
            return False
        self._handshake_done = True
        return True

    def _continue_handshake(self) -> None:
        self._loop.remove_writer(self.connection)
        self._readable()

    def _receive(self) -> int:
        try:
            count = self.connection.recv_into(RECEIVE_BUFFER)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None
        if isinstance(self.connection, ssl.SSLSocket) and self.connection.pending():
            self._schedule_turn()  # the socket reports no event for bytes that are decrypted already
        return count

    def _resume_reading(self) -> None:
        if self._reading_paused and isinstance(self.connection, ssl.SSLSocket) and self.connection.pending():
            self._schedule_turn()
        super()._resume_reading()

    def _transmit(self, data: memoryview) -> int:
        try:
            return self.connection.send(data)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise BlockingIOError from None

    def close(self) -> None:
        if self.open and isinstance(self.connection, ssl.SSLSocket) and self._handshake_done:
            with suppress(OSError, ValueError):
                self.connection.unwrap()  # sends a TLS close where the socket accepts it at once
        super().close()


def client_network(host: str) -> str:
    """Return the address, or for IPv6 its /64 network, because one subscriber has at least a /64 of addresses."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return host if address.version == 4 else str(ipaddress.ip_network((address, 64), strict=False))

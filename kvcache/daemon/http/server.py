"""Runs the HTTP API on its own thread, so that HTTP requests do not delay engines."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from kvcache.daemon.server.server import Daemon
from kvcache.daemon.server.tcp import is_loopback
from kvcache.errors import ConfigError, StoreError
from kvcache.log import logger
from kvcache.settings.service import MAX_HTTP_CONNECTIONS, HttpSettings

MAX_CONCURRENT_REQUESTS = 64
"""Most connections and requests at a time.

A further request is answered with 503. A connection beyond `MAX_HTTP_CONNECTIONS` is closed, because even a 503 needs a
descriptor.
"""
DRAIN_TIMEOUT_S = 2
HEADER_TIMEOUT_S = 10.0
"""For a request's header to arrive."""


def bind_listener(settings: HttpSettings) -> socket.socket:
    """Return a socket bound as the settings say; StoreError where that fails."""
    named = f"http.host = {settings.host!r}, http.port = {settings.port}"
    try:
        found = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, page_url = found[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(page_url)
            listener.listen(MAX_CONCURRENT_REQUESTS)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        raise StoreError(f"{named}: {error.strerror or error}; give an address of this host and a free port") from None
    return listener


def page_url(settings: HttpSettings, port: int) -> str:
    """Return the page's URL."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert_file else 'http'}://{host}:{port}/"


def check_tls(settings: HttpSettings) -> None:
    """Raise ConfigError where certificate and key cannot be used."""
    if not settings.tls_cert_file:
        if settings.tls_key_file:
            raise ConfigError("http.tls_key_file without http.tls_cert_file: give the certificate too")
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_cert_file, settings.tls_key_file or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"http.tls_cert_file = {settings.tls_cert_file!r}: {error.strerror or error}; expected a certificate and "
            "its key, as PEM"
        ) from None


class _HeaderTimeoutProtocol(H11Protocol):
    """Closes a connection whose request header does not arrive in time: a few of these would block all clients."""

    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > MAX_HTTP_CONNECTIONS:
            transport.abort()
        else:
            self._start_header_timer()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is None or self.cycle.response_complete:
            self._start_header_timer()
        else:
            self._cancel_header_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        super().connection_lost(exc)

    def _start_header_timer(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(HEADER_TIMEOUT_S, self.transport.close)

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def start(app: Starlette, listener: socket.socket, settings: HttpSettings) -> Callable[[], None]:
    """Serve on a new thread; return the function that ends it. Takes ownership of the listener."""
    config = uvicorn.Config(
        app,
        http=_HeaderTimeoutProtocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONCURRENT_REQUESTS,
        timeout_graceful_shutdown=DRAIN_TIMEOUT_S,
        ssl_certfile=settings.tls_cert_file or None,
        ssl_keyfile=settings.tls_key_file or None,
    )
    server = uvicorn.Server(config)

    def run() -> None:
        try:
            server.run(sockets=[listener])
        finally:
            listener.close()

    thread = threading.Thread(target=run, name="kvcache-http", daemon=True)
    thread.start()

    def end() -> None:
        server.should_exit = True
        thread.join()

    return end


# Start and end of a daemon's HTTP. Packages that only HTTP needs are imported where HTTP is enabled.

_log = logger("kvcache.daemon.http")


def planned_url(settings: HttpSettings) -> str:
    """Return the page's URL for a dry run; ConfigError where certificate or key cannot be used."""

    check_tls(settings)
    return page_url(settings, settings.port)


def http_listener(settings: HttpSettings, *, needed: bool = True) -> socket.socket | None:
    """Return the bound socket, so that a daemon without its port reports that before it opens anything.

    Where `needed` is False, a port that is taken is logged and None is returned: an engine waits for that daemon.

    Raises:
        StoreError: The port cannot be bound, and `needed` is True.
    """

    check_tls(settings)
    try:
        return bind_listener(settings)
    except StoreError as error:
        if needed:
            raise
        _log.warning("no HTTP: %s", error)
        return None


def serve_http(
    daemon: Daemon, listener: socket.socket, settings: HttpSettings, version: str
) -> tuple[str, Callable[[], None]]:
    """Start serving; return the page's URL and the function that ends it."""
    from kvcache.daemon.http.app import HttpApi

    admission = daemon.admission

    def owner(token: str) -> str | None:
        found = None if admission.tenants is None else admission.tenants.by_token(token)
        return None if found is None else found.name

    site = HttpApi(
        daemon.cache,
        version=version,
        owner=owner if admission.isolates_tenants else None,
        rate_limit=lambda tenant: (
            admission.rate_limit(admission.tenants.by_name[tenant]) if admission.tenants is not None else None
        ),
        local=is_loopback(settings.host),
        not_ready=lambda: [daemon.not_ready_reason()],
        unhealthy=lambda: [daemon.health_issue()],
    )
    return page_url(settings, listener.getsockname()[1]), start(site.application(), listener, settings)

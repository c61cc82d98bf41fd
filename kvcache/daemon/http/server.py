"""Listens for HTTP on a thread of its own: whatever is asked there, engines are served as before."""

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
from kvcache.settings.service import MAX_HTTP_CONNECTIONS, Http

MAX_CONCURRENT_REQUESTS = 64
"""Connections and questions at a time; who comes beyond them is told to come later (503), and beyond `CONNECTIONS`
hung up on: whoever is told must be taken in first, and that takes a descriptor."""
DRAIN_TIMEOUT_S = 2
HEADER_TIMEOUT_S = 10.0
"""For the head of a request to arrive."""


def bind_listener(settings: Http) -> socket.socket:
    """A socket that is bound where the settings say. StoreError where that cannot be."""
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


def page_url(settings: Http, port: int) -> str:
    """As a browser takes it."""
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert_file else 'http'}://{host}:{port}/"


def check_tls(settings: Http) -> None:
    """ConfigError where certificate and key are not what they should be."""
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
    """Hangs up on whoever begins a request and does not come to the end of its head: a few of these would otherwise
    keep everybody else from asking."""

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


def start(app: Starlette, listener: socket.socket, settings: Http) -> Callable[[], None]:
    """Answer from now on; the function that ends it. Takes the listener over."""
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


# A daemon's HTTP, begun and ended with it. What HTTP needs beside is imported only where it is wanted.

_log = logger("kvcache.daemon.http")


def planned_url(settings: Http) -> str:
    """Where the page would be; ConfigError where certificate or key are not what they should be."""

    check_tls(settings)
    return page_url(settings, settings.port)


def http_listener(settings: Http, *, needed: bool = True) -> socket.socket | None:
    """Bound, so that a daemon that cannot have its port says so before it opens anything. `needed`: StoreError where it
    cannot; else, for a daemon that an engine started and waits for, it goes without and says so."""

    check_tls(settings)
    try:
        return bind_listener(settings)
    except StoreError as error:
        if needed:
            raise
        _log.warning("no HTTP: %s", error)
        return None


def serve_http(daemon: Daemon, listener: socket.socket, settings: Http, version: str) -> tuple[str, Callable[[], None]]:
    """Answer from now on: where the page is, and the function that ends it."""
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
    )
    return page_url(settings, listener.getsockname()[1]), start(site.application(), listener, settings)

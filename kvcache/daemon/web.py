"""A daemon's HTTP, begun and ended with it. What HTTP needs beside is imported only where it is wanted."""

from __future__ import annotations

import socket
from collections.abc import Callable

from kvcache.daemon.server import Daemon
from kvcache.daemon.tcp import is_loopback
from kvcache.errors import StoreError
from kvcache.log import logger
from kvcache.settings.service import Http

_log = logger("kvcache.daemon.http")


def planned(settings: Http) -> str:
    """Where the page would be; ConfigError where certificate or key are not what they should be."""
    from kvcache.daemon.http.server import address, check_tls

    check_tls(settings)
    return address(settings, settings.port)


def http_listener(settings: Http, *, needed: bool = True) -> socket.socket | None:
    """Bound, so that a daemon that cannot have its port says so before it opens anything. `needed`: StoreError where it
    cannot; else, for a daemon that an engine started and waits for, it goes without and says so."""
    from kvcache.daemon.http.server import check_tls, listening

    check_tls(settings)
    try:
        return listening(settings)
    except StoreError as error:
        if needed:
            raise
        _log.warning("no HTTP: %s", error)
        return None


def serve_http(daemon: Daemon, listener: socket.socket, settings: Http, version: str) -> tuple[str, Callable[[], None]]:
    """Answer from now on: where the page is, and the function that ends it."""
    from kvcache.daemon.http.app import Site
    from kvcache.daemon.http.server import address, start

    door = daemon.door

    def owner(token: str) -> str | None:
        found = None if door.tenants is None else door.tenants.by_token(token)
        return None if found is None else found.name

    site = Site(
        daemon.cache,
        version=version,
        owner=owner if door.apart else None,
        meter=lambda tenant: door.meter(door.tenants.by_name[tenant]) if door.tenants is not None else None,
        local=is_loopback(settings.host),
        waits=lambda: [daemon.why_not()],
    )
    return address(settings, listener.getsockname()[1]), start(site.application(), listener, settings)

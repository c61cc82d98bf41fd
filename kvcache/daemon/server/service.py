"""`kvcache daemon` from its settings to its end: starts the parts in order, and stops them in reverse.

    service = Service(read, version=...)   # validates the settings; changes nothing
    service.start(replace=True)            # ends the previous daemon, takes its socket and drives, accepts clients
    service.run()                          # until SIGTERM
    service.stop()                         # writes the queue, or hands memory over; frees the socket

The socket listens last: a client that connects finds the whole cache, with the records of the previous process.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from kvcache.cache.cache import Cache
from kvcache.cache.factory import check_settings as check_parts
from kvcache.cache.warm_restart import WarmRestart
from kvcache.daemon.discovery import SocketClaim, parse_unix_address
from kvcache.daemon.server.admission import Admission, tenant_quotas
from kvcache.daemon.server.auth import Tenants
from kvcache.daemon.server.connection import MAX_PENDING_CONNECTIONS
from kvcache.daemon.server.control import open_control
from kvcache.daemon.server.handover import EXIT_TIMEOUT_S, hand_over, take_over
from kvcache.daemon.server.server import Daemon
from kvcache.daemon.server.systemd import notify, store_descriptors, take_descriptors
from kvcache.daemon.server.tcp import TcpListener
from kvcache.errors import ConfigError
from kvcache.log import configure_logging, logger
from kvcache.machine import memory
from kvcache.os_env import SystemClock
from kvcache.settings import Settings
from kvcache.settings.service import MAX_HTTP_CONNECTIONS
from kvcache.settings.types import show_bytes
from kvcache.tier.host.arena import Region

# Limits of the system, checked before the start. Each error names the limit that is too low.

BASE_DESCRIPTORS = 64
"""Descriptors of files, sockets and threads whose number does not depend on the settings."""
NVIDIA_DEVICE = Path("/dev/nvidiactl")
"""Exists where an NVIDIA driver runs."""

_log = logger("kvcache.daemon")


def required_descriptors(settings: Settings) -> int:
    """Return the most descriptors that this process may have open.

    It counts one per slab, two per connection (the socket and the pidfd of its process), pending connections, NVMe
    segments, and HTTP connections.
    """
    host, nvme = settings.host, settings.nvme
    segments = -(-nvme.capacity_bytes // nvme.segment_bytes) if nvme.enabled else 0
    seen = MAX_HTTP_CONNECTIONS if settings.http.enabled else 0
    slabs = -(-host.capacity_bytes // host.slab_bytes)
    return slabs + 2 * settings.daemon.connections + MAX_PENDING_CONNECTIONS + segments + seen + BASE_DESCRIPTORS


def memlock_warning(settings: Settings) -> str:
    """Return a warning about the locked-memory limit, or "".

    Each engine with a GPU pins the arena, mostly under the same limit as the daemon. The daemon itself locks nothing,
    and so it starts all the same.
    """
    needed, (_, hard) = settings.host.capacity_bytes, resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if not NVIDIA_DEVICE.exists() or hard == resource.RLIM_INFINITY or hard >= needed:
        return ""
    return (
        f"{show_bytes(hard)} of memory may be locked (ulimit -Hl): an engine with a GPU pins {show_bytes(needed)} "
        "(host.capacity_bytes), and copies at a part of the speed where it may not; LimitMEMLOCK=infinity for a "
        "service, --ulimit memlock=-1 for a container, or give less host.capacity_bytes"
    )


def check_settings(settings: Settings, tenants: Tenants | None) -> None:
    """Raise ConfigError for settings with which the cache could not open. Called before another daemon is asked to end.

    An arena without a configured size takes the size of the previous daemon's arena, which may be all memory that is
    allowed.
    """
    if not settings.given("host.capacity_bytes"):
        host = settings.host.model_copy(update={"capacity_bytes": memory().allowed_bytes})
        settings = settings.model_copy(update={"host": host})
    check_parts(settings)
    tenant_quotas(settings, tenants)


def raise_limits(settings: Settings) -> None:
    """Raise this process's limits to those needed, where allowed.

    Raises:
        ConfigError: The hard limit is too low, or the system makes no file in memory.
    """
    if not hasattr(os, "memfd_create"):
        raise ConfigError("a daemon needs memory files (memfd), which only Linux has; open the cache in the engine")
    try:
        Region(1 << 12, shared=True)
    except OSError as error:
        raise ConfigError(
            f"cannot create a memory file ({error.strerror}): memfd_create, ftruncate and sealing must be allowed"
        ) from None
    if refused := memlock_warning(settings):
        _log.warning("%s", refused)
    needed, (soft, hard) = required_descriptors(settings), resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and needed > hard:
        raise ConfigError(
            f"{hard} descriptors (ulimit -Hn): {needed} are needed, one an extent of "
            f"{show_bytes(settings.host.slab_bytes)}, two a connection (daemon.connections), one an NVMe segment; "
            "raise the limit, or make extents and segments larger"
        )
    most = (
        max(soft, needed) if hard == resource.RLIM_INFINITY else hard
    )  # the previous daemon may hand over more slabs than these settings need
    if soft != resource.RLIM_INFINITY and most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Service:
    def __init__(
        self,
        read: Callable[..., Settings],
        *,
        version: str,
        insecure: bool = False,
        linger_s: float | None = None,
        components: Sequence[Callable[[Cache], object]] = (),
        report_status: Callable[[str], object] = lambda line: None,
    ) -> None:
        """Validate the settings.

        Args:
            read: Returns the settings; takes further settings by name.
            version: Of this program, sent to clients.
            insecure: TCP on loopback needs no TLS.
            linger_s: As of `Daemon`.
            components: Called with the cache before clients can connect; they end with it.
            report_status: Called with each line of status.

        Raises:
            ConfigError: The settings are invalid, or this process may not have what they need.
        """
        self._read, self._version, self._linger_s, self._components, self._report_status = (
            read,
            version,
            linger_s,
            components,
            report_status,
        )
        self._settings = read()
        configure_logging(self._settings.log)
        raise_limits(self._settings)
        daemon = self._settings.daemon
        self._path = parse_unix_address(daemon.socket)
        self._admission = Admission(daemon.tenants_file, SystemClock())
        check_settings(self._settings, self._admission.tenants)
        self._tcp_listener = TcpListener(daemon, self._admission, insecure=insecure) if daemon.listen else None
        self._page = ""
        self._cleanup = ExitStack()
        self.daemon: Daemon | None = None
        """None before `start`."""

    def __str__(self) -> str:
        """Return what is served, and where."""
        host, nvme = self._settings.host, self._settings.nvme
        places = ", ".join(map(str, nvme.directories))
        drive = f", {show_bytes(nvme.capacity_bytes)} at {places}" if nvme.enabled else ""
        also = "" if self._tcp_listener is None else f", {self._tcp_listener}"
        page = f"; {self._page}" if self._page else ""
        return f"unix:{self._path}, {show_bytes(host.capacity_bytes)} of host memory{drive}{also}{page}"

    def plan(self) -> str:
        """Return what would be served, and release the port. The service cannot start afterwards."""
        if self._settings.http.enabled:
            from kvcache.daemon.http import server as http  # late: a quarter of the imports of a daemon

            self._page = http.planned_url(self._settings.http)
        text = str(self)
        if self._tcp_listener is not None:
            self._tcp_listener.close()
        return text

    def start(self, *, replace: bool = False) -> None:
        """Start serving; leave nothing open on an error.

        Args:
            replace: Take over from the daemon that listens at this socket, if any.
        """
        with ExitStack() as ends:
            if self._tcp_listener is not None:
                ends.callback(self._tcp_listener.close)
            predecessor = self._predecessor_memory(replace)
            if predecessor is not None:
                ends.callback(predecessor.close)
            claim = SocketClaim(
                self._path, int(self._settings.daemon.mode, 8), wait_s=EXIT_TIMEOUT_S if replace else 0.0
            )
            ends.callback(claim.release)
            inherited_bytes = 0 if predecessor is None else predecessor.capacity_bytes
            if inherited_bytes and not self._settings.given("host.capacity_bytes"):
                # memory that is free now excludes what is taken over
                self._settings = self._read(host__capacity_bytes=inherited_bytes)
                raise_limits(self._settings)
            listener = None
            if self._settings.http.enabled:
                from kvcache.daemon.http import server as http

                listener = http.http_listener(self._settings.http, needed=self._linger_s is None)
                if listener is not None:
                    ends.callback(listener.close)
            cache = ends.enter_context(Cache(self._settings, shared=True, served_address=f"unix:{self._path}"))
            if predecessor is not None:
                predecessor.take_in(cache)
            for begin in self._components:
                begin(cache)
            if self._settings.control.enabled:
                open_control(cache, self._version)
            served = Daemon(
                cache,
                claim,
                version=self._version,
                linger_s=self._linger_s,
                on_started=self._on_started,
                admission=self._admission,
                port=self._tcp_listener,
                on_reload=lambda: configure_logging(self._read().log),
            )
            ends.callback(served.close)
            cache.on_quiesced.append(
                lambda: store_descriptors(cache) if served.successor is None else hand_over(served.successor, cache)
            )
            if listener is not None:
                from kvcache.daemon.http import server as http

                self._page, end = http.serve_http(served, listener, self._settings.http, self._version)
                ends.callback(end)
            self.daemon, self._cleanup = served, ends.pop_all()

    def run(self) -> None:
        """Serve until SIGTERM, until a new daemon takes over, or until the linger time ends."""
        assert self.daemon is not None
        self.daemon.run()
        notify("STOPPING=1", "STATUS=writing queued blocks")
        self._report_status("ending; queued blocks are written first")

    def stop(self) -> None:
        """Close everything that `start` opened, in reverse order. Idempotent."""
        self._cleanup.close()

    def _predecessor_memory(self, replace: bool) -> WarmRestart | None:
        """Return the memory of the previous process: of the daemon to replace, else of the unit's last process."""
        predecessor = None
        if replace:
            if self._settings.http.enabled:
                from kvcache.daemon.http import server as http

                http.planned_url(self._settings.http)  # may raise, and so runs while the previous daemon still serves
            predecessor = take_over(self._path)
        unit = take_descriptors()
        if predecessor is not None and unit is not None:
            unit.close()  # older than the memory that the replaced daemon handed over
        return unit if predecessor is None else predecessor

    def _on_started(self) -> None:
        self._report_status(f"serving {self}")
        notify("READY=1", f"STATUS=serving {self}")

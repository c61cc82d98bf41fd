"""`kvcache daemon` from its settings to its end: what is done in which order, and undone in the other.

    service = Service(read, version=...)   # what makes no sense is refused: nothing was touched
    service.start(replace=True)            # the one before ends, the socket and the drives are ours, engines may come
    service.run()                          # until SIGTERM
    service.stop()                         # what is queued is written, or handed over; the socket is free

Whoever comes by the socket finds a cache that has everything: what the process before left is taken in first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import Legacy
from kvcache.daemon.address import Claim, socket_of
from kvcache.daemon.control.server import listen
from kvcache.daemon.door import Door
from kvcache.daemon.ground import check, prepare
from kvcache.daemon.handover import END_S, give, take
from kvcache.daemon.notify import keep, kept, notify
from kvcache.daemon.server import Daemon
from kvcache.daemon.tcp import Port
from kvcache.daemon.web import http_listener, planned, serve_http
from kvcache.log import apply
from kvcache.os_env import SystemClock
from kvcache.settings import Settings
from kvcache.settings.types import show_bytes


class Service:
    def __init__(
        self,
        read: Callable[..., Settings],
        *,
        version: str,
        insecure: bool = False,
        linger_s: float | None = None,
        beside: Sequence[Callable[[Cache], object]] = (),
        say: Callable[[str], object] = lambda line: None,
    ) -> None:
        """`read` reads the settings, and takes further ones by name. `insecure`: TCP on loopback needs no more.
        `linger_s` as of `Daemon`. `beside`: what else begins with a cache, before anybody comes; it ends with it.
        ConfigError where the settings make no sense, or this process may not have what they need."""
        self._read, self._version, self._linger_s, self._beside, self._say = read, version, linger_s, beside, say
        self._settings = read()
        apply(self._settings.log)
        prepare(self._settings)
        daemon = self._settings.daemon
        self._path = socket_of(daemon.socket)
        self._door = Door(daemon.tenants_file, SystemClock())
        check(self._settings, self._door.tenants)
        self._port = Port(daemon, self._door, insecure=insecure) if daemon.listen else None
        self._page = ""
        self._ends = ExitStack()
        self.daemon: Daemon | None = None
        """Once it is started."""

    def __str__(self) -> str:
        """What is served, and where."""
        host, nvme = self._settings.host, self._settings.nvme
        places = ", ".join(map(str, nvme.directories))
        drive = f", {show_bytes(nvme.capacity_bytes)} at {places}" if nvme.enabled else ""
        also = "" if self._port is None else f", {self._port}"
        page = f"; {self._page}" if self._page else ""
        return f"unix:{self._path}, {show_bytes(host.capacity_bytes)} of host memory{drive}{also}{page}"

    def plan(self) -> str:
        """What would be served; it is not to be started any more."""
        if self._settings.http.enabled:
            self._page = planned(self._settings.http)
        told = str(self)
        if self._port is not None:
            self._port.close()
        return told

    def start(self, *, replace: bool = False) -> None:
        """`replace`: in the place of the daemon that listens there, if any. Where it raises, nothing is left open."""
        with ExitStack() as ends:
            if self._port is not None:
                ends.callback(self._port.close)
            legacy = self._before(replace)
            if legacy is not None:
                ends.callback(legacy.close)
            claim = Claim(self._path, int(self._settings.daemon.mode, 8), wait_s=END_S if replace else 0.0)
            ends.callback(claim.release)
            if legacy is not None and legacy.capacity_bytes and not self._settings.given("host.capacity_bytes"):
                # what is free now is less by what is taken over
                self._settings = self._read(host__capacity_bytes=legacy.capacity_bytes)
                prepare(self._settings)
            listener = None
            if self._settings.http.enabled:
                listener = http_listener(self._settings.http, needed=self._linger_s is None)
                if listener is not None:
                    ends.callback(listener.close)
            cache = ends.enter_context(Cache(self._settings, shared=True, serves=f"unix:{self._path}"))
            if legacy is not None:
                legacy.take_in(cache)
            for begin in self._beside:
                begin(cache)
            if self._settings.control.enabled:
                listen(cache, self._version)
            served = Daemon(
                cache,
                claim,
                version=self._version,
                linger_s=self._linger_s,
                began=self._began,
                door=self._door,
                port=self._port,
                again=lambda: apply(self._read().log),
            )
            ends.callback(served.close)
            cache.at_rest.append(lambda: keep(cache) if served.heir is None else give(served.heir, cache))
            if listener is not None:
                self._page, end = serve_http(served, listener, self._settings.http, self._version)
                ends.callback(end)
            self.daemon, self._ends = served, ends.pop_all()

    def run(self) -> None:
        """Until SIGTERM, or an heir, or the end of whom it lingers for."""
        assert self.daemon is not None
        self.daemon.run()
        notify("STOPPING=1", "STATUS=writing what is queued")
        self._say("ending; what is queued is written first")

    def stop(self) -> None:
        """Idempotent."""
        self._ends.close()

    def _before(self, replace: bool) -> Legacy | None:
        """What the process before this one left. Of one that is asked for it, else of the unit's last."""
        legacy = None
        if replace:
            if self._settings.http.enabled:
                planned(self._settings.http)  # what can be refused is, while the one before still serves
            legacy = take(self._path)
        unit = kept()
        if legacy is not None and unit is not None:
            unit.close()  # of a process before the one that was asked: what came from that is newer
        return unit if legacy is None else legacy

    def _began(self) -> None:
        self._say(f"serving {self}")
        notify("READY=1", f"STATUS=serving {self}")

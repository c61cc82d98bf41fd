"""`kvcache daemon`: a cache that outlives the engines that use it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from kvcache.settings import Settings


def daemon(
    settings: Annotated[Path | None, typer.Argument(help="A settings file (TOML); without one, defaults.")] = None,
    socket: Annotated[str | None, typer.Option(help="The Unix socket; weighs more than daemon.socket.")] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Figures and a page over HTTP as well, where http.host and http.port say.")
    ] = False,
    check_config: Annotated[
        bool, typer.Option("--check-config", help="Say what would be served, and leave: 2 where it makes no sense.")
    ] = False,
    insecure_loopback: Annotated[
        bool,
        typer.Option("--insecure-loopback", help="Let daemon.listen be on 127.0.0.1 without TLS and tokens."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="End the daemon that listens there, if any, and take over its host memory."),
    ] = False,
    linger_s: Annotated[
        float | None, typer.Option(min=0.1, help="End once nobody has been connected for so long.")
    ] = None,
) -> None:
    """Serve a cache to the engines of this host, until SIGTERM."""
    import kvcache
    from kvcache.config import load
    from kvcache.daemon.address import Claim, socket_of
    from kvcache.daemon.control.server import listen
    from kvcache.daemon.door import Door
    from kvcache.daemon.ground import check, prepare
    from kvcache.daemon.handover import END_S, give, take
    from kvcache.daemon.notify import keep, kept, notify
    from kvcache.daemon.server import Daemon
    from kvcache.daemon.tcp import Port
    from kvcache.daemon.web import http_listener, planned, serve_http
    from kvcache.fleet.node import join
    from kvcache.hierarchy.cache import Cache
    from kvcache.log import apply
    from kvcache.port import SystemClock
    from kvcache.trace.recorder import record

    given: dict[str, Any] = {} if socket is None else {"daemon__socket": socket}
    given |= {"http__enabled": True} if http else {}
    loaded = load(settings, **given)
    apply(loaded.log)
    prepare(loaded)
    path = socket_of(loaded.daemon.socket)
    door = Door(loaded.daemon.tenants_file, SystemClock())
    check(loaded, door.tenants)
    port = Port(loaded.daemon, door, insecure=insecure_loopback) if loaded.daemon.listen else None
    what = told(loaded, path, port)
    if check_config:
        page = f"; {planned(loaded.http)}" if loaded.http.enabled else ""
        print(f"kvcache: would serve {what}{page}")
        if port is not None:
            port.close()
        return
    with ExitStack() as ends:
        legacy = None
        if replace:
            if loaded.http.enabled:
                planned(loaded.http)  # what can be refused is, while the one before still serves
            legacy = take(path)
        unit = kept()
        if legacy is None:
            legacy = unit
        elif unit is not None:  # of a process before the one that was asked: what came from that is newer
            unit.close()
        claim = Claim(path, int(loaded.daemon.mode, 8), wait_s=END_S if replace else 0.0)
        ends.callback(claim.release)
        if legacy is not None:
            ends.callback(legacy.close)
            if not loaded.given("host.capacity_bytes") and legacy.capacity_bytes:
                # what is free now is less by what is taken over
                loaded = load(settings, **given, host__capacity_bytes=legacy.capacity_bytes)
                prepare(loaded)
                what = told(loaded, path, port)
        listener = None
        if loaded.http.enabled:
            listener = http_listener(loaded.http, needed=linger_s is None)
            if listener is not None:
                ends.callback(listener.close)
        cache = ends.enter_context(Cache(loaded, shared=True, serves=f"unix:{path}"))
        if legacy is not None:
            legacy.take_in(cache)
        record(cache)
        join(cache)
        if loaded.control.enabled:
            listen(cache, kvcache.__version__)

        def began() -> None:
            print(f"kvcache: serving {what}", flush=True)
            notify("READY=1", f"STATUS=serving {what}")

        served = Daemon(
            cache,
            claim,
            version=kvcache.__version__,
            linger_s=linger_s,
            began=began,
            door=door,
            port=port,
            again=lambda: apply(load(settings, **given).log),
        )
        cache.at_rest.append(lambda: keep(cache) if served.heir is None else give(served.heir, cache))
        if listener is not None:
            page, end = serve_http(served, listener, loaded.http, kvcache.__version__)
            ends.callback(end)
            what += f"; {page}"
        served.run()
        notify("STOPPING=1", "STATUS=writing what is queued")
        print("kvcache: ending; what is queued is written first", flush=True)


def told(settings: Settings, socket: Path, port: object) -> str:
    """What is served, and where."""
    from kvcache.units import show_bytes

    nvme, places = settings.nvme, ", ".join(map(str, settings.nvme.directories))
    drive = f", {show_bytes(nvme.capacity_bytes)} at {places}" if nvme.enabled else ""
    also = "" if port is None else f", {port}"
    return f"unix:{socket}, {show_bytes(settings.host.capacity_bytes)} of host memory{drive}{also}"


def register(app: typer.Typer) -> None:
    app.command("daemon")(daemon)

"""`kvcache daemon`: a cache that outlives the engines that use it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer


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
    from kvcache.daemon.ground import prepare
    from kvcache.daemon.server import Daemon
    from kvcache.daemon.tcp import Port
    from kvcache.daemon.web import http_listener, planned, serve_http
    from kvcache.fleet.node import join
    from kvcache.hierarchy.cache import Cache
    from kvcache.log import apply
    from kvcache.port import SystemClock
    from kvcache.trace.recorder import record
    from kvcache.units import show_bytes

    given: dict[str, Any] = {} if socket is None else {"daemon__socket": socket}
    given |= {"http__enabled": True} if http else {}
    loaded = load(settings, **given)
    apply(loaded.log)
    prepare(loaded)
    path = socket_of(loaded.daemon.socket)
    places = ", ".join(map(str, loaded.nvme.directories))
    nvme = f", {show_bytes(loaded.nvme.capacity_bytes)} at {places}" if loaded.nvme.enabled else ""
    door = Door(loaded.daemon.tenants_file, SystemClock())
    port = Port(loaded.daemon, door, insecure=insecure_loopback) if loaded.daemon.listen else None
    what = f"unix:{path}, {show_bytes(loaded.host.capacity_bytes)} of host memory{nvme}"
    if check_config:
        page = f"; {planned(loaded.http)}" if loaded.http.enabled else ""
        print(f"kvcache: would serve {what}{also(port)}{page}")
        if port is not None:
            port.close()
        return
    with ExitStack() as ends:
        listener = None
        if loaded.http.enabled:
            listener = http_listener(loaded.http, needed=linger_s is None)
            if listener is not None:
                ends.callback(listener.close)
        claim = Claim(path, int(loaded.daemon.mode, 8))
        try:
            cache = Cache(loaded, shared=True, serves=f"unix:{path}")
        except BaseException:
            claim.release()
            raise
        ends.enter_context(cache)
        record(cache)
        join(cache)
        if loaded.control.enabled:
            listen(cache, kvcache.__version__)
        served = Daemon(
            cache,
            claim,
            version=kvcache.__version__,
            linger_s=linger_s,
            began=lambda: print(f"kvcache: serving {what}{also(port)}", flush=True),
            door=door,
            port=port,
            again=lambda: apply(load(settings, **given).log),
        )
        if listener is not None:
            page, end = serve_http(served, listener, loaded.http, kvcache.__version__)
            ends.callback(end)
            what += f"; {page}"
        served.run()
        print("kvcache: ending; what is queued is written first", flush=True)


def also(port: object) -> str:
    return "" if port is None else f", {port}"


def register(app: typer.Typer) -> None:
    app.command("daemon")(daemon)

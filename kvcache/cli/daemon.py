"""`kvcache daemon`: a cache that outlives the engines that use it."""

from __future__ import annotations

from functools import partial
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
    from kvcache.daemon.server.service import Service
    from kvcache.fleet.node import join
    from kvcache.settings.sources import load
    from kvcache.trace.recorder import record

    given: dict[str, Any] = {} if socket is None else {"daemon__socket": socket}
    given |= {"http__enabled": True} if http else {}
    service = Service(
        partial(load, settings, **given),
        version=kvcache.__version__,
        insecure=insecure_loopback,
        linger_s=linger_s,
        beside=[record, join],
        say=lambda line: print(f"kvcache: {line}", flush=True),
    )
    if check_config:
        print(f"kvcache: would serve {service.plan()}")
        return
    try:
        service.start(replace=replace)
        service.run()
    finally:
        service.stop()


def register(app: typer.Typer) -> None:
    app.command("daemon")(daemon)

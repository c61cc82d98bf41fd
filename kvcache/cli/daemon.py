"""`kvcache daemon` and `kvcache token`, and the selection of the running cache that a subcommand addresses."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json
from kvcache.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from kvcache.daemon.client.control import RunningCache


def daemon(
    settings: Annotated[
        Path | None, typer.Argument(help="A settings file (TOML). Default: the default settings.")
    ] = None,
    socket: Annotated[str | None, typer.Option(help="The Unix socket. Overrides daemon.socket.")] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Also serve metrics and a status page over HTTP, at http.host and http.port.")
    ] = False,
    check_config: Annotated[
        bool,
        typer.Option(
            "--check-config",
            help="Check the settings, print what the daemon would serve, and exit. Exit code 2 for invalid settings.",
        ),
    ] = False,
    insecure_loopback: Annotated[
        bool,
        typer.Option("--insecure-loopback", help="Allow daemon.listen on 127.0.0.1 without TLS and tokens."),
    ] = False,
    replace: Annotated[
        bool,
        typer.Option("--replace", help="Replace the daemon that listens there, if any, and take over its host memory."),
    ] = False,
    linger_s: Annotated[float | None, typer.Option(min=0.1, help="Exit after this time without a client.")] = None,
) -> None:
    """Serve a cache to the engines of this host, until SIGTERM."""
    import kvcache
    from kvcache.daemon.server.service import Service
    from kvcache.fleet.node import join_fleet
    from kvcache.settings.sources import load
    from kvcache.trace.recorder import start_recording

    given: dict[str, Any] = {} if socket is None else {"daemon__socket": socket}
    given |= {"http__enabled": True} if http else {}
    service = Service(
        partial(load, settings, **given),
        version=kvcache.__version__,
        insecure=insecure_loopback,
        linger_s=linger_s,
        components=[start_recording, join_fleet],
        report_status=lambda line: print(f"kvcache: {line}", flush=True),
    )
    if check_config:
        print(f"kvcache: would serve {service.plan()}")
        return
    try:
        service.start(replace=replace)
        service.run()
    finally:
        service.stop()


# Selects the running cache of a subcommand: the only one, or the one in `--address`.

AddressOption = Annotated[
    str | None,
    typer.Option("--address", "-a", help="The cache: its address from `kvcache ps`, or the path of its socket."),
]


def find_one_cache(address: str | None) -> Path:
    """Return its socket.

    Raises:
        UnreachableError: no cache runs.
        ConfigError: several caches run and no address was given.
    """
    from kvcache.daemon.client.control import find_socket

    if address is not None:
        return find_socket(address)
    running = running_caches()
    if len(running) > 1:
        named = ", ".join(found.address for found in running)
        raise ConfigError(f"{len(running)} caches run here: {named}; pick one with --address (`kvcache ps` lists them)")
    return running[0].path


def running_caches() -> list[RunningCache]:
    """Return every running cache of this user; UnreachableError where none runs."""
    from kvcache.daemon.client.control import find_caches

    running = list(find_caches())
    if not running:
        raise UnreachableError(
            "found no running cache of this user with a control socket: start one, or check `control.enabled` "
            "in `kvcache config show`"
        )
    return running


# `kvcache token`: makes a token for a tenant, and the line of the tenants file that accepts it.


def token(output: OutputOption = OutputFormat.table, as_json: JsonOption = False) -> None:
    """Make a token. The first line is the secret for the client, the second one is for the daemon's tenants file."""
    from kvcache.daemon.server.auth import new_token, token_hash

    made = new_token()
    if as_json or output is OutputFormat.json:
        print_json({"token": made, "hash": token_hash(made)})
        return
    print(made)
    print(f'tokens = ["{token_hash(made)}"]')


def register(app: typer.Typer) -> None:
    app.command("daemon")(daemon)
    app.command("token")(token)

"""Which running cache a subcommand means: the one there is, or the one that `--address` names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kvcache.errors import ConfigError, UnreachableError

if TYPE_CHECKING:
    from pathlib import Path

    from kvcache.daemon.client.control import Found

Address = Annotated[
    str | None,
    typer.Option("--address", "-a", help="Which cache, as `kvcache ps` names it, or the path of its socket."),
]


def the_one(address: str | None) -> Path:
    """Its socket. UnreachableError where none runs; ConfigError where several do and no address was given."""
    from kvcache.daemon.client.control import locate

    if address is not None:
        return locate(address)
    running = all_of_them()
    if len(running) > 1:
        named = ", ".join(found.address for found in running)
        raise ConfigError(f"{len(running)} caches run here: {named}; pick one with --address (`kvcache ps` tells more)")
    return running[0].path


def all_of_them() -> list[Found]:
    """Every running cache of this user; UnreachableError where there is none."""
    from kvcache.daemon.client.control import find

    running = list(find())
    if not running:
        raise UnreachableError(
            "no cache of this user is running, or none that listens: start one, or see `control.enabled` "
            "in `kvcache config show`"
        )
    return running

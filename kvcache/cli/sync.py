"""`kvcache sync`: wait until what was stored is where it is meant for."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache.cli.output import Format, Json, Output, print_json
from kvcache.cli.running import Address, the_one


def sync(
    address: Address = None,
    timeout_s: Annotated[float, typer.Option(min=0, max=60, help="Wait so long at most.")] = 60.0,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Wait until all that was stored before is in every tier below host memory; exit 1 if that takes longer."""
    from kvcache.daemon.control.client import ask

    done = bool(ask(the_one(address), "flush", timeout_s=timeout_s + 5, seconds=timeout_s)["flushed"])
    if as_json or output is Format.json:
        print_json({"done": done})
    else:
        print("all of it is there" if done else f"not all of it is there after {timeout_s:g} s")
    if not done:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command("sync")(sync)

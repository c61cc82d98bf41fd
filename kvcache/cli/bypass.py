"""`kvcache bypass`: takes a running cache out of its engine's way at once, and puts it back."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, all_of_them, the_one


class Mode(str, Enum):
    on = "on"
    off = "off"
    loads = "loads"
    stores = "stores"


def bypass(
    mode: Annotated[
        Mode | None,
        typer.Argument(help="on: out of both paths; loads or stores: out of one; off: back. Without: say which."),
    ] = None,
    address: Address = None,
    everyone: Annotated[bool, typer.Option("--all", help="Every running cache of this user.")] = False,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Take a running cache out of the path: matches find nothing, stores are dropped; nothing that is stored is lost.

    It holds until `bypass off`, or until the process ends.
    """
    from kvcache.daemon.client.control import ask

    if everyone and address is not None:
        raise typer.BadParameter("--all and --address: give one or the other")
    paths = [found.path for found in all_of_them()] if everyone else [the_one(address)]
    wanted = None if mode is None else mode.value
    rows = [{"address": path.stem, **ask(path, "bypass", mode=wanted)} for path in paths]
    if as_json or output is Format.json:
        print_json(rows)
    else:
        print_table(("address", "bypass", "before"), [(row["address"], row["mode"], row["was"]) for row in rows])


def register(app: typer.Typer) -> None:
    app.command("bypass")(bypass)

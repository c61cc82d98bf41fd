"""`kvcache events`: what a running cache did last."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, the_one
from kvcache.settings.types import show_bytes

COLUMNS = ("time", "what", "tier", "blocks", "size", "namespace", "request", "why")


def events(
    address: Address = None,
    count: Annotated[int, typer.Option("--tail", "-n", min=0, help="How many of the last ones.")] = 40,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Runs of blocks that were stored, loaded, evicted, dropped or refused lately, the newest last."""
    from kvcache.daemon.client.control import ask

    found = ask(the_one(address), "events", count=count)["events"]
    if as_json or output is Format.json:
        print_json(found)
        return
    rows = [
        (
            datetime.fromtimestamp(event["time"]).astimezone().time().isoformat("milliseconds"),
            event["kind"],
            event["tier"],
            f"{event['blocks']:,}",
            show_bytes(event["bytes"]) if event["bytes"] else "",
            event["namespace"],
            event["request"],
            event["reason"],
        )
        for event in found
    ]
    print_table(COLUMNS, rows)


def register(app: typer.Typer) -> None:
    app.command("events")(events)

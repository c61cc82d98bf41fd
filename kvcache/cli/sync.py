"""`kvcache sync`: wait until what was stored is in each tier that it is meant for, and count what is not."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, the_one

ANSWER_S = 5.0
"""For the answer, beyond what it may wait for."""


def sync(
    address: Address = None,
    timeout_s: Annotated[float, typer.Option(min=0, max=60, help="Wait so long at most.")] = 60.0,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Wait until all that was stored before is in each tier that its write mode intends; exit 1 otherwise.

    Blocks that a tier refused earlier are offered again. A block that left host memory before a tier took it makes one
    sync fail, the next one."""
    from kvcache.daemon.client.control import ask

    told = ask(the_one(address), "flush", timeout_s=timeout_s + ANSWER_S, seconds=timeout_s)
    done, tiers = bool(told["flushed"]), told.get("tiers", {})
    if as_json or output is Format.json:
        print_json({"done": done, "tiers": tiers, "fault": told.get("fault", "")})
    else:
        rows = [
            (
                name,
                *(f"{tier[count]:,}" for count in ("reached", "refused", "waiting")),
                "" if tier["synced"] else "not durable",
            )
            for name, tier in tiers.items()
        ]
        if rows:
            print_table(("tier", "reached", "refused", "waiting", ""), rows)
        if told.get("fault"):
            print(told["fault"])
        print("all of it is there" if done else f"not all of it is there after at most {timeout_s:g} s")
    if not done:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command("sync")(sync)

"""`kvcache prune`: removes the namespaces that nobody used for long."""

from __future__ import annotations

from typing import Annotated

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, the_one
from kvcache.settings.types import parse_seconds, show_bytes


def prune(
    unused: Annotated[str, typer.Option("--unused", help="For how long nobody used them: 12h, 7d, 2w.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would go, and remove nothing.")] = False,
    address: Address = None,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Remove the namespaces of a running cache that nobody used for so long, from its own memory and drives.

    One of which no use is known counts from when the cache began. Tiers that others share are left alone."""
    from kvcache.daemon.client.control import ask

    try:
        seconds = parse_seconds(unused)
    except ValueError as error:
        raise typer.BadParameter(f"--unused {error}") from None
    done = ask(the_one(address), "prune", timeout_s=None, unused_s=seconds, dry_run=dry_run)
    if as_json or output is Format.json:
        print_json(done)
        return
    rows = [
        (row["id"][:8], row["model"] or "?", f"{row['records']:,}", show_bytes(row["bytes"])) for row in done["pruned"]
    ]
    print_table(("namespace", "model", "records", "bytes"), rows)
    if dry_run:
        print("\nnothing was removed: without --dry-run these go")


def register(app: typer.Typer) -> None:
    app.command("prune")(prune)

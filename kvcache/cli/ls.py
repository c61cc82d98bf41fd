"""`kvcache ls`: the namespaces of a running cache, what each has where, and when it was used last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from time import time
from typing import Annotated, Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, the_one
from kvcache.errors import NotFoundError
from kvcache.settings.types import show_bytes, show_seconds

Row = Mapping[str, Any]


def ls(
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant.")] = None,
    address: Address = None,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Name the namespaces of a running cache: bytes in each tier, tokens asked for and found, last use."""
    from kvcache.daemon.client.control import ask

    rows = ask(the_one(address), "namespaces", timeout_s=60.0)["namespaces"]
    found = [row for row in rows if tenant in (None, row["tenant"])]
    if tenant is not None and not found:
        tenants = [row["tenant"] for row in rows if row["tenant"]]
        raise NotFoundError.like(f"tenant {tenant!r:.80}: no namespace of it is bound here", tenant, tenants)
    if as_json or output is Format.json:
        print_json(found)
        return
    tiers = list(dict.fromkeys(tier for row in found for tier in row["tiers"]))
    columns = ("namespace", "model", "tenant", *tiers, "requests", "found", "last use")
    print_table(columns, list(_rows(found, tiers)))


def _rows(found: Sequence[Row], tiers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for row in found:
        asked, hits = row["asked_tokens"], sum(row["hit_tokens"].values())
        yield (
            row["id"][:8],
            "+".join(filter(None, (row["model"], row["adapter"]))) or "?",
            row["tenant"] or "?",
            *(_held(row["tiers"].get(tier)) for tier in tiers),
            f"{row['requests']:,}",
            f"{hits / asked:.1%}" if asked else "",
            used(row),
        )


def _held(held: Mapping[str, int] | None) -> str:
    """Bytes; records where a tier that others share does not tell what they take."""
    if held is None:
        return ""
    return show_bytes(held["bytes"]) if held["bytes"] else f"{held['records']:,} records"


def used(row: Row) -> str:
    if row["last"] is None:
        return f"before {show_seconds(time() - row['since'])}"
    return f"{show_seconds(time() - row['last'])} ago"


def register(app: typer.Typer) -> None:
    app.command("ls")(ls)

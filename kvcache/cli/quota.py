"""`kvcache quota`: what each tenant may take of each tier, beside what it takes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, the_one
from kvcache.units import show_bytes


def quota(address: Address = None, output: Output = Format.table, as_json: Json = False) -> None:
    """Tell the tenants of a running cache: what each has in each tier, how much it may have, what others leave it."""
    from kvcache.daemon.control.client import ask

    found = ask(the_one(address), "tenants", timeout_s=60.0)["tenants"]
    if as_json or output is Format.json:
        print_json(found)
    else:
        print_table(("tenant", "tier", "has", "quota", "full", "least share"), list(_rows(found)))


def _rows(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for row in found:
        for tier in dict.fromkeys((*row["tiers"], *row["quotas"], *row["least"])):
            has, most = row["tiers"].get(tier, {}).get("bytes", 0), row["quotas"].get(tier)
            least = row["least"].get(tier, 0)
            yield (
                row["tenant"] or "?",
                tier,
                show_bytes(has),
                "none" if most is None else show_bytes(most),
                f"{has / most:.0%}" if most else "",
                show_bytes(least) if least else "none",
            )


def register(app: typer.Typer) -> None:
    app.command("quota")(quota)

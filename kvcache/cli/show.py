"""`kvcache quota`: what each tenant may take of each tier, and ask for in a second, beside what it does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.cli.running import Address, the_one
from kvcache.errors import KVCacheError
from kvcache.settings.types import show_bytes


def quota(address: Address = None, output: Output = Format.table, as_json: Json = False) -> None:
    """Tell the tenants of a running cache: what each has in each tier, how much it may have, what others leave it; of a
    daemon with tenants, what each may ask for in a second as well."""
    from kvcache.daemon.client.control import ask

    path, rates = the_one(address), {}
    found = ask(path, "tenants", timeout_s=60.0)["tenants"]
    with suppress(KVCacheError):  # only a daemon knows
        rates = ask(path, "rates")["rates"]
    if as_json or output is Format.json:
        print_json([{**row, "rates": rates.get(row["tenant"])} for row in _with(found, rates)])
        return
    print_table(("tenant", "tier", "has", "quota", "full", "least share"), list(_rows(found)))
    if rates:
        print()
        print_table(("tenant", "bandwidth", "moved", "operations", "refused"), list(_rates(rates)))


def _with(found: Sequence[Mapping[str, Any]], rates: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Those that asked for nothing yet, too."""
    yield from found
    for tenant in rates.keys() - {row["tenant"] for row in found}:
        yield {"tenant": tenant, "tiers": {}, "quotas": {}, "least": {}}


def _rates(rates: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for tenant, rate in sorted(rates.items()):
        most, operations = rate["bandwidth"], rate["operations"]
        yield (
            tenant,
            "any" if most is None else f"{show_bytes(most)}/s",
            show_bytes(rate["moved_bytes"]),
            "any" if operations is None else f"{operations:,g}/s",
            f"{rate['refused']:,}",
        )


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

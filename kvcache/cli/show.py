"""`kvcache ls`, `check`, `events`, `ps` and `quota`: commands that show the state of running caches."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from time import time
from typing import Annotated, Any

import typer

from kvcache.cli.daemon import AddressOption, find_one_cache
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import KVCacheError, NotFoundError
from kvcache.settings.types import show_bytes, show_seconds

# `kvcache ls`: the namespaces of a running cache, with their bytes in each tier and last use.

NamespaceRow = Mapping[str, Any]


def ls(
    tenant: Annotated[str | None, typer.Option(help="Only namespaces of this tenant.")] = None,
    address: AddressOption = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of a running cache: bytes in each tier, requested and matched tokens, last use."""
    from kvcache.daemon.client.control import send_command

    rows = send_command(find_one_cache(address), "namespaces", timeout_s=60.0)["namespaces"]
    found = [row for row in rows if tenant in (None, row["tenant"])]
    if tenant is not None and not found:
        tenants = [row["tenant"] for row in rows if row["tenant"]]
        raise NotFoundError.like(f"tenant {tenant!r:.80}: found no bound namespace of this tenant", tenant, tenants)
    if as_json or output is OutputFormat.json:
        print_json(found)
        return
    tiers = list(dict.fromkeys(tier for row in found for tier in row["tiers"]))
    columns = ("namespace", "model", "tenant", *tiers, "requests", "found", "last use")
    print_table(columns, list(_namespace_rows(found, tiers)))


def _namespace_rows(found: Sequence[NamespaceRow], tiers: Sequence[str]) -> Iterator[tuple[str, ...]]:
    for row in found:
        requested, hits = row["asked_tokens"], sum(row["hit_tokens"].values())
        yield (
            row["id"][:8],
            "+".join(filter(None, (row["model"], row["adapter"]))) or "?",
            row["tenant"] or "?",
            *(_format_holding(row["tiers"].get(tier)) for tier in tiers),
            f"{row['requests']:,}",
            f"{hits / requested:.1%}" if requested else "",
            last_use(row),
        )


def _format_holding(held: Mapping[str, int] | None) -> str:
    """Return the bytes, or the number of records where a shared tier does not report bytes."""
    if held is None:
        return ""
    return show_bytes(held["bytes"]) if held["bytes"] else f"{held['records']:,} records"


def last_use(row: NamespaceRow) -> str:
    if row["last"] is None:
        return f"before {show_seconds(time() - row['since'])}"
    return f"{show_seconds(time() - row['last'])} ago"


# `kvcache check`: audits a running cache.


def check(
    address: AddressOption = None, output: OutputOption = OutputFormat.table, as_json: JsonOption = False
) -> None:
    """Audit a running cache and verify every record on its drives. Exit code 1 if there is a fault.

    The cache serves meanwhile. It stalls while its index is walked: about half a second for a million blocks, and a few
    seconds more while many blocks change. A large drive takes minutes.
    """
    from kvcache.daemon.client.control import send_command

    found = send_command(find_one_cache(address), "check", timeout_s=None)
    faults = found["faults"]
    if found["busy"]:
        print("kvcache: an audit is running; try again when it has ended", file=sys.stderr)
        raise typer.Exit(1)
    if as_json or output is OutputFormat.json:
        print_json(found)
    elif faults:
        print_table(("fault",), [(fault,) for fault in faults])
        if found["count"] > len(faults):
            print(f"and {found['count'] - len(faults):,} more")
    else:
        print("sound")
    if found["count"]:
        raise typer.Exit(1)


# `kvcache events`: the last events of a running cache.

EVENT_COLUMNS = ("time", "what", "tier", "blocks", "size", "namespace", "request", "why")


def events(
    address: AddressOption = None,
    count: Annotated[int, typer.Option("--tail", "-n", min=0, help="Number of recent events.")] = 40,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """List recent runs of blocks that were stored, loaded, evicted, dropped or refused, the newest last."""
    from kvcache.daemon.client.control import send_command

    found = send_command(find_one_cache(address), "events", count=count)["events"]
    if as_json or output is OutputFormat.json:
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
    print_table(EVENT_COLUMNS, rows)


# `kvcache ps`: the caches that run here.

PS_COLUMNS = ("address", "program", "up", "models", "host", "nvme", "bypass")


def ps(output: OutputOption = OutputFormat.table, as_json: JsonOption = False) -> None:
    """List the running caches of this user. Exit code 1 if one of them does not answer."""
    from kvcache.daemon.client.control import find_caches

    running = list(find_caches())
    if as_json or output is OutputFormat.json:
        print_json([{"address": f.address, "socket": str(f.path), **f.info, "fault": f.fault} for f in running])
    else:
        print_table(PS_COLUMNS, [_row(f.address, f.info, f.fault) for f in running])
    if any(found.fault for found in running):
        raise typer.Exit(1)


def _row(address: str, info: Mapping[str, Any], fault: str) -> tuple[str, ...]:
    if fault:
        return address, f"does not answer: {fault}"
    return (
        address,
        info["program"],
        show_seconds(time() - info["started"]),
        ", ".join(info["models"]),
        *(_used(info["tiers"].get(tier)) for tier in ("host", "nvme")),
        info["bypass"],
    )


def _used(tier: Mapping[str, int] | None) -> str:
    return f"{show_bytes(tier['used_bytes'])} of {show_bytes(tier['capacity_bytes'])}" if tier else ""


def quota(
    address: AddressOption = None, output: OutputOption = OutputFormat.table, as_json: JsonOption = False
) -> None:
    """Show the tenants of a running cache: bytes, quota and guaranteed share in each tier.

    For a daemon with a tenants file, also the rate limits.
    """
    from kvcache.daemon.client.control import send_command

    path, rates = find_one_cache(address), {}
    found = send_command(path, "tenants", timeout_s=60.0)["tenants"]
    with suppress(KVCacheError):  # only a daemon has rates
        rates = send_command(path, "rates")["rates"]
    if as_json or output is OutputFormat.json:
        print_json([{**row, "rates": rates.get(row["tenant"])} for row in _with_idle_tenants(found, rates)])
        return
    print_table(("tenant", "tier", "has", "quota", "full", "least share"), list(_quota_rows(found)))
    if rates:
        print()
        print_table(("tenant", "bandwidth", "moved", "operations", "refused"), list(_rate_rows(rates)))


def _with_idle_tenants(found: Sequence[Mapping[str, Any]], rates: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the tenants, with those that have made no request yet."""
    yield from found
    for tenant in rates.keys() - {row["tenant"] for row in found}:
        yield {"tenant": tenant, "tiers": {}, "quotas": {}, "least": {}}


def _rate_rows(rates: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    for tenant, rate in sorted(rates.items()):
        most, operations = rate["bandwidth"], rate["operations"]
        yield (
            tenant,
            "any" if most is None else f"{show_bytes(most)}/s",
            show_bytes(rate["moved_bytes"]),
            "any" if operations is None else f"{operations:,g}/s",
            f"{rate['refused']:,}",
        )


def _quota_rows(found: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
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
    app.command("ls")(ls)
    app.command("check")(check)
    app.command("events")(events)
    app.command("ps")(ps)
    app.command("quota")(quota)

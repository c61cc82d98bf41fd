"""`kvcache top`: shows a running cache live in a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvcache.cli.daemon import AddressOption, find_one_cache
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json
from kvcache.settings.types import show_bytes, show_seconds

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

Snapshot = Mapping[str, Any]
"""The answers of `SNAPSHOT_PARTS`, and the `time` of the answers."""
SNAPSHOT_PARTS = ("stats", "tenants", "agents", "prefixes", "events")
MAX_EVENTS, MAX_ROWS = 8, 6
TIER_STYLES = {"host": "blue", "nvme": "cyan", "redis": "yellow", "object": "magenta"}


def top(
    address: AddressOption = None,
    url: Annotated[str | None, typer.Option(help="Read a daemon's status page instead: http://HOST:PORT/.")] = None,
    token_file: Annotated[
        Path | None, typer.Option(help="A file with the token for that page. Default: the variable KVCACHE_TOKEN.")
    ] = None,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Watch a running cache: tiers, hit rate, miss reasons, prefixes, tenants, agents, events. Ctrl-C quits."""
    from rich.console import Console

    take_snapshot = _http_source(url, token_file) if url is not None else _socket_source(find_one_cache(address))
    if as_json or output is OutputFormat.json:
        print_json(take_snapshot())
        return
    if once:
        now = take_snapshot()
        Console().print(render(now, now))
        return
    _run_live(take_snapshot, every)


def _run_live(take_snapshot: Callable[[], Snapshot], every: float) -> None:
    from rich.live import Live

    before = now = take_snapshot()
    with Live(render(before, now), screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every)
                before, now = now, take_snapshot()
                live.update(render(before, now), refresh=True)
        except KeyboardInterrupt:
            return


def _socket_source(path: Path) -> Callable[[], Snapshot]:
    from kvcache.daemon.client.control import send_command

    def take_snapshot() -> Snapshot:
        now = time.time()
        parts = {part: send_command(path, part, count=MAX_EVENTS, timeout_s=60.0) for part in SNAPSHOT_PARTS}
        return {"time": now, **{part: reply if part == "stats" else reply[part] for part, reply in parts.items()}}

    return take_snapshot


def _http_source(url: str, token_file: Path | None) -> Callable[[], Snapshot]:
    from kvcache.daemon.client.control import fetch_json

    def take_snapshot() -> Snapshot:
        parts = {part: fetch_json(url, f"api/{part}?count={MAX_EVENTS}", token_file) for part in SNAPSHOT_PARTS}
        return {"time": parts["stats"]["time"], **{part: reply[part] for part, reply in parts.items()}}

    return take_snapshot


# Rendering


def render(before: Snapshot, now: Snapshot) -> RenderableType:
    """Render two snapshots; rates are between them."""
    from rich.console import Group
    from rich.text import Text

    stats = now["stats"]
    parts: list[RenderableType] = [_headline(before, now), _tiers(before, now)]
    outside = [path for path, on in stats.get("bypass", {}).items() if on]
    if outside:
        parts.insert(0, Text(f"bypassed: {', '.join(outside)}; `kvcache bypass off` restores the cache", "bold red"))
    parts += [table for table in (_misses(now), _prefixes(now), _tenants(now), _agents(now), _events(now)) if table]
    return Group(*parts)


def _headline(before: Snapshot, now: Snapshot) -> RenderableType:
    from rich.text import Text

    counters = now["stats"]["counters"]
    requested, hits = counters.get("asked_tokens", 0), sum(counters.get("hit_tokens", {}).values())
    lately = counter_delta(before, now, "asked_tokens")
    line = Text()
    line.append(f"hit rate {hits / requested:.1%}" if requested else "no requests yet", "bold")
    if lately > 0:
        line.append(f" ({counter_delta(before, now, 'hit_tokens') / lately:.1%} now)")
    line.append(f"   {hits:,} of {requested:,} tokens in {counters.get('requests', 0):,} requests")
    line.append(f"   loads {_rate(before, now, 'loaded_bytes')}, stores {_rate(before, now, 'stored_bytes')}")
    return line


def counter_delta(before: Snapshot, now: Snapshot, name: str, label: str | None = None) -> float:
    """Return the growth of a counter, of all its labels or of one; 0 where the cache was restarted in between."""

    def value(take_snapshot: Snapshot) -> float:
        found = take_snapshot["stats"]["counters"].get(name, 0)
        if isinstance(found, Mapping):
            return sum(found.values()) if label is None else found.get(label, 0)
        return float(found)

    return max(0.0, value(now) - value(before))


def _rate(before: Snapshot, now: Snapshot, name: str, label: str | None = None) -> str:
    seconds = now["time"] - before["time"]
    return f"{counter_delta(before, now, name, label) / seconds / 1e9 if seconds > 0 else 0:.3f} GB/s"


def _table(title: str, *columns: str) -> Table:
    """Return a table; columns that begin with `>` are numbers."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, expand=False)
    for column in columns:
        number = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if number else "left", no_wrap=number)
    return table


def _tiers(before: Snapshot, now: Snapshot) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    counters = now["stats"]["counters"]
    requested = counters.get("asked_tokens", 0)
    table = _table("", "tier", ">used", ">of", "full", ">hit rate", ">loads", ">records", ">held", ">pinned", "state")
    for name, tier in now["stats"]["tiers"].items():
        used, capacity = tier["used_bytes"], tier.get("capacity_bytes", 0)
        hits = counters.get("hit_tokens", {}).get(name, 0)
        style = TIER_STYLES.get(name, "white")
        table.add_row(
            Text(name, style),
            show_bytes(used),
            show_bytes(capacity) if capacity else "shared",
            ProgressBar(total=capacity, completed=used, width=14, complete_style=style, finished_style=style)
            if capacity
            else "",
            f"{hits / requested:.1%}" if requested else "",
            _rate(before, now, "loaded_bytes", name),
            f"{tier['records']:,}",
            show_bytes(tier.get("held_bytes", 0)),
            show_bytes(tier.get("pinned_bytes", 0)),
            Text("; ".join(tier.get("troubles", ())) or "well", "red" if tier.get("troubles") else ""),
        )
    return table


def _misses(now: Snapshot) -> Table | None:
    counters = now["stats"]["counters"]
    rows = sorted(counters.get("misses", {}).items(), key=lambda row: -row[1])[:MAX_ROWS]
    table = _table("misses", "reason", ">requests", ">tokens")
    for reason, times in rows:
        table.add_row(reason, f"{times:,.0f}", f"{counters.get('missed_tokens', {}).get(reason, 0):,.0f}")
    return table if rows else None


def _prefixes(now: Snapshot) -> Table | None:
    table = _table("top prefixes", "prefix", ">tokens", ">requests", ">found", "model", ">last")
    for row in now["prefixes"][:MAX_ROWS]:
        found = row["found_tokens"] / (row["tokens"] * row["requests"])
        last = f"{show_seconds(now['time'] - row['last'])} ago"
        table.add_row(
            row["prefix"], f"{row['tokens']:,}", f"{row['requests']:,}", f"{found:.1%}", row["model"] or "?", last
        )
    return table if now["prefixes"] else None


def _tenants(now: Snapshot) -> Table | None:
    names = list(dict.fromkeys(tier for row in now["tenants"] for tier in (*row["tiers"], *row["quotas"])))
    table = _table("tenants", "tenant", *(f">{name}" for name in names), ">asked", ">found")
    for row in now["tenants"][:MAX_ROWS]:
        held = (row["tiers"].get(name, {}).get("bytes", 0) for name in names)
        quotas = (f" of {show_bytes(row['quotas'][name])}" if name in row["quotas"] else "" for name in names)
        cells = (show_bytes(size) + quota for size, quota in zip(held, quotas, strict=True))
        table.add_row(row["tenant"] or "?", *cells, f"{row['asked_tokens']:,}", _hit_rate(row))
    return table if now["tenants"] else None


def _agents(now: Snapshot) -> Table | None:
    table = _table("agents", "agent", "tenant", ">requests", ">asked", ">found", ">last")
    for row in now["agents"][:MAX_ROWS]:
        last = f"{show_seconds(now['time'] - row['last'])} ago"
        table.add_row(
            row["agent"], row["tenant"], f"{row['requests']:,}", f"{row['asked_tokens']:,}", _hit_rate(row), last
        )
    return table if now["agents"] else None


def _hit_rate(row: Mapping[str, Any]) -> str:
    requested = row["asked_tokens"]
    return f"{sum(row['hit_tokens'].values()) / requested:.1%}" if requested else ""


def _events(now: Snapshot) -> Table | None:
    table = _table("events", ">ago", "what", "tier", ">blocks", ">size", "request", "why")
    for event in list(_newest(now["events"])):
        table.add_row(
            show_seconds(now["time"] - event["time"]),
            event["kind"],
            event["tier"],
            f"{event['blocks']:,}",
            show_bytes(event["bytes"]) if event["bytes"] else "",
            event["request"],
            event["reason"],
        )
    return table if now["events"] else None


def _newest(events: list[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    yield from reversed(events[-MAX_EVENTS:])


def register(app: typer.Typer) -> None:
    app.command("top")(top)

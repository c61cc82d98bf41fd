"""`kvcache stats` and `kvcache metrics`: the counters of a running cache with their reasons, and the list of
metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

import typer

from kvcache.cli.daemon import AddressOption, find_one_cache
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.settings.types import show_bytes

Stats = Mapping[str, Any]


class StatsFormat(str, Enum):
    table = "table"
    json = "json"
    prometheus = "prometheus"


def stats(
    address: AddressOption = None,
    output: Annotated[StatsFormat, typer.Option("--output", "-o", help="Output format.")] = StatsFormat.table,
    as_json: JsonOption = False,
    curve: Annotated[
        bool, typer.Option("--curve", help="Show the hit rates that other capacities would have.")
    ] = False,
    by: Annotated[GroupBy | None, typer.Option(help="With --curve: break the rates down by this label.")] = None,
) -> None:
    """Show tiers, tokens and miss reasons of one running cache since its start."""
    from kvcache.daemon.client.control import send_command

    if curve or by is not None:
        curve_data = send_command(find_one_cache(address), "curve")
        if as_json or output is StatsFormat.json:
            print_json(curve_data)
        else:
            _show_curve(curve_data, by)
        return
    found = send_command(find_one_cache(address), "stats")
    if as_json or output is StatsFormat.json:
        print_json(found)
    elif output is StatsFormat.prometheus:
        from kvcache.observe.exporter import exposition

        print(exposition(found), end="")
    else:
        _show(found)


class GroupBy(str, Enum):
    tenant = "tenant"
    agent = "agent"
    namespace = "namespace"


def _show_curve(curve_data: Stats, by: GroupBy | None) -> None:
    if not curve_data["tiers"]:
        print("no request was admitted and closed yet, or `evict.mrc_samples` is 0")
        return
    head = [f"{times:g} times" for times in curve_data["times"]]
    if by is None:
        rows = [
            (f"{name}, {show_bytes(tier['capacity_bytes'])}", *(f"{point['hit_rate']:.1%}" for point in tier["points"]))
            for name, tier in curve_data["tiers"].items()
        ]
        print_table(("share of requested tokens found, by capacity", *head), rows)
    else:
        rows = [
            (name, who or "-", f"{count['asked_tokens']:,}", *(f"{rate:.1%}" for rate in count["hit_rates"]))
            for name, tier in curve_data["tiers"].items()
            for who, count in sorted(tier["by"][by.value].items(), key=lambda item: -item[1]["asked_tokens"])
        ]
        print_table(("tier", by.value, "requested tokens", *head), rows)
    skipped = curve_data["skipped_requests"]
    print(
        f"\nfrom a sample of {curve_data['requests']:,} requests"
        + (f", of which {skipped:,} were skipped" * bool(skipped))
    )


def _show(found: Stats) -> None:
    print_table(("tier", "records", "used", "of", "held by requests"), _tiers(found))
    print()
    print_table(("tokens", "", ""), _tokens(found))
    reasons = list(_reasons(found))
    if reasons:
        print()
        print_table(("what", "why", "how often", "what it means"), reasons)
    outside = [path for path, bypassed in found["bypass"].items() if bypassed]
    if outside:
        print(f"\nbypassed: {', '.join(outside)}. `kvcache bypass off` restores the cache.")


def _tiers(found: Stats) -> Iterator[tuple[str, ...]]:
    for name, tier in found["tiers"].items():
        sizes = (show_bytes(tier[f"{what}_bytes"]) for what in ("used", "capacity", "held"))
        yield name, f"{tier['records']:,}", *sizes


def _tokens(found: Stats) -> Iterator[tuple[str, str, str]]:
    counters = found["counters"]
    requested = counters.get("asked_tokens", 0)
    yield "requested", f"{requested:,}", f"in {counters.get('requests', 0):,} requests"
    for tier, tokens in counters.get("hit_tokens", {}).items():
        yield f"found in {tier}", f"{tokens:,}", f"{tokens / requested:.1%}" if requested else ""


def _reasons(found: Stats) -> Iterator[tuple[str, str, str, str]]:
    from kvcache.observe.metrics import METRICS
    from kvcache.observe.reasons import REASONS, meaning

    for name, label in REASONS:
        metric = METRICS[name]
        if metric.kind != "counter":
            continue
        for joined, count in found["counters"].get(name, {}).items():
            labels = dict(zip(metric.labels, joined.split(","), strict=True))
            where = f" ({labels['tier']})" if "tier" in labels else ""
            yield name.replace("_", " ") + where, labels[label], f"{count:,}", meaning(name, label, labels[label])


# `kvcache metrics`: lists the metrics and the meaning of each.


def ls(output: OutputOption = OutputFormat.table, as_json: JsonOption = False) -> None:
    """List every metric with its description."""
    from kvcache.observe.metrics import METRICS

    if as_json or output is OutputFormat.json:
        print_json([asdict(metric) for metric in METRICS.values()])
        return
    rows = [(m.name, m.kind, ", ".join(m.labels), m.help) for m in METRICS.values()]
    print_table(("metric", "kind", "labels", "what it is"), rows)


def grafana() -> None:
    """Print a Grafana dashboard, generated from the table of metrics."""
    from kvcache.observe.dashboards import dashboard

    print_json(dashboard())


def alerts() -> None:
    """Print alert rules for Prometheus, generated from the table of metrics."""
    from kvcache.observe.dashboards import rules

    print(rules(), end="")


def register(app: typer.Typer) -> None:
    app.command("stats")(stats)
    group = typer.Typer(no_args_is_help=True, help="Print the cache's metrics.")
    group.command("ls")(ls)
    group.command("grafana")(grafana)
    group.command("alerts")(alerts)
    app.add_typer(group, name="metrics")

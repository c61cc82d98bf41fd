"""`kvcache metrics`: what a cache counts, and what each figure means."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table


def ls(output: Output = Format.table, as_json: Json = False) -> None:
    """Name every metric, and say what it is."""
    from kvcache.observe.metrics import METRICS

    if as_json or output is Format.json:
        print_json([asdict(metric) for metric in METRICS.values()])
        return
    rows = [(m.name, m.kind, ", ".join(m.labels), m.help) for m in METRICS.values()]
    print_table(("metric", "kind", "labels", "what it is"), rows)


def page() -> None:
    """Print docs/metrics.md, which is written from the tables of metrics and reasons."""
    from kvcache.observe.page import page as written

    print(written(), end="")


def grafana() -> None:
    """Print a dashboard for Grafana, which is written from the table of metrics."""
    from kvcache.observe.dashboards import dashboard

    print_json(dashboard())


def alerts() -> None:
    """Print rules for Prometheus by which it calls somebody, written from the same table."""
    from kvcache.observe.dashboards import rules

    print(rules(), end="")


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="What a cache counts.")
    group.command("ls")(ls)
    group.command("grafana")(grafana)
    group.command("alerts")(alerts)
    group.command("page", hidden=True)(page)
    app.add_typer(group, name="metrics")

"""`kvcache config`: the settings that hold here, each with its value and where it came from."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.units import show_bytes


class Output(str, Enum):
    table = "table"
    json = "json"


def show(
    settings: Annotated[Path | None, typer.Argument(help="A settings file (TOML); without one, defaults.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="How to print them.")] = Output.table,
) -> None:
    """Print every setting, its value, and where the value came from."""
    from kvcache.config import load
    from kvcache.settings import TABLE

    loaded = load(settings)
    if output is Output.json:
        rows = {name: {"value": _plain(loaded.value(name)), "origin": loaded.origin(name)} for name in TABLE}
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("setting", "value", "from", box=None, pad_edge=False)
    for name in TABLE:
        value = loaded.value(name)
        written = show_bytes(value) if name.endswith("_bytes") else str(_plain(value))
        table.add_row(name, Text(written, overflow="fold"), Text(loaded.origin(name), overflow="fold"))
    Console().print(table)


def page() -> None:
    """Print docs/configuration.md, which is written from the settings themselves."""
    from kvcache.cli.reference import page as written

    print(written(), end="")


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="The settings that hold here, and where each came from.")
    group.command("show")(show)
    group.command("page", hidden=True)(page)
    app.add_typer(group, name="config")

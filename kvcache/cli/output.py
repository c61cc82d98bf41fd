"""Output of subcommands: a table for people, JSON for programs. Every subcommand that prints has both options."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer


class OutputFormat(str, Enum):
    table = "table"
    json = "json"


OutputOption = Annotated[OutputFormat, typer.Option("--output", "-o", help="Output format.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Short for -o json.")]


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table. The caller formats numbers and sizes; every cell is printed unchanged."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(Text(cell, overflow="fold") for cell in row))
    Console().print(table)

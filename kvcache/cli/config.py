"""`kvcache config`: the settings that hold here, each with its value and where it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from kvcache.cli.output import Format, Json, Output, print_json, print_table
from kvcache.settings.types import show_bytes


def show(
    settings: Annotated[Path | None, typer.Argument(help="A settings file (TOML); without one, defaults.")] = None,
    output: Output = Format.table,
    as_json: Json = False,
) -> None:
    """Print every setting, its value, and where the value came from."""
    from kvcache.settings import TABLE
    from kvcache.settings.sources import load

    loaded = load(settings)
    if as_json or output is Format.json:
        rows = {name: {"value": _plain(loaded.value(name)), "origin": loaded.origin(name)} for name in TABLE}
        print_json(rows)
        return
    written = {
        name: show_bytes(loaded.value(name)) if name.endswith("_bytes") else str(_plain(loaded.value(name)))
        for name in TABLE
    }
    print_table(("setting", "value", "from"), [(name, text, loaded.origin(name)) for name, text in written.items()])


def page() -> None:
    """Print docs/configuration.md, which is written from the settings themselves."""
    from kvcache.cli.reference import page as written

    print(written(), end="")


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="The settings that hold here, and where each came from.")
    group.command("show")(show)
    group.command("page", hidden=True)(page)
    app.add_typer(group, name="config")

"""The command `kvcache`: collects the subcommands, and turns errors into one line and an exit code.

Each module of `MODULES` has `register(app)`. Heavy imports belong in a command's function, so that `kvcache --help` is
fast and works where an extra is missing. Exit codes: 0 done, 1 failed, 2 invalid request, 3 no answer from the cache.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

import kvcache
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption, print_json, print_table
from kvcache.errors import ClosedError, KVCacheError, NotFoundError, UnreachableError
from kvcache.settings.types import show_bytes

MODULES = (
    "daemon",
    "doctor",
    "explain",
    "lint",
    "manage",
    "nvme",
    "object",
    "serve",
    "show",
    "size",
    "stats",
    "top",
    "trace",
    "warm",
)
"""Modules of this package with `register(app)`; each adds one or more commands."""

EXTRAS: Mapping[str, str] = {
    "cupy": "cuda12",
    "gguf": "engine",
    "matplotlib": "demo",
    "cryptography": "encryption",
    "obstore": "object",
    "safetensors": "engine",
    "starlette": "daemon",
    "tokenizers": "engine",
    "torch": "engine",
    "uvicorn": "daemon",
}
"""Modules that a subcommand may find missing, and the extra that installs them."""


EXIT_CODES: Mapping[type[KVCacheError], int] = {ClosedError: 1, NotFoundError: 1, UnreachableError: 3}
"""Exit codes of errors that are not misuse."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvcache {kvcache.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A hierarchical KV cache for language-model serving."""


def build_app() -> typer.Typer:
    app = typer.Typer(name="kvcache", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    register(app)
    for name in MODULES:
        import_module(f"kvcache.cli.{name}").register(app)
    return app


def main() -> None:
    """Run the command and exit the process."""
    run(build_app)


def run(make: Callable[[], typer.Typer]) -> None:
    """Run the application that `make` returns and exit the process; only a defect shows a traceback."""
    try:
        make()()
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module not in EXTRAS:
            raise
        _exit(2, f"this needs {module}: pip install 'kvcache-tiers[{EXTRAS[module]}]'")
    except KVCacheError as error:
        _exit(EXIT_CODES.get(type(error), 2), str(error))
    except OSError as error:
        _exit(1, str(error))


def _exit(code: int, text: str) -> None:
    print(f"kvcache: {' '.join(text.split())}", file=sys.stderr)
    raise SystemExit(code)


# `kvcache config`: prints each setting with its value and its origin.


def show(
    settings: Annotated[
        Path | None, typer.Argument(help="A settings file (TOML). Default: the default settings.")
    ] = None,
    output: OutputOption = OutputFormat.table,
    as_json: JsonOption = False,
) -> None:
    """Print every setting, its value, and where the value came from."""
    from kvcache.settings import TABLE
    from kvcache.settings.sources import load

    loaded = load(settings)
    if as_json or output is OutputFormat.json:
        rows = {name: {"value": _plain(loaded.value(name)), "origin": loaded.origin(name)} for name in TABLE}
        print_json(rows)
        return
    written = {
        name: show_bytes(loaded.value(name)) if name.endswith("_bytes") else str(_plain(loaded.value(name)))
        for name in TABLE
    }
    print_table(("setting", "value", "from"), [(name, text, loaded.origin(name)) for name, text in written.items()])


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return str(value) if isinstance(value, Path) else value


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Show the effective settings and the source of each.")
    group.command("show")(show)
    app.add_typer(group, name="config")


if __name__ == "__main__":
    main()

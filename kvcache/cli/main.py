"""The command `kvcache`: gathers the subcommands, and turns what goes wrong into one line and an exit code.

A subcommand is a file here with `register(app)`. Its heavy imports belong in its function, so that `kvcache --help`
is quick and works where an extra is missing. Exit codes: 0 done, 1 failed, 2 asked for what makes no sense, 3 what was
asked does not answer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Annotated

import typer

import kvcache
from kvcache.errors import ClosedError, KVCacheError, NotFoundError, UnreachableError

SUBCOMMANDS = (
    "bypass",
    "check",
    "clear",
    "config",
    "daemon",
    "demo",
    "doctor",
    "events",
    "explain",
    "lint",
    "ls",
    "metrics",
    "nvme",
    "object",
    "pin",
    "prune",
    "ps",
    "quota",
    "replay",
    "serve",
    "simulate",
    "size",
    "stats",
    "sync",
    "token",
    "top",
    "warm",
)

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
"""What a subcommand may find missing, and the extra that brings it."""


CODES: Mapping[type[KVCacheError], int] = {ClosedError: 1, NotFoundError: 1, UnreachableError: 3}
"""Exit codes of errors that are no misuse."""


def _version(wanted: bool) -> None:
    if wanted:
        print(f"kvcache {kvcache.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """A hierarchical KV cache for language-model serving."""


def application() -> typer.Typer:
    app = typer.Typer(name="kvcache", no_args_is_help=True, pretty_exceptions_enable=False)
    app.callback()(_root)
    for name in SUBCOMMANDS:
        import_module(f"kvcache.cli.{name}").register(app)
    return app


def main() -> None:
    """Run the command and leave the process; a defect of ours is the only thing that shows a traceback."""
    try:
        application()()
    except ModuleNotFoundError as error:
        module = (error.name or "").split(".")[0]
        if module not in EXTRAS:
            raise
        _leave(2, f"this needs {module}: pip install 'kvcache-tiers[{EXTRAS[module]}]'")
    except KVCacheError as error:
        _leave(CODES.get(type(error), 2), str(error))
    except OSError as error:
        _leave(1, str(error))


def _leave(code: int, text: str) -> None:
    print(f"kvcache: {' '.join(text.split())}", file=sys.stderr)
    raise SystemExit(code)


if __name__ == "__main__":
    main()

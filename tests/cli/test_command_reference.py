"""The grammar of the command line, docs/cli.md, held against every command that there is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer

from kvcache.cli.main import build_app
from kvcache.cli.output import JsonOption, OutputFormat, OutputOption

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")

SILENT = {
    "daemon": "a server, which answers over its socket",
    "metrics alerts": "a file for Prometheus",
    "metrics grafana": "a file for Grafana",
    "serve": "a server, which answers over HTTP",
    "simulate": "a table to read; --json FILE keeps its rows",
}
"""Commands without -o and --json, with the reason."""

DESTROYS = {"clear", "delete", "drop", "evict", "flush", "prune", "remove", "rm"}
SCOPES = {"--address", "--all", "--model", "--namespace", "--older-than", "--path", "--tenant", "--tier"}


def commands(app: typer.Typer) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and noun with its words, hidden ones left out."""

    def walk(command: Any, words: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
        if words:
            yield words, command
        for name, inner in getattr(command, "commands", {}).items():
            if not inner.hidden:
                yield from walk(inner, (*words, name))

    yield from walk(typer.main.get_command(app), ())


def options(command: Any) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts if name.startswith("-")}


def faults(app: typer.Typer, verbs: set[str]) -> list[str]:
    """What breaks the grammar, one line each."""
    found = []
    for words, command in commands(app):
        name, noun = " ".join(words), bool(getattr(command, "commands", {}))
        if "list" in words:
            found.append(f"{name}: it is `ls`")
        if not all(re.fullmatch(r"[a-z]+(-[a-z]+)*", word) for word in words):
            found.append(f"{name}: words are small letters")
        if len(words) > 2:
            found.append(f"{name}: at most a noun and a verb")
        if len(words) == 2 and words[1] not in verbs:
            found.append(f"{name}: {words[1]} is no verb of the page")
        if not (command.help or "").strip():
            found.append(f"{name}: no help")
        if noun:
            continue
        found += [
            f"{name}: {p.name} has no help" for p in command.params if p.name != "help" and not p.hidden and not p.help
        ]
        if name not in SILENT and not {"-o", "--output", "--json"} <= options(command):
            found.append(f"{name}: prints, and lacks -o or --json")
        if DESTROYS & set(words) and not ("--dry-run" in options(command) and SCOPES & options(command)):
            found.append(f"{name}: destroys, and lacks --dry-run or a scope")
    return found


def page_rows(heading: str) -> list[str]:
    """The first cells of the table under a heading of the page, without their backquotes."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [cell for cell in re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE) if not cell.startswith("-")]


def test_every_command_keeps_to_the_grammar() -> None:
    verbs = set(page_rows("Verbs"))
    assert {"ls", "show", "check", "prune", "export"} <= verbs
    assert faults(build_app(), verbs) == []


def test_the_page_names_every_command_and_no_other() -> None:
    there = [" ".join(words) for words, command in commands(build_app()) if not getattr(command, "commands", {})]
    assert sorted(page_rows("Commands")) == sorted(there)
    assert set(SILENT) <= set(there)


def listing() -> None:
    """Print."""


def remove(output: OutputOption = OutputFormat.table, as_json: JsonOption = False) -> None:
    """Remove."""


def silent(
    depth: Annotated[int, typer.Option()] = 1, output: OutputOption = OutputFormat.table, as_json: JsonOption = False
) -> None:
    pass


@pytest.mark.parametrize(
    ("name", "call", "words"),
    [
        ("list", remove, "it is `ls`"),
        ("lsAll", remove, "small letters"),
        ("show", listing, "lacks -o or --json"),
        ("prune", remove, "lacks --dry-run or a scope"),
        ("fetch", remove, "no verb of the page"),
        ("show", silent, "no help"),
        ("show", silent, "depth has no help"),
    ],
)
def test_a_command_that_breaks_the_grammar_is_found(name: str, call: Any, words: str) -> None:
    noun, app = typer.Typer(help="A noun."), typer.Typer()
    noun.command(name)(call)
    noun.command("other")(remove)
    app.add_typer(noun, name="noun")
    app.command("top")(remove)
    assert any(words in fault for fault in faults(app, {"show", "list", "lsAll", "prune", "other"}))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_completion_works(shell: str) -> None:
    script = "import sys; sys.argv[0] = 'kvcache'; from kvcache.cli.main import main; main()"
    completed = {
        "bash": {"COMP_WORDS": "kvcache by", "COMP_CWORD": "1"},
        "zsh": {"_TYPER_COMPLETE_ARGS": "kvcache by"},
        "fish": {"_TYPER_COMPLETE_ARGS": "kvcache by", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
    }[shell]
    environ = {**os.environ, "_KVCACHE_COMPLETE": f"complete_{shell}", "PYTHONPATH": str(ROOT), **completed}
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=environ, check=False, timeout=60
    )
    assert "bypass" in done.stdout, done.stderr
    assert "stats" not in done.stdout

"""The page of figures, from the JSON that the benchmarks wrote: python benchmarks/report > docs/performance.md

Reads `benchmarks/results/*.json`; nothing is measured here, and nothing is left out.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[1]
SCRIPTS = {"vs_lmcache": "scripts/vs-lmcache", "gpu_copy": "benchmarks/gpu.sh"}

HEAD = """\
# Performance

Every table here was written from what a benchmark measured, with the command that makes it again. A *floor* is what the
hardware allowed at best, a *peer* what another program did, both measured in the same run as the value; a ratio above 1
is in our favour, whichever way the unit runs. The load average tells how busy the machine was: these were measured on
machines that others used too, and figures of one table compare with each other, not with those of another one.

This page is written by `python benchmarks/report > docs/performance.md`.
"""

COLUMNS = """\
| figure | value | unit | floor | of the floor | peer | times better |
| --- | ---: | --- | ---: | ---: | ---: | ---: |"""
FAULTS = "| fault | wanted | ours | LMCache |\n| --- | --- | --- | --- |"
Document = dict[str, Any]


def page(results: Path) -> str:
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob("*.json"))]
    lines = [HEAD, *(line for document in documents for line in _section(document)), *_behind(documents)]
    return "\n".join(lines).replace("\n\n\n", "\n\n")


def _section(document: Document) -> Iterator[str]:
    name = document["benchmark"]
    source = "lmcache_comparison/faults.py" if "faults" in document else f"{name}.py"
    about = ast.get_docstring(ast.parse((BENCHMARKS / source).read_text(encoding="utf-8"))) or ""
    lead, _, rest = about.partition("\n\n")
    yield f"## {name}\n\n{' '.join(lead.split())}\n\n`{_command(name)}`, {_circumstances(document)}.\n"
    if "faults" in document:
        yield f"{rest}\n\n{FAULTS}"
        yield from map(_fault, document["faults"])
    else:
        yield f"```text\n{rest}\n```\n\n{COLUMNS}"
        yield from map(_row, document["rows"])
    yield from ("", *(f"- {note}" for note in document.get("notes", ())), "")


def _behind(documents: list[Document]) -> Iterator[str]:
    rows = [row for document in documents for row in document.get("rows", ()) if (row["vs_peer"] or 1) < 1]
    yield f"## Where we lose\n\nAll rows above whose peer did better: {len(rows)}.\n\n{COLUMNS}"
    yield from map(_row, rows)
    yield ""


def _command(name: str) -> str:
    benchmark, *options = name.split()
    script = SCRIPTS.get(benchmark, f"scripts/bench {benchmark}")
    return " ".join([script, *options])


def _circumstances(document: Document) -> str:
    machine = document["machine"]
    packages = ", ".join(f"{package} {version}" for package, version in machine["packages"].items())
    return (
        f"{document['date'][:10]}, on {machine['cores']} cores of {machine['processor']}, "
        f"{machine['memory_bytes'] / (1 << 30):.0f} GiB, {machine['system']}, Python {machine['python']}, {packages}, "
        f"load average {machine['load_1m']}"
    )


def _row(row: dict[str, Any]) -> str:
    part = "" if row["ratio"] is None else f"{row['ratio']:.0%}"
    better = "" if row["vs_peer"] is None else f"{row['vs_peer']:.3g}"
    cells = (f"`{row['id']}`", _number(row["value"]), row["unit"], _number(row["floor"]), part, _number(row["peer"]))
    return f"| {' | '.join(cells)} | {better} |"


def _fault(fault: dict[str, Any]) -> str:
    note = f" ({fault['note']})" if fault["note"] else ""
    return f"| {fault['name']}{note} | {fault['wanted']} | {_answer(fault['ours'])} | {_answer(fault['theirs'])} |"


def _answer(answer: dict[str, Any]) -> str:
    if answer["failed"]:
        return str(answer["failed"])
    if answer["wrong"]:
        return f"**wrong** in {answer['wrong']:,} of {answer['hits']:,} hits"
    return f"{answer['hits']:,} of {answer['asked']:,} tokens right" if answer["hits"] else "a miss"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


if __name__ == "__main__":
    sys.stdout.write(page(BENCHMARKS / "results"))

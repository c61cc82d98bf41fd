"""The options that every benchmark takes, the table that it prints and the JSON that it writes.

    arguments = options(__doc__).parse_args()
    rows = [Row("copy/2MiB", 41.0, "us", floor=38.5, peer=60.2)]
    publish("copy", rows, arguments.json)

Writes `{"benchmark", "date", "machine", "notes", "rows"}`, a row as `{"id", "value", "unit", "floor", "peer", "ratio",
"vs_peer"}`. Row ids are stable: what is compared over time is found by them. A floor or a peer was measured in the same
run, in the same unit as the value; `ratio` is the part of the floor reached (1 = the floor) and `vs_peer` how many
times better than the peer, whichever way the unit runs. What does not apply is null.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from math import isfinite
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.table import Table

from harness.machine import facts

MORE_IS_BETTER = frozenset({"GB/s", "MB/s", "op/s", "tokens/s", "GFLOP/s", "%", "times"})
LESS_IS_BETTER = frozenset(
    {"s", "ms", "us", "ns", "B", "KiB", "MiB", "GiB", "% waste", "% error", "perplexity", "points", "ratio"}
)


class SupportsFlush(Protocol):
    """`kvcache.KVCache`, for a program that does not import it."""

    def flush(self, timeout_s: float | None = None) -> object: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure. `floor` is what the hardware would allow at best, `peer` what another did."""

    id: str
    value: float
    unit: str
    floor: float | None = None
    peer: float | None = None

    def __post_init__(self) -> None:
        if self.unit not in MORE_IS_BETTER | LESS_IS_BETTER:
            raise ValueError(f"{self.id}: unit {self.unit!r}: expected a unit of benchmarks/harness, or add it there")
        for name in ("value", "floor", "peer"):
            number = getattr(self, name)
            if number is not None and not (isfinite(number) and number >= 0):
                raise ValueError(f"{self.id}: {name} = {number}: expected a finite number, 0 or more")

    @property
    def ratio(self) -> float | None:
        return self._times_better(self.floor)

    @property
    def vs_peer(self) -> float | None:
        return self._times_better(self.peer)

    def _times_better(self, than: float | None) -> float | None:
        """How many times better the value is; below 1 where it is worse."""
        if than is None:
            return None
        above, below = (self.value, than) if self.unit in MORE_IS_BETTER else (than, self.value)
        return above / below if below else None

    def plain(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "value": self.value,
            "unit": self.unit,
            "floor": self.floor,
            "peer": self.peer,
            "ratio": self.ratio,
            "vs_peer": self.vs_peer,
        }


def flush(cache: SupportsFlush, timeout_s: float = 120.0) -> None:
    """Flush, and end the program if a block did not reach its tier: what is measured next would miss it."""
    report = cache.flush(timeout_s)
    if not report:
        raise SystemExit(f"nothing can be measured: not every block reached its tier: {report}")


def options(about: str | None) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes; a benchmark may add its own."""
    head = (about or "").partition("\n")[0]
    parser = argparse.ArgumentParser(description=head)
    parser.add_argument("--quick", action="store_true", help="end in less than 50 seconds, with fewer sizes and runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there as well")
    return parser


def publish(benchmark: str, rows: Sequence[Row], path: Path | None, *, notes: Sequence[str] = ()) -> None:
    """Print the rows, and what a reader must know beside them; write them to `path` where one is given."""
    console = Console(width=None if sys.stdout.isatty() else 160)  # else rich takes a file for a narrow terminal
    console.print(_table(benchmark, rows))
    for note in notes:
        console.print(f"  {note}", markup=False, highlight=False, soft_wrap=True)
    if path is not None:
        path.write_text(json.dumps(_document(benchmark, rows, notes), indent=1) + "\n")


def _document(benchmark: str, rows: Sequence[Row], notes: Sequence[str]) -> dict[str, Any]:
    ids = [row.id for row in rows]
    twice = {name for name in ids if ids.count(name) > 1}
    if twice:
        raise ValueError(f"row ids {sorted(twice)} more than once: a row is found by its id")
    return {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": facts(),
        "notes": list(notes),
        "rows": [row.plain() for row in rows],
    }


def _table(benchmark: str, rows: Sequence[Row]) -> Table:
    table = Table(title=benchmark, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column("row", no_wrap=True)
    for name in ("value", "unit", "floor", "of floor", "peer", "vs peer"):
        table.add_column(name, justify="left" if name == "unit" else "right", no_wrap=True)
    for row in rows:
        part = "" if row.ratio is None else f"{row.ratio:.0%}"
        better = "" if row.vs_peer is None else f"{row.vs_peer:.3g}"
        table.add_row(row.id, _number(row.value), row.unit, _number(row.floor), part, _number(row.peer), better)
    return table


def _number(value: float | None) -> str:
    """Four digits at most, thousands set apart."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"

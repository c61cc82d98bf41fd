"""How much of real traffic each policy finds again: the tables of docs/eviction.md.

    python benchmarks/eviction.py --write     plays every trace to every policy and writes the tables into the page

Needs the traces, which are not shipped (`--data`): Mooncake's two and the agentic sessions. Nothing is timed, so the
machine does not matter. The sessions of the agentic traces start by a seed; where memory is tight two more are played.

    eviction/conversation/5%/hazard   prefix hit rate in per cent
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from form import Row, options, publish

from kvcache.trace.formats import read
from kvcache.trace.simulate import POLICIES, simulate
from kvcache.trace.trace import Trace

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "eviction.md"
DATA = ROOT.parent / "shared" / "data" / "traces"
SEEDS = (0, 1, 2)

CHAT = (0.5, 1, 2, 5, 10, 20, 50)
AGENTS = (0.25, 0.5, 1, 2, 4)
GRID: Mapping[str, tuple[str, str, Sequence[float], Sequence[int | None]]] = {
    "conversation": ("mooncake-conversation", "mooncake", CHAT, (None,)),
    "synthetic": ("mooncake-synthetic", "mooncake", (1, 2, 5, 10, 20, 30, 50), (None,)),
    "agents, tools shared": ("agentic-sessions", "agentic-shared", AGENTS, SEEDS),
    "agents, ids local": ("agentic-sessions", "agentic", AGENTS[:3], SEEDS[1:2]),
}
Rates = dict[tuple[str, float, str], float]


def load(data: Path, file: str, form: str, seed: int | None) -> Trace:
    return read(data / f"{file}.jsonl.gz", form, **({} if seed is None else {"seed": seed}))


def play(data: Path, policies: Sequence[str], *, quick: bool = False) -> Rates:
    rates: Rates = {}
    for name, (file, form, sizes, seeds) in GRID.items():
        if quick and seeds != (None,):
            continue  # the agentic traces take minutes
        found: dict[tuple[float, str], list[float]] = {}
        for seed in seeds:
            trace = load(data, file, form, seed)
            more = seed != seeds[0]  # further seeds: what is compared, where memory is tight
            for size in sizes[:3] if more else sizes:
                for policy in ("hazard", "lru") if more else policies:
                    rate = simulate(trace, policy, max(1, round(size / 100 * trace.unique))).hit_rate
                    found.setdefault((size, policy), []).append(100 * rate)
                    print(f"{name}, seed {seed}, {size:g} %, {policy}: {100 * rate:.2f}", flush=True)
        rates |= {(name, *key): values[0] for key, values in found.items()}
        rates |= {
            (f"{name}, mean of {len(seeds)} seeds", *key): float(np.mean(v)) for key, v in found.items() if len(v) > 1
        }
    return rates


def tables(rates: Rates) -> str:
    """The best of all but opt in bold."""
    out = []
    for name in dict.fromkeys(name for name, _, _ in rates):
        sizes = list(dict.fromkeys(size for n, size, _ in rates if n == name))
        played = [policy for policy in POLICIES if (name, sizes[0], policy) in rates]
        out.append(f"| {name} | " + " | ".join(f"{size:g} %" for size in sizes) + " |")
        out.append("| --- |" + " ---: |" * len(sizes))
        best = [max(rates[name, size, p] for p in played if p != "opt") for size in sizes]
        for policy in played:
            cells = [rates[name, size, policy] for size in sizes]
            marked = (
                f"**{cell:.1f}**" if policy != "opt" and cell >= top - 0.05 else f"{cell:.1f}"
                for cell, top in zip(cells, best, strict=True)
            )
            out.append(f"| {policy} | " + " | ".join(marked) + " |")
        out.append("")
    short = shortfalls(rates)
    losses = sorted(((value, cell) for cell, value in short.items() if value >= 0.1), reverse=True)
    lost = ", ".join(f"{name} {size:g} % ({value:.1f})" for value, (name, size) in losses)
    mean, most = np.mean(list(short.values())), max(short.values())
    out.append(
        f"Over these {len(short)} traces and sizes hazard is {mean:.2f} points below the best of the others on average "
        f"(0 where it is not below) and {most:.2f} at most. It loses 0.1 points or more on: {lost or 'none'}."
    )
    return "\n".join(out)


def shortfalls(rates: Rates) -> dict[tuple[str, float], float]:
    """By trace and size, how far hazard is below the best of the others, opt apart; 0 where it is not."""
    others = [policy for policy in POLICIES if policy not in ("hazard", "opt")]
    cells = {(name, size) for name, size, policy in rates if policy == "opt"}
    return {
        cell: max(0.0, max(rates[(*cell, policy)] for policy in others) - rates[(*cell, "hazard")])
        for cell in sorted(cells)
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/eviction.md")
    arguments = parser.parse_args()
    rates = play(arguments.data, POLICIES, quick=arguments.quick)
    text = tables(rates)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        marks = r"(<!-- tables: benchmarks/eviction.py --write -->\n).*?(<!-- end of tables -->)"
        PAGE.write_text(re.sub(marks, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.DOTALL), encoding="utf-8")
    rows = [
        Row(f"eviction/{name.replace(', ', '-').replace(' ', '-')}/{size:g}%/{policy}", rate, "%")
        for (name, size, policy), rate in rates.items()
    ]
    publish("eviction", rows, arguments.json)


if __name__ == "__main__":
    main()

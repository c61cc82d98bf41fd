"""How much of real traffic each policy finds again: the tables of docs/eviction.md.

    python benchmarks/hit_rates.py --write     plays every trace to every policy and writes the tables into the page

Needs the traces, which are not shipped (`--data`): Mooncake's two, the agentic sessions, and a log of coding agents'
prompts, cut into tokens by SmolLM2's tokenizer. Hit rates are the longest prefix of each request that was there, over
all blocks asked for. The agents' sessions start by a seed; where memory is tight two more are played.

    eviction/conversation/5%/hazard   hit rate; floor: perfect foresight, peer: the best of the other policies
    eviction/below-best/mean, /most   points that hazard is below that best, over all traces and sizes
    eviction/speed/lru                block accesses a second and core, on the conversation trace at 2 %
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import classic_policies
import numpy as np
from harness import Row, options, publish

from kvcache import native
from kvcache.cli.explain import tokenizer_of
from kvcache.trace import simulate as cache_policies
from kvcache.trace.formats import Trace, read_trace

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "eviction.md"
DATA = ROOT.parent / "shared" / "data"
SEEDS = (0, 1, 2)
TIGHT = 3
"""Of the agents' sizes, how many are played with further seeds."""

AGENTS = (0.25, 0.5, 1, 2, 4)
GRID: Mapping[str, tuple[str, str, Sequence[float], Sequence[int]]] = {
    "conversation": ("traces/mooncake-conversation", "mooncake", (0.5, 1, 2, 5, 10, 20, 50), ()),
    "synthetic": ("traces/mooncake-synthetic", "mooncake", (1, 2, 5, 10, 20, 30, 50), ()),
    "agents, tools shared": ("traces/agentic-sessions", "agentic-shared", AGENTS, SEEDS),
    "agents, ids local": ("traces/agentic-sessions", "agentic", AGENTS, SEEDS),
    "coding agents, text": ("text/agent-sessions", "text", (2, 5, 10, 20), ()),
}
Rates = dict[tuple[str, float, str], float]
POLICIES = (*cache_policies.POLICIES[:-1], *classic_policies.CLASSICS, cache_policies.OPTIMAL)


def simulate(trace: Trace, policy: str, capacity: int) -> cache_policies.SimulationResult:
    made = classic_policies if policy in classic_policies.CLASSICS else cache_policies
    return made.simulate(trace, policy, capacity)


class Goal(NamedTuple):
    """`least`: points, or so many times what `times` finds."""

    trace: str
    size: float
    least: float
    times: str = ""


SHARED = f"agents, tools shared, mean of {len(SEEDS)} seeds"
GOALS = (
    *(Goal("conversation", size, least) for size, least in ((1, 10.3), (2, 14.7), (5, 22.3), (10, 28.8))),
    *(Goal("synthetic", size, least) for size, least in ((5, 15.6), (20, 41.3))),
    *(Goal(SHARED, size, least, "lru") for size, least in ((0.25, 1.65), (0.5, 1.08))),
)
LRU_AT_MOST, MEAN_AT_MOST, MOST_AT_MOST = 0.3, 0.15, 1.3
"""Points below LRU on agents at 1 %, and below the best of the others: on average, and anywhere."""


def load(data: Path, file: str, form: str, seed: int | None) -> Trace:
    more: dict[str, Any] = {} if seed is None else {"seed": seed}
    if form == "text":
        more = {"tokenize": tokenizer_of("smollm2").encode}
    return read_trace(data / f"{file}.jsonl.gz", form, **more)


class Kept:
    """What was found before, by the same code on the same traces: a run that was ended goes on where it was."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._rates: dict[str, float] = json.loads(path.read_text()) if path is not None and path.exists() else {}
        code = [*(ROOT / "kvcache" / "evict").glob("*.py"), *(ROOT / "kvcache" / "trace").glob("*.py")]
        core = [Path(native.core.__file__)] if native.available() else []
        self._code = self._digest(*sorted(code), *core)

    def rate(self, file: Path, seed: int | None, size: float, policy: str, found: Callable[[], float]) -> float:
        key = f"{self._code} {self._digest(file)} {seed} {size} {policy}"
        if key not in self._rates:
            self._rates[key] = found()
            if self._path is not None:
                self._path.write_text(json.dumps(self._rates))
        return self._rates[key]

    @staticmethod
    @cache
    def _digest(*files: Path) -> str:
        return sha256(b"".join(sha256(file.read_bytes()).digest() for file in files)).hexdigest()


def play(data: Path, policies: Sequence[str], kept: Kept, *, quick: bool = False) -> Rates:
    rates: Rates = {}
    for name, (file, form, sizes, seeds) in GRID.items():
        if quick and seeds:
            continue  # the agents' take minutes
        found: dict[tuple[float, str], list[float]] = {}
        for number, seed in enumerate(seeds or (None,)):
            trace = cache(partial(load, data, file, form, seed))  # read where something is not known yet
            for size in sizes[:TIGHT] if number else sizes:
                for policy in policies:

                    def found_now(
                        policy: str = policy, size: float = size, trace: Callable[[], Trace] = trace
                    ) -> float:
                        return simulate(trace(), policy, max(1, round(size / 100 * trace().unique))).hit_rate

                    rate = kept.rate(data / f"{file}.jsonl.gz", seed, size, f"{form} {policy}", found_now)
                    found.setdefault((size, policy), []).append(100 * rate)
                    print(f"{name}, seed {seed}, {size:g} %, {policy}: {100 * rate:.2f}", flush=True)
        rates |= {(name, *key): values[0] for key, values in found.items()}
        mean = f"{name}, mean of {len(seeds)} seeds"
        rates |= {(mean, *key): float(np.mean(values)) for key, values in found.items() if len(values) > 1}
    return rates


def cells(rates: Rates) -> list[tuple[str, float]]:
    """By trace and size, each once: a mean over seeds stands for the first seed, too."""
    every = list(dict.fromkeys((name, size) for name, size, _ in rates))
    meant = {(name.partition(", mean of")[0], size) for name, size in every if ", mean of" in name}
    return [cell for cell in every if cell not in meant]


def best(rates: Rates, name: str, size: float) -> float:
    """Of the others, foresight apart."""
    return max(rates[name, size, policy] for policy in POLICIES if policy not in ("hazard", "opt"))


def below_best(rates: Rates) -> dict[tuple[str, float], float]:
    """By trace and size, how far hazard is below the best of the others; 0 where it is not."""
    return {cell: max(0.0, best(rates, *cell) - rates[(*cell, "hazard")]) for cell in cells(rates)}


def tables(rates: Rates) -> str:
    """The best of all but opt in bold; what was asked for, and whether it is met."""
    out = []
    for name in dict.fromkeys(name for name, _, _ in rates):
        sizes = list(dict.fromkeys(size for n, size, _ in rates if n == name))
        out.append(f"| {name} | " + " | ".join(f"{size:g} %" for size in sizes) + " |")
        out.append("| --- |" + " ---: |" * len(sizes))
        tops = [max(rates[name, size, policy] for policy in POLICIES if policy != "opt") for size in sizes]
        for policy in POLICIES:
            marked = (
                f"**{rate:.1f}**" if policy != "opt" and rate >= top - 0.05 else f"{rate:.1f}"
                for rate, top in zip((rates[name, size, policy] for size in sizes), tops, strict=True)
            )
            out.append(f"| {policy} | " + " | ".join(marked) + " |")
        out.append("")
    short = below_best(rates)
    losses = sorted(((value, cell) for cell, value in short.items() if value >= 0.1), reverse=True)
    lost = ", ".join(f"{name} {size:g} % ({value:.1f})" for value, (name, size) in losses)
    out.append(f"Where hazard is 0.1 points or more below the best of the others: {lost or 'nowhere'}.\n")
    out += ["| asked for | least | found | |", "| --- | ---: | ---: | --- |"]
    out += [
        f"| {what} | {asked} | {found} | {'met' if met else '**not met**'} |"
        for what, asked, found, met in _goals(rates)
    ]
    return "\n".join(out)


def _goals(rates: Rates) -> Iterator[tuple[str, str, str, bool]]:
    for goal in GOALS:
        found = rates.get((goal.trace, goal.size, "hazard"))
        if found is None:
            continue
        what = f"{goal.trace}, {goal.size:g} %"
        if goal.times:
            ratio = found / rates[goal.trace, goal.size, goal.times]
            yield f"{what}: times {goal.times}", f"{goal.least:g}", f"{ratio:.2f}", ratio >= goal.least
        else:
            yield what, f"{goal.least:g}", f"{found:.2f}", found >= goal.least
    if (SHARED, 1, "lru") in rates:
        below = rates[SHARED, 1, "lru"] - rates[SHARED, 1, "hazard"]
        yield f"{SHARED}, 1 %: points below lru", f"at most {LRU_AT_MOST}", f"{below:.2f}", below <= LRU_AT_MOST
    short = list(below_best(rates).values())
    mean, most = float(np.mean(short)), max(short)
    of = f"points below the best of the others, over {len(short)} traces and sizes"
    yield f"{of}: mean", f"at most {MEAN_AT_MOST}", f"{mean:.2f}", mean <= MEAN_AT_MOST
    yield f"{of}: most", f"at most {MOST_AT_MOST}", f"{most:.2f}", most <= MOST_AT_MOST


def speed(data: Path) -> Iterator[Row]:
    file, form, _, _ = GRID["conversation"]
    trace = load(data, file, form, None)
    for policy in POLICIES:
        seconds = []
        for _ in range(3):
            begun = time.process_time()
            simulate(trace, policy, trace.unique // 50)
            seconds.append(time.process_time() - begun)
        yield Row(f"eviction/speed/{policy}", trace.accesses / min(seconds), "op/s")


def rows(rates: Rates) -> Iterator[Row]:
    for name, size in dict.fromkeys((name, size) for name, size, _ in rates):
        label = name.replace(", ", "-").replace(" ", "-")
        opt, peer = rates[name, size, "opt"], best(rates, name, size)
        yield Row(f"eviction/{label}/{size:g}%/hazard", rates[name, size, "hazard"], "%", floor=opt, peer=peer)
    short = list(below_best(rates).values())
    yield Row("eviction/below-best/mean", float(np.mean(short)), "points")
    yield Row("eviction/below-best/most", max(short), "points")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", action="store_true", help="write the tables into docs/eviction.md")
    parser.add_argument(
        "--kept", type=Path, metavar="FILE", help="go on from what a run before found, by the same code"
    )
    arguments = parser.parse_args()
    rates = play(arguments.data, POLICIES, Kept(arguments.kept), quick=arguments.quick)
    text = tables(rates)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        marks = r"(<!-- tables: benchmarks/hit_rates.py --write -->\n).*?(<!-- end of tables -->)"
        PAGE.write_text(re.sub(marks, lambda m: f"{m[1]}\n{text}\n\n{m[2]}", page, flags=re.DOTALL), encoding="utf-8")
    else:
        print(text)
    publish("hit_rates", [*rows(rates), *speed(arguments.data)], arguments.json)


if __name__ == "__main__":
    main()

"""The prior that `hazard` begins with, from traces; and what it is worth from the first request on.

    python benchmarks/hazard_prior.py --write      makes kvcache/evict/prior.json, and the table in docs/eviction.md
    python benchmarks/hazard_prior.py              the table alone

Made from the halves that docs/eviction.md tunes on: of each the blocks' uses again and waits, with room for all of
them, by class and age; each trace weighs the same, and within a class the chance of a use never grows with age. The
table is of the other halves: by trace and size, how much more hazard had found than lru after 1, 5, 10, 25 and 100 % of
the requests, in points of what was asked for until then, and the most that it was ever behind, in points of all that
was asked for in the end.

    prior/conversation/1%/behind      the most that hazard was ever behind lru, in points of all that was asked for
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from harness import Row, options, publish
from hit_rates import DATA, PAGE, load
from numpy.typing import NDArray

from kvcache.evict.hazard import PRIOR_FILE, Hazard
from kvcache.evict.policy import AGE_EDGES, Evidence
from kvcache.trace.formats import Trace
from kvcache.trace.simulate import evidence, simulate

Counts = NDArray[np.float64]

MARKS = (1, 5, 10, 25, 100)
"""Per cent of the requests."""
CHAT = (0.5, 1, 2, 5, 10, 20, 30)
AGENTS = (0.25, 0.5, 1, 2)
SIZES = {
    "conversation": CHAT,
    "synthetic": CHAT,
    "agents, tools shared": AGENTS,
    "agents, ids local": AGENTS,
    "coding agents, text": (2, 5, 10, 20),
}


class Watching(Hazard):
    """Where there is room for all, no block has to be weighed."""

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        return np.ones(evidence.reused.shape)


def tuned_on(data: Path) -> Iterator[Trace]:
    for file in ("conversation", "synthetic"):
        trace = load(data, f"traces/mooncake-{file}", "mooncake", None)
        yield trace.part(0, len(trace) // 2)
    yield _sessions(data, 0, seed=0)


def reported_on(data: Path, *, quick: bool = False) -> Iterator[tuple[str, Trace]]:
    for file in ("conversation", "synthetic"):
        trace = load(data, f"traces/mooncake-{file}", "mooncake", None)
        yield file, trace.part(len(trace) // 2, len(trace))
    if not quick:
        yield "agents, tools shared", _sessions(data, 1, seed=1)
        yield "agents, ids local", load(data, "traces/agentic-sessions", "agentic", 1)
    trace = load(data, "text/agent-sessions", "text", None)
    yield "coding agents, text", trace.part(len(trace) // 2, len(trace))


def _sessions(data: Path, first: int, *, seed: int) -> Trace:
    """Those on every other line of the file."""
    lines = gzip.decompress((data / "traces/agentic-sessions.jsonl.gz").read_bytes()).splitlines(keepends=True)
    with TemporaryDirectory() as place:
        (Path(place) / "half.jsonl.gz").write_bytes(gzip.compress(b"".join(lines[first::2]), 1))
        return load(Path(place), "half", "agentic-shared", seed)


def made(data: Path) -> str:
    """The file: counts in millionths of all blocks, of each class up to its last bin with any."""
    policy = Watching()
    reused = unseen = np.zeros(())
    for trace in tuned_on(data):
        seen = evidence(trace, policy, trace.unique)
        waits = seen.waiting + seen.forgotten
        whole = int(seen.reused.sum() + waits.sum())
        reused, unseen = reused + seen.reused / whole, unseen + waits / whole
    risk = (reused + unseen)[:, ::-1].cumsum(1)[:, ::-1] - unseen / 2
    scale = 1e6 / float(risk[:, 0].sum())
    told = {
        "bounds": policy.bounds,
        "gaps": policy.gaps,
        "edges": AGE_EDGES,
        "reused": _rows(scale * np.array([never_growing(*row) for row in zip(reused, risk, strict=True)])),
        "risk": _rows(scale * risk),
    }
    return written(told)


def written(told: Mapping[str, Sequence[object]]) -> str:
    """As JSON, one row a line."""
    lists = []
    for name, value in told.items():
        nested = isinstance(value[0], list)
        rows = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]" if nested else json.dumps(value)
        lists.append(f'"{name}": {rows}')
    return "{\n" + ",\n".join(lists) + "\n}\n"


def never_growing(reused: Counts, risk: Counts) -> Counts:
    """Uses again as they would be nearest to these, had the chance for each request not grown with age: neighbouring
    bins where it did are made one."""
    widths = np.diff(AGE_EDGES, append=2 * AGE_EDGES[-1])
    pools: list[tuple[float, float, int]] = []  # uses, requests that blocks waited, bins
    for uses, waited in zip(reused, risk * widths, strict=True):
        pools.append((uses, waited, 1))
        while len(pools) > 1 and pools[-2][0] * pools[-1][1] <= pools[-1][0] * pools[-2][1]:
            last, before = pools.pop(), pools.pop()
            pools.append((before[0] + last[0], before[1] + last[1], before[2] + last[2]))
    rates = np.concatenate([[uses / waited if waited else 0.0] * bins for uses, waited, bins in pools])
    return rates * risk * widths


def _rows(counts: Counts) -> list[list[int]]:
    return [np.trim_zeros(row, "b").tolist() for row in np.rint(counts).astype(int)]


def ahead(trace: Trace, capacity: int) -> tuple[list[float], float]:
    """At each mark, how many points more hazard has found than lru; and the most that it was ever behind."""
    found = [np.cumsum(simulate(trace, policy, capacity).hits, dtype=np.int64) for policy in ("hazard", "lru")]
    asked, more = trace.starts[1:], found[0] - found[1]
    ends = [max(1, round(mark / 100 * len(trace))) - 1 for mark in MARKS]
    return [100 * float(more[end] / asked[end]) for end in ends], 100 * max(0.0, -float(more.min() / asked[-1]))


Found = dict[tuple[str, float], tuple[list[float], float]]


def play(data: Path, *, quick: bool = False, say: Callable[[str], None] = print) -> Found:
    found: Found = {}
    for name, trace in reported_on(data, quick=quick):
        for size in SIZES[name]:
            found[name, size] = ahead(trace, max(1, round(size / 100 * trace.unique)))
            say(f"{name}, {size:g} %: " + " ".join(f"{points:+.2f}" for points in found[name, size][0]))
    return found


def table(found: Found) -> str:
    out = [
        "| hazard against lru after | " + " | ".join(f"{mark} %" for mark in MARKS) + " | ever behind, of all |",
        "| --- |" + " ---: |" * (len(MARKS) + 1),
    ]
    for (name, size), (points, behind) in found.items():
        out.append(f"| {name}, {size:g} % | " + " | ".join(f"{p:+.2f}" for p in points) + f" | {behind:.2f} |")
    return "\n".join(out)


def rows(found: Found) -> Iterator[Row]:
    for (name, size), (_, behind) in found.items():
        yield Row(f"prior/{name.replace(', ', '-').replace(' ', '-')}/{size:g}%/behind", behind, "points")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--write", action="store_true", help="make the data, and write the table into docs/eviction.md")
    arguments = parser.parse_args()
    if arguments.write:
        PRIOR_FILE.write_text(made(arguments.data), encoding="utf-8")
    found = play(arguments.data, quick=arguments.quick)
    if arguments.write:
        page = PAGE.read_text(encoding="utf-8")
        marks = r"(<!-- table: benchmarks/hazard_prior.py --write -->\n).*?(<!-- end of the prior's table -->)"
        PAGE.write_text(
            re.sub(marks, lambda m: f"{m[1]}\n{table(found)}\n\n{m[2]}", page, flags=re.DOTALL), encoding="utf-8"
        )
    else:
        print(table(found))
    publish("hazard_prior", list(rows(found)), arguments.json)


if __name__ == "__main__":
    main()

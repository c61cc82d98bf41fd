"""The same work done by LMCache and by this library, in turns, on the same number of threads.

`scripts/vs-lmcache` makes LMCache's environment and runs this. Each side is a process of its own; each figure is the
median of rounds in which either side goes first as often. The value is ours, the peer LMCache's:

    match/tensor, match/list     the longest prefix of 131,072 tokens, all there, from a tensor of int64, from a list;
                                 ours in blocks of 16 tokens, LMCache's in its chunks of 256
    match/hold                   the same of a list, and kept from leaving: admit and close, pin and unpin
    evict, evict/256_tokens      one record out of a full host tier; as many as make room for 256 tokens
    host/store, host/retrieve    Llama-3-8B's keys and values between scattered pages and a full host tier
    disk/store/direct            until it is durable; LMCache's O_DIRECT path, until it can be found: it never syncs
    disk/store/direct/synced     the same, LMCache's files synced by us
    disk/retrieve/direct         a prompt that has left memory, checksums included; LMCache has none
    disk/*/buffered              ours as it is; LMCache's path through the page cache, which is emptied before reads
    redis/store, redis/retrieve  to a server on loopback until it is there, and back after it left memory
    redis/contains               until a process that has just begun knows that 131,072 tokens are there
    redis/*/native               beside LMCache's client in C++ instead of its redis://, which loses answers and then
                                 waits for ever: a lock of ours keeps it from that
    bytes_a_token/*              beside keys and values; LMCache's in-process engine, and its multiprocess server

LMCache copies by what it brings for processors, which says nothing of its CUDA kernels. --faults does the same faults
to both instead, and reports wrong answers.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import datetime, timezone
from pathlib import Path

from harness import Row, options, publish
from harness.machine import facts
from lmcache_comparison.faults import Fault, Start, faults
from lmcache_comparison.measurements import (
    STRUCTURES,
    Alternation,
    Measurement,
    Sizes,
    WrongResult,
    measure_disk,
    measure_host,
    measure_match,
    measure_memory,
    measure_redis,
    measure_redis_lookup,
)
from lmcache_comparison.worker_process import WorkerLostError, WorkerProcess
from rich.console import Console
from rich.table import Table

from kvcache.machine import cache_directory
from tests.peer.redis_server import MISSING, RedisServer

PEER = Path(__file__).parents[1] / ".venv-lmcache" / "bin" / "python"
QUICK = Sizes(tokens=1024, rounds=5, records=1 << 13)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--faults", action="store_true", help="the same faults to both, instead of figures")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of each side; default: all")
    parser.add_argument("--peer", metavar="COMMAND", help="what starts the other side")
    arguments = parser.parse_args()
    if not arguments.peer and not PEER.exists():
        raise SystemExit(f"no LMCache at {PEER}: scripts/vs-lmcache installs it and runs this")
    commands = {
        "ours": [sys.executable, "-m", "lmcache_comparison.kvcache_worker"],
        "theirs": shlex.split(arguments.peer or f"{shlex.quote(str(PEER))} -m lmcache_comparison.lmcache_worker"),
    }
    before = load()
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="lmcache-comparison-", dir=cache_directory()) as made:
        place = Path(made)

        def start(name: str, words: Sequence[str] = ()) -> WorkerProcess:
            command, timeout_s = [*words, *commands[name]], 30.0 if arguments.faults else 180.0
            return WorkerProcess(command, place / f"{name}.log", threads=arguments.threads, timeout_s=timeout_s)

        if arguments.faults:
            show(list(faults(start, place)), arguments.json)
        else:
            rows, notes = measure(start, place, QUICK if arguments.quick else Sizes())
            notes.append(f"{arguments.threads} threads a side, load average {before} before and {load()} after")
            publish("vs_lmcache", rows, arguments.json, notes=notes)


def load() -> str:
    return f"{os.getloadavg()[0]:.1f}"


def measure(start: Start, place: Path, sizes: Sizes) -> tuple[list[Row], list[str]]:
    """The rows, and what a reader must know beside them."""
    with ExitStack() as stack:

        def fresh(name: str) -> WorkerProcess:
            return stack.enter_context(start(name, ()))

        turns = Alternation(fresh("ours"), fresh("theirs"))
        notes = [
            f"{' and '.join(turns.ask('name'))}: medians of {sizes.rounds} rounds, prompts of {sizes.tokens} tokens"
        ]
        parts = {
            "keys": lambda: measure_match(turns, sizes),
            "host memory": lambda: measure_host(turns, sizes),
            "the drive": lambda: measure_disk(turns, sizes, place),
            "Redis": lambda: shared(fresh, sizes, notes),
            "bytes": lambda: measure_memory(fresh("ours"), {name: fresh("theirs") for name in STRUCTURES}, sizes),
        }
        figures: list[Measurement] = []
        for name, part in parts.items():
            begun = time.monotonic()
            figures += part()
            print(f"{name}: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    rows = [figure.row for figure in figures]
    behind = [row.id for row in rows if (row.vs_peer or 0) < 1]
    notes.append(f"LMCache is ahead in {', '.join(behind)}" if behind else "LMCache is ahead in no row")
    notes.append("of the best rounds: " + ", ".join(f"{f.id} {f.best.vs_peer:.3g}" for f in figures))
    return rows, notes


def shared(fresh: Callable[[str], WorkerProcess], sizes: Sizes, notes: list[str]) -> Iterator[Measurement]:
    """Through a server of its own for each; processes as well, since LMCache's engine does not end with a server.
    A side that does not answer, or an LMCache that has less than was stored, costs the rows that it was asked for, no
    others."""
    if MISSING:
        print(f"no rows of Redis: {MISSING}", file=sys.stderr)
        return
    for native in (False, True):
        for measured in (measure_redis, measure_redis_lookup):
            server = RedisServer()
            try:
                yield from measured(Alternation(fresh("ours"), fresh("theirs")), sizes, server.tcp, native=native)
            except WorkerLostError as lost:
                notes.append(f"{measured.__name__}, {'native' if native else 'redis://'}: not measured, {lost.what}")
            except WrongResult as wrong:
                if not str(wrong).startswith("theirs"):
                    raise
                notes.append(f"{measured.__name__}, {'native' if native else 'redis://'}: not measured, {wrong}")
            finally:
                server.end()


def show(found: Sequence[Fault], path: Path | None) -> None:
    table = Table("fault", "wanted", "ours", "LMCache", "", box=None, pad_edge=False, title_justify="left")
    for fault in found:
        table.add_row(fault.name, fault.wanted, str(fault.ours), str(fault.theirs), fault.note)
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    if path is not None:
        date = datetime.now(timezone.utc).isoformat(timespec="seconds")
        document = {
            "benchmark": "vs_lmcache --faults",
            "date": date,
            "machine": facts(),
            "faults": [f.plain() for f in found],
        }
        path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()

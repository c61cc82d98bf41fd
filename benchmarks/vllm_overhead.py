"""What a cache costs a real vLLM that finds nothing in it: saturated, no prompt twice, connector on and off in turns.

    overhead/throughput     tokens a second with it, as a part of without: 1 = free
    overhead/tpot_p99       99th percentile of the time between a request's tokens, times that without: 1 = free

Each way is the better of some runs in turns, each in a process of its own. One thread, bf16, blocks of 32 tokens.
--peer puts overhead/lmcache/..., overhead/native/... beside it, or says why that does not run here. --url WITH WITHOUT
asks two servers that run already, one with the connector and one without.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from harness import Row, options, publish
from vllm_runner import engine
from vllm_runner.server import Server

Best = dict[str, tuple[float, float]]  # by whose it is: tokens a second, seconds between tokens


def in_turns(ways: dict[str, Any], job: dict[str, Any], turns: int, requests: int) -> tuple[Best, list[str]]:
    """Each way by its connector. Why those that did not run did not."""
    best: Best = {}
    notes: list[str] = []
    for turn in range(turns):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            warm = [engine.prompt(200, 90_000 + i) for i in range(2)]
            prompts = [engine.prompt(300, 1000 * turn + i) for i in range(requests)]
            with tempfile.TemporaryDirectory(dir=os.environ.get("KVCACHE_DIR")) as place:
                connector = engine.ours(Path(place)) if name == "on" else ways[name]
                steps = [["load", warm, 8], ["load", prompts, 48]]
                try:
                    rate, gap = engine.run({**job, "connector": connector, "steps": steps})[2]
                except engine.VllmExitedError as ended:
                    if name in {"on", "off"}:
                        raise
                    notes.append(f"{name} does not run here: {ended.why}")
                    del ways[name]
                    continue
            before = best.get(name, (0.0, float("inf")))
            best[name] = max(rate, before[0]), min(gap, before[1])
    return best, notes


def of_servers(urls: list[str], turns: int, requests: int) -> Best:
    servers = dict(zip(("on", "off"), map(Server, urls), strict=True))
    for server in servers.values():
        server.saturate([engine.prompt(200, os.getpid() - 1 - i) for i in range(2)], 8)  # a server's first is slower
    best: Best = {}
    for turn in range(turns):
        for name in ("on", "off")[:: 1 if turn % 2 else -1]:
            prompts = [engine.prompt(300, os.getpid() + 1000 * turn + i) for i in range(requests)]
            rate, gap = servers[name].saturate(prompts, 48)
            before = best.get(name, (0.0, float("inf")))
            best[name] = max(rate, before[0]), min(gap, before[1])
    return best


def rows(best: Best) -> list[Row]:
    off_rate, off_gap = best["off"]
    found = []
    for name, (rate, gap) in best.items():
        prefix = "overhead" if name == "on" else f"overhead/{name}"
        if name != "off":
            found += [
                Row(f"{prefix}/throughput", rate / off_rate, "times"),
                Row(f"{prefix}/tpot_p99", gap / off_gap, "ratio"),
                Row(f"{prefix}/rate/on", rate, "tokens/s", peer=off_rate),
                Row(f"{prefix}/gap/on", gap * 1e3, "ms", peer=off_gap * 1e3),
            ]
    return found


def main() -> None:
    parser = options(__doc__)
    engine.add_arguments(parser)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--url", nargs=2, metavar=("WITH", "WITHOUT"), help="two servers that run already")
    arguments = parser.parse_args()
    turns, requests = (1, 8) if arguments.quick else (arguments.turns, 16)
    load, notes = os.getloadavg()[0], []
    if arguments.url:
        best = of_servers(arguments.url, turns, requests)
    else:
        job = {
            "model": engine.model(arguments.model),
            "llm": {
                "dtype": arguments.dtype,
                "block_size": arguments.block_size,
                "max_model_len": 1024,
                "max_num_batched_tokens": 512,
                "max_num_seqs": 8,
                "enable_prefix_caching": False,
            },
        }
        ways: dict[str, Any] = {"on": None, "off": None}
        if arguments.peer != "none":
            ways[arguments.peer] = engine.PEERS[arguments.peer]
        best, notes = in_turns(ways, job, turns, requests)
    notes = [
        f"{turns} turns of {requests} requests; load of the machine {load:.1f} at the start; peer: without it",
        *notes,
    ]
    publish("vllm_overhead", rows(best), arguments.json, notes=notes)


if __name__ == "__main__":
    main()

"""What a cache costs a real vLLM that finds nothing in it: saturated, no prompt twice, connector on and off in turns.

    vllm/overhead/throughput     tokens a second with it, as a part of without: 1 = free
    vllm/overhead/tpot_p99       99th percentile of the time between a request's tokens, times that without: 1 = free

Each way is the better of some runs in turns, each in a process of its own. One thread, bf16, blocks of 32 tokens.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from form import Row, options, publish
from serving import engine


def main() -> None:
    parser = options(__doc__)
    engine.takes(parser)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    turns, requests = (1, 8) if arguments.quick else (arguments.turns, 16)
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
    best: dict[bool, tuple[float, float]] = {}
    load = os.getloadavg()[0]
    for turn in range(turns):
        for on in (turn % 2 == 0, turn % 2 == 1):
            warm = [engine.prompt(200, 90_000 + i) for i in range(2)]
            prompts = [engine.prompt(300, 1000 * turn + i) for i in range(requests)]
            with tempfile.TemporaryDirectory(dir=os.environ.get("KVCACHE_DIR")) as place:
                connector = engine.ours(Path(place)) if on else None
                found = engine.run({**job, "connector": connector, "steps": [["load", warm, 8], ["load", prompts, 48]]})
            rate, gap = found[2]
            before = best.get(on, (0.0, float("inf")))
            best[on] = max(rate, before[0]), min(gap, before[1])
    rows = [
        Row("vllm/overhead/throughput", best[True][0] / best[False][0], "times"),
        Row("vllm/overhead/tpot_p99", best[True][1] / best[False][1], "times"),
        Row("vllm/overhead/rate/on", best[True][0], "tokens/s", peer=best[False][0]),
        Row("vllm/overhead/gap/on", best[True][1] * 1e3, "ms", peer=best[False][1] * 1e3),
    ]
    notes = [f"{turns} turns of {requests} requests; load of the machine {load:.1f} at the start; peer: without it"]
    publish("vllm_overhead", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

"""Time to the first token of a real vLLM, in one process, by where the prompt's prefix is.

    vllm/ttft/2048/cold      nothing is cached
    vllm/ttft/2048/host      the prefix in host memory, `vs_peer` = times below cold
    vllm/ttft/2048/nvme      on the drive, after a restart of the process
    vllm/ttft/2048/own       in vLLM's own pages (its prefix cache), as a reference

The same for 8,000 tokens. One thread, bf16, blocks of 32 tokens, asynchronous loads, unless options say otherwise.
A hit in memory is the best of five, since each is the same work; cold and from the drive there is one of each.
Fails where an answer differs from the one without a cache.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from form import Row, options, publish
from serving import engine

AGAIN = 5


def measure(length: int, place: Path, job: dict[str, Any]) -> list[Row]:
    prompt = engine.prompt(length, length)
    warm = ["first", engine.prompt(64, 1)]
    plain = {**job, "llm": {**job["llm"], "enable_prefix_caching": False}}
    cached = {**plain, "connector": engine.ours(place)}
    first = engine.run({**cached, "steps": [warm, ["first", prompt], *[["first", prompt]] * AGAIN, ["flush"]]})
    after = engine.run({**cached, "steps": [warm, ["first", prompt]]})
    own = {**job, "connector": None, "llm": {**job["llm"], "enable_prefix_caching": True}}
    reference = engine.run({**own, "steps": [warm, ["first", prompt], *[["first", prompt]] * AGAIN]})
    cold, hits, drive = first[2], first[3:-1], after[2]
    if {tuple(answer) for _, _, answer in [cold, *hits, drive]} != {tuple(reference[2][2])}:
        raise SystemExit(f"{length} tokens: an answer differs from vLLM's own")
    full = length // job["llm"]["block_size"] * job["llm"]["block_size"]
    if cold[1] or any(cached_tokens < full - 1 for _, cached_tokens, _ in [*hits, drive]):
        raise SystemExit(f"{length} tokens: cold found {cold[1]}, hits {[h[1] for h in hits]}, the drive {drive[1]}")
    cold_ms = cold[0] * 1e3
    return [
        Row(f"vllm/ttft/{length}/cold", cold_ms, "ms"),
        Row(f"vllm/ttft/{length}/host", min(h[0] for h in hits) * 1e3, "ms", peer=cold_ms),
        Row(f"vllm/ttft/{length}/nvme", drive[0] * 1e3, "ms", peer=cold_ms),
        Row(f"vllm/ttft/{length}/own", min(h[0] for h in reference[3:]) * 1e3, "ms", peer=cold_ms),
    ]


def main() -> None:
    parser = options(__doc__)
    engine.takes(parser)
    parser.add_argument("--lengths", type=int, nargs="+")
    arguments = parser.parse_args()
    lengths = arguments.lengths or ([2048] if arguments.quick else [2048, 8000])
    job = {
        "model": engine.model(arguments.model),
        "connector": None,
        "llm": {
            "dtype": arguments.dtype,
            "block_size": arguments.block_size,
            "max_model_len": max(lengths) + 64,
            "max_num_batched_tokens": 2048,
            "max_num_seqs": 8,
        },
    }
    rows, notes = (
        [],
        [f"one thread; load of the machine at the start {os.getloadavg()[0]:.1f}; vs peer: times below cold"],
    )
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVCACHE_DIR")) as place:
        for length in lengths:
            rows += measure(length, Path(place) / str(length), job)
    publish("vllm_ttft", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

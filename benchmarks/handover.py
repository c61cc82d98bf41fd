"""What an upgrade of a daemon costs its clients, with its memory handed over, beside a restart that reads the drive.

    handover/away           from the last match that found a prefix of 256 MiB until the next; peer: SIGTERM and a start
    handover/load           that prefix after it, the first time; peer: after the restart, from the drive
    handover/record         to tell of a record of 12 KiB and to take it in, 19,200 of them, in one process

The best of some turns, each with daemons of their own; a client asks every millisecond. Blocks have 2 MiB. The new
process of a hand-over loads its program while the old one still serves, that of a restart does not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, flush, options, publish

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import WarmRestart, export_state
from kvcache.settings.sources import load as load_settings
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=32, kv_heads=8, head_dim=128)
SMALL = KVLayout.mha(layers=2, kv_heads=2, head_dim=64, dtype="fp32", block_tokens=4)  # 8 KiB a block
BLOCKS, PROMPTS, OF_PROMPT = 128, 300, 64
TOKENS = range(BLOCKS * LAYOUT.block_tokens)


def pages(layout: KVLayout, blocks: int, kind: Any) -> list[GroupPages]:
    group, random = layout.groups[0], np.random.default_rng(0)
    shape = (2, blocks, layout.block_tokens, group.kv_heads, group.head_dim)
    layers = [random.integers(0, 100, shape).astype(kind) for _ in range(group.layers)]
    return [GroupPages.from_tensors(layout, layers, axes=("kv", "page", "token", "head", "dim"))]


def begin(place: str, *words: str) -> subprocess.Popen[bytes]:
    settings = {"HOST__CAPACITY_BYTES": "1GiB", "NVME__PATH": f"{place}/nvme", "NVME__CAPACITY_BYTES": "1GiB"}
    environ = {**os.environ, **{f"KVCACHE_{name}": value for name, value in settings.items()}}
    command = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", f"{place}/s", *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def turn(*, replace: bool) -> tuple[float, float]:
    """Seconds without the prefix, seconds to load it then."""
    with tempfile.TemporaryDirectory(prefix="kv-", dir=os.environ.get("KVCACHE_DIR")) as place:
        old, new = begin(place), None
        try:
            while not Path(place, "s").exists():
                time.sleep(0.01)
            with kvcache.open(f"unix:{place}/s", patience_s=30.0) as cache:
                ours = pages(LAYOUT, BLOCKS, np.uint16)
                handle = cache.namespace(LAYOUT, model="m", revision="r")
                with handle.request() as r:
                    r.match(TOKENS)
                    r.store(ours, [list(range(BLOCKS))]).wait()
                    flush(cache)
                    if replace:
                        new = begin(place, "--replace")
                    else:
                        old.terminate()
                    last = time.perf_counter()
                    while r.match().blocks == BLOCKS:
                        last = time.perf_counter()
                        time.sleep(0.001)
                    if new is None:
                        old.wait()
                        new = begin(place)
                    while r.match().blocks < BLOCKS:
                        time.sleep(0.001)
                    away = time.perf_counter() - last
                    r.admit()
                    began = time.perf_counter()
                    if not r.load(BLOCKS, ours, [list(range(BLOCKS))]).wait():
                        raise SystemExit("the prefix did not come")
                    return away, time.perf_counter() - began
        finally:
            for process in (old, new):
                if process is not None:
                    process.kill()
                    process.wait()


def a_record() -> float:
    settings = load_settings(None, {}, host={"capacity_bytes": "300MiB", "slab_bytes": "64MiB"}, nvme__enabled=False)
    old, ours = Cache(settings, shared=True), pages(SMALL, OF_PROMPT, np.float32)
    handle = old.namespace(SMALL, model="m", revision="r")
    for prompt in range(PROMPTS):
        with handle.request() as r:
            r.match([prompt, *range(OF_PROMPT * SMALL.block_tokens - 1)])
            r.store(ours, [list(range(OF_PROMPT))]).wait()
    took: list[float] = []
    new = Cache(settings, shared=True)

    def on_quiesced() -> None:
        began = time.perf_counter()
        table, descriptors = export_state(old, 60)
        records = WarmRestart(table, [os.dup(descriptor) for descriptor in descriptors]).take_in(new)
        if records != PROMPTS * OF_PROMPT:
            raise SystemExit(f"{records} records of {PROMPTS * OF_PROMPT}")
        took.append((time.perf_counter() - began) / records)

    old.on_quiesced.append(on_quiesced)
    old.close()
    new.close()
    return took[0]


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    turns = 2 if arguments.quick else arguments.turns
    load = os.getloadavg()[0]
    handed = [turn(replace=True) for _ in range(turns)]
    restarted = [turn(replace=False) for _ in range(turns)]
    rows = [
        Row("handover/away", min(a for a, _ in handed) * 1e3, "ms", peer=min(a for a, _ in restarted) * 1e3),
        Row("handover/load", min(b for _, b in handed) * 1e3, "ms", peer=min(b for _, b in restarted) * 1e3),
        Row("handover/record", min(a_record() for _ in range(turns)) * 1e6, "us"),
    ]
    publish("handover", rows, arguments.json, notes=[f"{turns} turns; load of the machine {load:.1f} at the start"])


if __name__ == "__main__":
    main()

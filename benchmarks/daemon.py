"""What a daemon costs over a cache in one's own process, and what LMCache's server costs beside it.

Both caches are asked in turns; times are the shortest of some. Blocks have 2 MiB: 16 tokens of a Llama 3 8B in bf16.

    match/overhead          a match of 8,192 blocks that are all there, through the socket; floor: in this process
    match/overhead/65536    the same of 65,536 blocks
    store/32MiB, load/32MiB 16 blocks, from the call until all are done; floor: in this process
    clients/N               N processes that load 32 MiB again and again: bytes of all of them a second
    kill/holds              from the kill of a client that held 4,096 blocks until they are free again
    mp/store, mp/retrieve   4,096 tokens, 512 MiB, from pages and back; peer: LMCache's server, engine_driven, SHM
    mp/lookup               of the same prompt; the peer's blocks have 256 tokens

LMCache is taken from --lmcache (a virtual environment), and left out where there is none.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, options, publish

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=32, kv_heads=8, head_dim=128)
TINY = KVLayout.mha(layers=1, kv_heads=1, head_dim=8)  # where only the index counts
BLOCK_BYTES = LAYOUT.block_bytes()
BLOCKS = 16
TOKENS = BLOCKS * LAYOUT.block_tokens
GB = 1e9
HOST = "1536MiB"
_LINE = re.compile(r"(STORE|RETRIEVE|LOOKUP): .*?([\d.]+) ms")


class Pool:
    """Pages of a pretended engine, with bytes in them."""

    def __init__(self, pages: int) -> None:
        random = np.random.default_rng(0)
        self.layers = [random.integers(0, 1 << 16, (2, pages, 16, 8, 128), np.uint16) for _ in range(32)]
        self.pages = [GroupPages.from_tensors(LAYOUT, self.layers, axes=("kv", "page", "token", "head", "dim"))]


@contextmanager
def daemon(**variables: str) -> Iterator[str]:
    """Where one listens, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        environ = {**os.environ, "KVCACHE_NVME__ENABLED": "false", "KVCACHE_CONTROL__ENABLED": "false", **variables}
        words = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", f"{directory}/s"]
        process = subprocess.Popen(words, env=environ, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            if "serving" not in process.stdout.readline():
                raise SystemExit("the daemon did not start")
            yield f"unix:{directory}/s"
        finally:
            process.terminate()
            process.communicate()


def bind(cache: Any, layout: KVLayout = LAYOUT) -> Any:
    return cache.namespace(layout, model="benchmark", revision="1")


def own(**host: Any) -> Any:
    return kvcache.open(host={"capacity_bytes": HOST, **host}, nvme={"enabled": False}, control={"enabled": False})


def timed_ms(call: Callable[[], object]) -> float:
    begun = time.perf_counter()
    call()
    return 1000 * (time.perf_counter() - begun)


# asking


def matching(runs: int) -> list[Row]:
    rows = []
    for blocks, name in ((8192, "match/overhead"), (65_536, "match/overhead/65536")):
        ids = np.random.default_rng(blocks).integers(0, 128_000, blocks * TINY.block_tokens, np.uint32)
        size = str(blocks * 16 << 10)
        with (
            daemon(KVCACHE_HOST__CAPACITY_BYTES=size) as where,
            own(capacity_bytes=size) as mine,
            kvcache.open(where) as theirs,
        ):
            handle = [bind(mine, TINY), bind(theirs, TINY)]
            for each in handle:
                fill(each, ids)
            times = [min(of) for of in zip(*(asked(handle, ids, blocks) for _ in range(runs)), strict=True)]
        rows.append(Row(name, times[1], "ms", floor=times[0]))
    return rows


def fill(handle: Any, ids: Any) -> None:
    """Store all of a prompt, in pages of which there are few."""
    tensors = np.zeros((1, 2, 64, 16, 1, 8), np.uint16)
    pages = [GroupPages.from_tensors(TINY, tensors, axes=("kv", "page", "token", "head", "dim"))]
    with handle.request(deadline_s=60) as r:
        r.match(ids)
        count = len(r.signatures)
        if not r.store(pages, [[i % 64 for i in range(count)]]).wait(120) or r.match().blocks != count:
            raise SystemExit("a prompt was not stored")


def asked(handles: list[Any], ids: Any, blocks: int) -> list[float]:
    times = []
    for handle in handles:
        with handle.request() as r:
            begun = time.perf_counter()
            hit = r.match(ids)
            times.append(1000 * (time.perf_counter() - begun))
        if hit.blocks != blocks:
            raise SystemExit(f"{hit.blocks} blocks were found of {blocks}: a fast miss is worth nothing")
    return times


# moving


def moving(pool: Pool, runs: int) -> list[Row]:
    page_ids = [list(range(BLOCKS))]
    with daemon(KVCACHE_HOST__CAPACITY_BYTES=HOST) as where, own() as mine, kvcache.open(where) as theirs:
        handles = [bind(mine), bind(theirs)]
        best: dict[str, list[float]] = {"store": [9e9, 9e9], "load": [9e9, 9e9]}
        for run in range(runs):
            tokens = np.arange(TOKENS) + run % 24 * 10_000  # those that come again were evicted, or are here: see below
            for side, handle in enumerate(handles):
                with handle.request() as r:
                    new = r.match(tokens).blocks == 0
                    took = timed_ms(lambda r=r: r.store(pool.pages, page_ids).wait(60))
                    if new and run >= 4:  # memory that was never touched is another matter
                        best["store"][side] = min(best["store"][side], took)
                    if r.match().blocks != BLOCKS:
                        raise SystemExit("a prompt was not stored")
                    r.admit()
                    transfers: list[Any] = []
                    took = timed_ms(
                        lambda r=r, t=transfers: t.append(r.load(BLOCKS, pool.pages, page_ids)) or t[0].wait(60)
                    )
                    if transfers[0].blocks != BLOCKS:
                        raise SystemExit("a prompt did not come back")
                    best["load"][side] = min(best["load"][side], took)
    return [
        Row(f"{name}/32MiB", rate(BLOCKS * BLOCK_BYTES, took[1]), "GB/s", floor=rate(BLOCKS * BLOCK_BYTES, took[0]))
        for name, took in best.items()
    ]


def loaded_ms(r: Any, pool: Pool, page_ids: list[list[int]]) -> float:
    begun = time.perf_counter()
    transfer = r.load(len(page_ids[0]), pool.pages, page_ids)
    transfer.wait(120)
    took = 1000 * (time.perf_counter() - begun)
    if transfer.blocks != len(page_ids[0]):
        raise SystemExit("a prompt did not come back")
    return took


def rate(size_bytes: int, ms: float) -> float:
    return size_bytes / GB / (ms / 1000)


def clients(pool: Pool, counts: list[int], seconds: float) -> list[Row]:
    """Processes that share one prompt and load it again and again."""
    rows, context = [], multiprocessing.get_context("fork")
    with daemon(KVCACHE_HOST__CAPACITY_BYTES=HOST) as where:
        for count in counts:
            gate, moved = context.Barrier(count + 1), context.Value("L", 0)
            processes = [context.Process(target=client, args=(where, pool, gate, moved, seconds)) for _ in range(count)]
            for process in processes:
                process.start()
            gate.wait(120)
            begun = time.perf_counter()
            gate.wait(120)
            took = time.perf_counter() - begun
            for process in processes:
                process.join()
            rows.append(Row(f"clients/{count}", moved.value * BLOCKS * BLOCK_BYTES / GB / took, "GB/s"))
    return rows


def client(where: str, pool: Pool, gate: Any, moved: Any, seconds: float) -> None:
    """What was said before the gate opens is not counted: the first load maps the memory."""
    tokens, page_ids, loads = np.arange(TOKENS), [list(range(BLOCKS))], 0
    with kvcache.open(where, patience_s=60.0) as cache:
        handle = bind(cache)
        with handle.request() as r:
            r.match(tokens)
            r.store(pool.pages, page_ids).wait(60)
        once(handle, tokens, pool, page_ids)
        gate.wait(120)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            once(handle, tokens, pool, page_ids)
            loads += 1
        with moved.get_lock():
            moved.value += loads
        gate.wait(120)


def once(handle: Any, tokens: Any, pool: Pool, page_ids: list[list[int]]) -> None:
    with handle.request(deadline_s=60) as r:
        hit = r.match(tokens)
        r.admit()
        transfer = r.load(hit.blocks, pool.pages, page_ids)
        if not transfer.wait(60) or transfer.blocks != BLOCKS:
            raise SystemExit("a client's prompt did not come back")


def holds() -> list[Row]:
    """How soon what a killed client held is back."""
    blocks, context = 4096, multiprocessing.get_context("fork")
    ids = np.arange(blocks * TINY.block_tokens)
    best = 9e9
    with daemon(KVCACHE_HOST__CAPACITY_BYTES=str(blocks * 64 << 10)) as where:
        for _ in range(5):
            ready = context.Event()
            victim = context.Process(target=hold, args=(where, ids, ready))
            victim.start()
            ready.wait()
            with kvcache.open(where) as cache:
                if not cache.stats()["tiers"]["host"]["held_bytes"]:
                    raise SystemExit("the client held nothing")
                assert victim.pid is not None
                begun = time.perf_counter()
                os.kill(victim.pid, signal.SIGKILL)
                while cache.stats()["tiers"]["host"]["held_bytes"]:
                    pass
                best = min(best, 1000 * (time.perf_counter() - begun))
            victim.join()
    return [Row("kill/holds", best, "ms")]


def hold(where: str, ids: Any, ready: Any) -> None:
    cache = kvcache.open(where)
    handle = bind(cache, TINY)
    fill(handle, ids)
    r = handle.request()
    r.match(ids)
    r.admit()
    ready.set()
    signal.pause()


# beside LMCache


def beside(pool: Pool, peer: Path | None, requests: int) -> tuple[list[Row], list[str]]:
    mine = whole(pool, requests)
    theirs, notes = ({}, ["LMCache was not there"]) if peer is None else lmcache(peer, requests)
    size = 4096 // 16 * BLOCK_BYTES
    rows = []
    for name, kind in (("store", "STORE"), ("retrieve", "RETRIEVE")):
        other = rate(size, theirs[kind]) if kind in theirs else None
        rows.append(Row(f"mp/{name}", rate(size, mine[kind]), "GB/s", peer=other))
    rows.append(Row("mp/lookup", mine["LOOKUP"], "ms", peer=theirs.get("LOOKUP")))
    return rows, notes


def whole(pool: Pool, requests: int) -> dict[str, float]:
    """4,096 tokens through a daemon: the shortest of each. The memory is used again after four, as the peer's, which
    touches all of its own before it serves."""
    best = {"STORE": 9e9, "RETRIEVE": 9e9, "LOOKUP": 9e9}
    page_ids = [list(range(256))]
    with daemon(KVCACHE_HOST__CAPACITY_BYTES="2GiB") as where, kvcache.open(where) as cache:
        handle = bind(cache)
        for turn in range(requests):
            tokens = (np.arange(4096) + turn * 100_000).tolist()
            with handle.request(deadline_s=60) as r:
                r.match(tokens)
                best["STORE"] = min(best["STORE"], timed_ms(lambda r=r: r.store(pool.pages, page_ids).wait(120)))
            with handle.request(deadline_s=60) as r:
                best["LOOKUP"] = min(best["LOOKUP"], timed_ms(lambda r=r, tokens=tokens: r.match(tokens)))
                r.admit()
                best["RETRIEVE"] = min(best["RETRIEVE"], loaded_ms(r, pool, page_ids))
    return best


def lmcache(venv: Path, requests: int) -> tuple[dict[str, float], list[str]]:
    """Its server and its own bench of it; the shortest of each."""
    rpc, http, metrics = free_port(), free_port(), free_port()
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "LMCACHE_TRACK_USAGE": "false", "PYTHONHASHSEED": "0"}
    command = [str(venv / "bin" / "lmcache")]
    served = ["server", "--host", "127.0.0.1", "--port", str(rpc), "--http-host", "127.0.0.1", "--http-port", str(http)]
    served += ["--prometheus-port", str(metrics), "--l1-size-gb", "4", "--no-l1-use-lazy", "--eviction-policy", "LRU"]
    served += ["--supported-transfer-mode", "engine_driven", "--shm-name", f"kvbench{os.getpid()}"]
    bench = ["bench", "server", "--rpc-url", f"tcp://127.0.0.1:{rpc}", "--url", f"http://127.0.0.1:{http}"]
    bench += ["--mode", "cpu", "--transfer-mode", "engine_driven", "--num-tokens", "4096", "--start", "0"]
    bench += ["--end", str(requests), "--interval", "0.1", "--kvcache-shape-spec", "(2,512,16,8,128):bfloat16:32"]
    with tempfile.TemporaryDirectory() as directory:
        server = subprocess.Popen(
            command + served, env=environ, cwd=directory, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            wait_for(http)
            done = subprocess.run(
                command + bench, env=environ, cwd=directory, capture_output=True, text=True, timeout=600, check=False
            )
        finally:
            server.terminate()
            with suppress(subprocess.TimeoutExpired):
                server.wait(20)
            server.kill()
            server.wait()
    found: dict[str, float] = {}
    for line in done.stdout.splitlines():
        said = _LINE.search(line)
        if said and not ("LOOKUP" in line and "0/16" in line):  # of what is there, as ours
            found[said[1]] = min(found.get(said[1], 9e9), float(said[2]))
    return found, [] if len(found) == 3 else [f"LMCache: {(done.stdout + done.stderr)[-300:]}"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(1200):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise SystemExit("LMCache's server did not listen")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--lmcache", type=Path, default=Path(".venv-lmcache"), help="LMCache's virtual environment")
    arguments = parser.parse_args()
    venv = arguments.lmcache.resolve()  # its server runs elsewhere
    peer = venv if (venv / "bin" / "lmcache").exists() else None
    pool = Pool(256)
    rows = matching(10 if arguments.quick else 60)
    rows += moving(pool, 20 if arguments.quick else 60)
    rows += holds()
    rows += clients(pool, [1, 4, 16] if arguments.quick else [1, 2, 4, 16, 64], 1.0)
    compared, notes = beside(pool, None if arguments.quick else peer, 3 if arguments.quick else 6)
    publish("daemon", rows + compared, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

"""How long the longest call takes: what an engine's scheduling thread may wait for the index at worst.

An index of 10^6 blocks in chains of 256, at two tiers, after a life of which 2^21 ghosts were remembered.

    stall/tick              a request begins, with 2^21 ghosts remembered and no block there, until all are forgotten
    stall/insert            256 blocks, through every growth of the tables on the way to 10^6
    stall/evict             256 victims, on the way from 10^6 blocks to none
    stall/match/kept        8,192 blocks looked up while what outlives the process is put together
    stall/match/check       the same while the index is audited

The first three are the longest of all calls, in time of the processor. The others are times of the clock, for what they
wait for is a lock: of each run the longest, and of the runs the shortest, since what else the machine does befalls
another call each time. Their floor is the same where nothing goes on beside. Not at real-time priority: the kernel
takes 50 ms of each second from that. The notes say how long what went on beside took.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable

import numpy as np
from harness import Row, options, publish

from kvcache import native
from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import KVLayout
from kvcache.cache.policy_state import MAX_ROWS
from kvcache.evict.hazard import Hazard
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index

TIERS = ["host", "nvme"]
CHAIN_BLOCKS, PROMPT_BLOCKS = 256, 8192
SHARD_KEY = pack_shard_key(bytes(32), 0, KVLayout.mha(layers=32, kv_heads=8, head_dim=128).whole[0])


def longest_ms(call: Callable[[], object], more: Callable[[], bool], now: Callable[[], float]) -> float:
    longest = 0.0
    while more():
        begun = now()
        call()
        longest = max(longest, now() - begun)
    return 1000 * longest


def remembering() -> Index:
    """Ghosts that no block makes room for."""
    rows = np.random.default_rng(1).integers(0, 1 << 48, MAX_ROWS, "<u8")
    index = Index(TIERS, Hazard())
    index.import_state(struct.pack("<4Q", 1, 2, 3, 1000) + rows.tobytes())
    return index


def run_of(random: np.random.Generator, blocks: int = CHAIN_BLOCKS) -> BlockRun:
    return BlockRun(SHARD_KEY, random.bytes(SIGNATURE_BYTES * blocks))


def growing(index: Index, blocks: int) -> float:
    random, longest = np.random.default_rng(2), 0.0
    while len(index) < blocks:
        run = run_of(random)
        index.tick()
        for tier in TIERS:
            begun = time.thread_time()
            index.insert_run(run, SHARD_KEY[:SIGNATURE_BYTES], tier)
            longest = max(longest, time.thread_time() - begun)
    return 1000 * longest


def emptying(index: Index, tier: str) -> float:
    return longest_ms(lambda: index.evict(tier, CHAIN_BLOCKS), lambda: index.resident(tier) > 0, time.thread_time)


def matching(index: Index, run: BlockRun, beside: Callable[[], object], runs: int) -> tuple[float, float]:
    """Of the longest matches while `beside` is done, a run each, the shortest; and how long that took, at least: ms."""
    longest, took = [], []

    def work() -> None:
        begun = time.perf_counter()
        beside()
        took.append(1000 * (time.perf_counter() - begun))

    def match() -> None:
        index.lookup([SHARD_KEY], [0]).match(run.signatures)

    for _ in range(runs):
        thread = threading.Thread(target=work)
        thread.start()
        longest.append(longest_ms(match, thread.is_alive, time.perf_counter))
        thread.join()
    return min(longest), min(took)


def main() -> None:
    arguments = options(__doc__).parse_args()
    if not native.built:
        raise SystemExit("the compiled index was not built: its twin is no measure")
    blocks, runs = (10**5, 2) if arguments.quick else (10**6, 10)
    empty = remembering()
    rows = [Row("stall/tick", longest_ms(empty.tick, lambda: empty.ghosts() > 0, time.thread_time), "ms")]
    index = remembering()
    rows.append(Row("stall/insert", growing(index, blocks), "ms"))
    prompt, notes = run_of(np.random.default_rng(3), PROMPT_BLOCKS), []
    index.insert_run(prompt, SHARD_KEY[:SIGNATURE_BYTES], TIERS[0])
    alone, _ = matching(index, prompt, lambda: time.sleep(0.1), runs)
    for name, other in (("kept", lambda: index.export_state(MAX_ROWS)), ("check", index.check)):
        longest, took = matching(index, prompt, other, runs)
        rows.append(Row(f"stall/match/{name}", longest, "ms", floor=alone))
        notes.append(f"{name}: {took:.0f} ms with {len(index):,} blocks and {index.ghosts():,} ghosts")
    rows.append(Row("stall/evict", max(emptying(index, tier) for tier in TIERS), "ms"))
    publish("index_stalls", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

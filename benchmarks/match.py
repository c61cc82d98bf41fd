"""What asking costs an engine's scheduling thread: digest chain and lookup of a prompt that is all there.

A prompt of 131,072 tokens in blocks of 16 is asked through a request of a cache whose index holds 10^3 to 10^7 blocks,
in chains of 256. Times are the shortest of many, so that what else the machine does counts little.

    match/buffer/warm/1e6   token ids as a buffer of uint32; floor: the digest chain alone
    match/int64/warm/1e6    as a buffer of int64
    match/list/warm/1e6     as a Python list
    match/buffer/cold/1e6   after everything else went through the processor's caches
    match/again/1e6         asked again, nothing hashed
    match/admit/1e6         the use counted, the blocks held
    match/buffer/1Mtok      1,048,576 tokens, at 10^6 blocks
    index/bytes/1e6         memory of the index a block that host, nvme, redis and object have; index/ghost/1e6: a ghost

Bytes are what the index accounts for; a note says by how much the process grew.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Row, options, publish

import kvcache
from kvcache import native
from kvcache.block.chain import SIGNATURE_BYTES, Chain, digest_chain
from kvcache.block.layout import KVLayout
from kvcache.evict.policy import LRU
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index

LAYOUT = KVLayout.mha(layers=32, kv_heads=8, head_dim=128)
TOKENS, MANY_TOKENS = 131_072, 1_048_576
CHAIN_BLOCKS = 256
TIERS = ["host", "nvme", "redis", "object"]
GHOST_BLOCKS = 1 << 16


class Remembering(LRU):
    """As many ghosts as one likes."""

    ghosts = 100.0


def best_ms(call: Callable[[], object], before: Callable[[], object] = lambda: None, runs: int = 40) -> float:
    """The shortest of some runs; what comes `before` each is not counted."""
    times = []
    for _ in range(runs):
        before()
        begun = time.perf_counter()
        call()
        times.append(time.perf_counter() - begun)
    return 1000 * min(times)


class Prompts:
    """A cache of so many blocks, and prompts of which it has every block."""

    def __init__(self, blocks: int) -> None:
        self._cache: Any = kvcache.open(
            host={"capacity_bytes": 1 << 50, "slab_bytes": 1 << 20},
            nvme={"enabled": False},
            control={"enabled": False},
        )
        self._handle = self._cache.namespace(LAYOUT, model="benchmark", revision="1")
        self._place = pack_shard_key(self._handle.id, 0, LAYOUT.whole[0])
        self._random = np.random.default_rng(blocks)
        fill(self._cache.index, self._place, blocks, ["host"], self._random)

    def prompt(self, tokens: int) -> Any:
        ids = self._random.integers(0, 128_000, tokens, dtype=np.uint32)
        chain = Chain(self._handle.id, LAYOUT.block_tokens)
        chain.extend(ids)
        self._cache.index.insert_run(BlockRun(self._place, chain.packed), self._handle.id, "host")
        return ids

    def digest(self, ids: Any) -> None:
        digest_chain(self._handle.id, ids, LAYOUT.block_tokens, None)

    def match(self, ids: Any) -> Any:
        request = self._handle.request()
        hit = request.match(ids)
        if hit.blocks != len(ids) // LAYOUT.block_tokens:
            raise SystemExit(f"{hit.blocks} blocks were found of {len(ids)} tokens: a fast miss is worth nothing")
        return request

    def close(self) -> None:
        self._cache.close()


def fill(index: Index, place: bytes, blocks: int, tiers: list[str], random: np.random.Generator) -> None:
    for first in range(0, blocks, CHAIN_BLOCKS):
        run = BlockRun(place, random.bytes(SIGNATURE_BYTES * min(CHAIN_BLOCKS, blocks - first)))
        index.tick()
        for tier in tiers:
            index.insert_run(run, place[:SIGNATURE_BYTES], tier)


def matching(name: str, blocks: int) -> list[Row]:
    prompts = Prompts(blocks)
    ids = prompts.prompt(TOKENS)
    floor = best_ms(lambda: prompts.digest(ids))
    rows = [Row(f"match/buffer/warm/{name}", best_ms(lambda: prompts.match(ids)), "ms", floor=floor)]
    if name == "1e6":
        caches = np.zeros(128 << 20, np.uint8)
        request = prompts.match(ids)
        wide, plain = ids.astype(np.int64), ids.tolist()
        rows += [
            Row("match/int64/warm/1e6", best_ms(lambda: prompts.match(wide)), "ms", floor=floor),
            Row("match/list/warm/1e6", best_ms(lambda: prompts.match(plain)), "ms", floor=floor),
            Row("match/buffer/cold/1e6", best_ms(lambda: prompts.match(ids), caches.sum, 20), "ms", floor=floor),
            Row("match/again/1e6", best_ms(request.match), "ms"),
            Row("match/admit/1e6", admitting(prompts, ids), "ms"),
        ]
        many = prompts.prompt(MANY_TOKENS)
        floor = best_ms(lambda: prompts.digest(many))
        rows.append(Row("match/buffer/1Mtok", best_ms(lambda: prompts.match(many)), "ms", floor=floor))
    prompts.close()
    return rows


def admitting(prompts: Prompts, ids: Any) -> float:
    times = []
    for _ in range(20):
        request = prompts.match(ids)
        times.append(best_ms(request.admit, runs=1))
        request.close()
    return min(times)


def growth(blocks: int) -> tuple[list[Row], str]:
    """Bytes of a block and of a ghost, and how much larger the process became for the blocks."""
    place = pack_shard_key(bytes(32), 0, LAYOUT.whole[0])
    before = resident_bytes()
    index = Index(TIERS, Remembering())
    fill(index, place, blocks, TIERS, np.random.default_rng(1))
    grown = (resident_bytes() - before) / blocks
    sizes = [index.memory()[0] / len(index)]
    while index.ghosts() < blocks:  # each that leaves makes room for one that comes
        fill(index, place, GHOST_BLOCKS, ["host"], np.random.default_rng(index.ghosts()))
        for tier in TIERS:
            index.evict(tier, GHOST_BLOCKS)
    sizes.append(index.memory()[1] / index.ghosts())
    rows = [Row(f"index/{what}/1e6", size, "B") for what, size in zip(("bytes", "ghost"), sizes, strict=True)]
    return rows, f"the process grew by {grown:.1f} B a block of the index"


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    arguments = options(__doc__).parse_args()
    names = ["1e3", "1e4", "1e5", "1e6", *([] if arguments.quick else ["1e7"])]
    if not native.available():
        names = names[:3]  # its twin takes half a KiB a block, and ten times as long
    rows, notes = [], []
    if native.built:
        rows, note = growth(10**6)  # first: what was freed before would be used again, and not be seen
        notes.append(note)
    matched = [row for name in names for row in matching(name, int(float(name)))]
    publish("match", matched + rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

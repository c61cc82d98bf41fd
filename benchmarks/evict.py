"""What room costs: a victim out of an index of 10^3 to 10^7 blocks, and a block stored where the host tier is full.

Blocks came in chains of 100 and were used once to eight times since, so that a policy has every class to choose from.
As many come as leave, in batches of 256, and the clock goes on: nothing is prepared.

    evict/lru/1e6          a victim, all told: counts, table, choice, unlinking, its address; a mean over batches
    evict/lru/1e6/single   one at a time, as a store that needs one slot takes it
    store/full/1e6         a block of the smallest size, of 256 that are stored at once, under `lru`: all that a store
                           does but for moving many bytes; needs 12 GiB of free memory, left out where there is less
"""

from __future__ import annotations

import time

import numpy as np
from harness import Row, options, publish

import kvcache
from kvcache import native
from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import KVLayout, Shard
from kvcache.block.record import record_bytes
from kvcache.cache.factory import POLICIES
from kvcache.evict.policy import Policy
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index
from kvcache.machine import memory
from kvcache.transfer.pages import GroupPages

SPACE = bytes(32)
PLACE = pack_shard_key(SPACE, 0, Shard(0, 32, 0, 8))
CHAIN_BLOCKS, BATCH, MOST_USES = 100, 256, 8
SMALLEST = KVLayout.mha(layers=1, kv_heads=1, head_dim=64, dtype="fp16")
FREE_BYTES = 12 << 30


class Filled:
    """An index that holds so many blocks."""

    def __init__(self, policy: Policy, blocks: int) -> None:
        self.index = Index(["host", "nvme"], policy)
        self._random = np.random.default_rng(blocks)
        self.come(blocks)

    def come(self, blocks: int) -> None:
        for first in range(0, blocks, CHAIN_BLOCKS):
            run = BlockRun(PLACE, self._random.bytes(SIGNATURE_BYTES * min(CHAIN_BLOCKS, blocks - first)))
            self.index.insert_run(run, SPACE, "host")
            for _ in range(self._random.integers(1, MOST_USES)):
                self.index.touch(run, self.index.tick())

    def victim_us(self, count: int, batches: int) -> float:
        """The mean of the faster half: what else the machine does falls into the other."""
        times = []
        for _ in range(batches):
            begun = time.perf_counter()
            taken = len(self.index.evict("host", count))
            times.append((time.perf_counter() - begun) / taken)
            self.come(taken)
        return 1e6 * float(np.mean(sorted(times)[: max(1, batches // 2)]))


def stored_us(blocks: int, stores: int) -> float:
    """A block of a store of `BATCH`, in a host tier that `blocks` fill: the mean of the faster half."""
    size = record_bytes(SMALLEST.block_bytes())
    tensor = np.zeros((2, BATCH, SMALLEST.block_tokens, 1, 64), np.float16)
    pages = [GroupPages.from_tensors(SMALLEST, [tensor], axes=("kv", "page", "token", "head", "dim"))]
    page_ids, tokens = [list(range(BATCH))], BATCH * SMALLEST.block_tokens
    times = []
    with kvcache.open(
        host={"capacity_bytes": blocks * size},
        nvme={"enabled": False},
        control={"enabled": False},
        evict={"policy": "lru"},  # takes in whatever comes: `hazard` may keep what is there instead
    ) as cache:
        handle = cache.namespace(SMALLEST, model="m", revision="r")
        for i in range(blocks // BATCH + 1 + stores):
            with handle.request() as r:
                r.match(np.arange(i * tokens, (i + 1) * tokens, dtype=np.uint32))
                begun = time.perf_counter()
                stored = r.store(pages, page_ids)
                stored.wait()
                times.append((time.perf_counter() - begun) / BATCH)
            assert stored.blocks == BATCH
    return 1e6 * float(np.mean(sorted(times[-stores:])[: stores // 2]))


def main() -> None:
    arguments = options(__doc__).parse_args()
    sizes = ["1e3", "1e4", "1e5", "1e6", *([] if arguments.quick else ["1e7"])]
    if not native.available():
        sizes = sizes[:3]  # its twin's orders are lists
    rows = []
    for name, policy in POLICIES.items():
        for size in sizes:
            filled = Filled(policy(), int(float(size)))
            rows.append(Row(f"evict/{name}/{size}", filled.victim_us(BATCH, 200), "us"))
            if size == "1e6":
                rows.append(Row(f"evict/{name}/{size}/single", filled.victim_us(1, 2000), "us"))
    full = ["1e3", "1e4", *([] if arguments.quick or memory().free_bytes < FREE_BYTES else ["1e6"])]
    rows += [Row(f"store/full/{size}", stored_us(int(float(size)), 200), "us") for size in full]
    publish("evict", rows, arguments.json)


if __name__ == "__main__":
    main()

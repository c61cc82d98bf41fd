"""What a victim costs: taken out of an index of 10^3 to 10^7 blocks, in batches, each with a table of its own.

Blocks came in chains of 100 and were used once to eight times since, so that a policy has every class to choose from.
As many come as leave, in batches of 256, and the clock goes on: nothing is prepared.

    evict/lru/1e6          a victim, all told: counts, table, choice, unlinking, its address; a mean over batches
    evict/lru/1e6/single   one at a time, as a store that needs one slot takes it
"""

from __future__ import annotations

import time

import numpy as np
from form import Row, options, publish

from kvcache import native
from kvcache.block.key import SIGNATURE_BYTES
from kvcache.block.layout import Shard
from kvcache.evict.policy import Policy
from kvcache.hierarchy.cache import POLICIES
from kvcache.hierarchy.index import Index
from kvcache.hierarchy.run import Run, place_of

SPACE = bytes(32)
PLACE = place_of(SPACE, 0, Shard(0, 32, 0, 8))
CHAIN_BLOCKS, BATCH, MOST_USES = 100, 256, 8


class Filled:
    """An index that holds so many blocks."""

    def __init__(self, policy: Policy, blocks: int) -> None:
        self.index = Index(["host", "nvme"], policy)
        self._random = np.random.default_rng(blocks)
        self.come(blocks)

    def come(self, blocks: int) -> None:
        for first in range(0, blocks, CHAIN_BLOCKS):
            run = Run(PLACE, self._random.bytes(SIGNATURE_BYTES * min(CHAIN_BLOCKS, blocks - first)))
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
    publish("evict", rows, arguments.json)


if __name__ == "__main__":
    main()

"""What `hazard` knows before it has seen anything: uses again and waits of other caches' blocks, shipped as data.

`prior.json` has, by class and bin of age, the blocks that were used again and those that could have been, in millionths
of all blocks; `python benchmarks/prior.py --write` makes it from half of each trace that ideas are tuned on
(docs/eviction.md). It tells how classes and ages compare. Within a class the chance for each request never grows with
age, so that of blocks used alike the older leaves, as by LRU. It counts as BLOCKS more that were seen here, fewer as a
cache sees blocks of its own, and is gone at UNTIL of these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.evict.policy import AGE_BINS, AGE_EDGES, Policy, classes

FILE = Path(__file__).with_name("prior.json")
BLOCKS, UNTIL = 300.0, 50_000.0


@dataclass(frozen=True)
class Prior:
    """Parts of all blocks, by (class, bin of age), of shape (classes(policy), AGE_BINS)."""

    reused: NDArray[np.float64]
    risk: NDArray[np.float64]
    """That could have been used again."""

    def weight(self, seen_blocks: float) -> float:
        """Of the whole, in blocks, beside so many of a cache's own."""
        return BLOCKS * max(0.0, 1 - seen_blocks / UNTIL)


def prior_of(policy: Policy) -> Prior:
    """Nothing, where the data are of other classes or bins."""
    return _read(classes(policy), policy.bounds, policy.gaps)


@lru_cache(maxsize=8)
def _read(rows: int, bounds: tuple[int, ...], gaps: tuple[int, ...]) -> Prior:
    told = json.loads(FILE.read_text(encoding="utf-8"))
    parts = np.zeros((2, rows, AGE_BINS))
    if [told["bounds"], told["gaps"], told["edges"]] == [list(bounds), list(gaps), list(AGE_EDGES)]:
        for part, name in zip(parts, ("reused", "risk"), strict=True):
            for row, counts in zip(part, told[name], strict=True):
                row[: len(counts)] = counts
    parts /= 1e6
    return Prior(*parts)

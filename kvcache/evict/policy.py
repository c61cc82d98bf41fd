"""The contract of an eviction policy, which ranks classes of blocks, never blocks; and the LRU policy.

The index puts blocks without children in the tier into classes by use count and by age at the last use. It orders each
class by age. A policy returns the value of a block of each class at each age. The index evicts the least valuable
first, deeper blocks first among equals, and stores nothing at the cost of a block worth more. A decision therefore
costs the same for a thousand blocks and for a million, and a policy knows nothing of bytes, tiers or I/O.

Age is counted in requests. Age bins are logarithmic: `age_bin(age)`.

**Cost classes, weights, quotas.** A policy's value is that of a byte of an ordinary block: expected uses per time held,
at least 0. Other differences between blocks are given to the index beside the table and apply under every policy. Each
block has a *cost class* (a tenant, a model, its bytes in each tier). Each class has a *weight* in each tier, which
multiplies the policy's value. The weight is the cost of recomputing the block per byte, against the mean of its
tenant's models (`kvcache/index/cost_classes.py`). An infinite weight prevents eviction.

Quotas (`quotas.py`) use the same weights. A tenant at its guaranteed share weighs infinitely where other tenants need
space. All other tenants weigh infinitely where a tenant at its quota needs space. A tenant under its guaranteed share
evicts others' blocks whatever they are worth. To limit a tenant, give its namespaces the tenant's name and call
`cache.quotas.set(tenant, tier, Quota(...))`, at any time.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import log2
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BINS_PER_OCTAVE = 5
AGE_BINS = 96


def age_bin(age: int) -> int:
    """The bin of an age in requests: 0 for 0, then five bins per octave, the last one open."""
    return 0 if age <= 0 else min(AGE_BINS - 1, 1 + int(BINS_PER_OCTAVE * log2(age)))


AGE_EDGES = tuple(bisect_left(range(1 << 20), b, key=age_bin) for b in range(AGE_BINS))
"""The lowest age in each bin or a later one."""


@dataclass(frozen=True)
class Evidence:
    """The index's observations, as counts by (class, age bin), of shape (class_count(policy), AGE_BINS)."""

    waiting: NDArray[np.int64]
    """Cached blocks and ghosts, by their current age."""
    reused: NDArray[np.int64]
    """Reuses since the start, by class and age before the reuse."""
    forgotten: NDArray[np.int64]
    """Ghosts forgotten since the start, by their age then: until then they had not been reused."""

    @classmethod
    def none(cls, policy: Policy) -> Evidence:
        zeros = np.zeros((class_count(policy), AGE_BINS), np.int64)
        return cls(zeros, zeros, zeros)


class Policy(Protocol):
    name: str
    bounds: tuple[int, ...]
    """A block reused `u` times is in the class given by the number of bounds at most `u`. No bounds: one class."""
    gaps: tuple[int, ...]
    """Divides each class but the first by how many gaps, in requests, are at most the age at the last use.

    At most seven gaps.
    """
    ghosts: float
    """Remembered evicted blocks for each cached block."""

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        """The value of a block by (class, age bin), of shape (class_count(policy), AGE_BINS); at least 0."""


def class_count(policy: Policy) -> int:
    return 1 + len(policy.bounds) * (len(policy.gaps) + 1)


def table_interval_requests(clock: int) -> int:
    """How many requests a policy's table serves from this time on: one, and an eighth of those so far; at most 128."""
    return min(128, 1 + clock // 8)


# LRU, tail first: one class, and a block twice as old is worth half. The index evicts the tail before the head, because
# only blocks without children in the tier can be evicted.


class LRU:
    name = "lru"
    bounds: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    ghosts = 0.0

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        return np.exp2(-np.arange(AGE_BINS, dtype=np.float64) / BINS_PER_OCTAVE)[None, :]

"""The contract of an eviction policy: it ranks classes of blocks, never blocks.

The index sorts the blocks without resident children into classes by how often they were used and after how long the
last time, and keeps each class ordered by age. A policy answers with the value of a block of each class at each age;
the index takes the least valuable first, deeper blocks before shallower ones on ties, and takes in nothing at the cost
of what is worth more. So a decision costs the same for a thousand blocks and for a million, and a policy knows nothing
of bytes, tiers or I/O.

Age is counted in requests. Bins of age are logarithmic: `age_bin(age)`.

**Kinds, weights, shares.** A policy's value is that of a byte of an ordinary block: expected uses for the time that it
is held, 0 at least. What differs between blocks that were used alike is told to the index beside the table, and kept
whatever the policy says: every block is of a *kind* (a tenant, a model, its bytes in each tier), and each kind has a
*weight* in each tier that multiplies the policy's value. It is what computing the block anew costs for each of its
bytes, against the mean of its tenant's models (`hierarchy/kinds.py`); infinity keeps a kind from leaving. Shares
are kept by the same weights (`shares.py`): a tenant at its least share weighs infinitely where others want room, all
others do where a tenant that has its quota wants some, and one below its least share takes room whatever it is worth.
To bind a tenant of one's own: give the namespace its name, and call `cache.shares.set(tenant, tier, Limit(...))`, at
any time."""

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
    """The bin of an age in requests: 0 for 0, then five bins an octave, the last one open."""
    return 0 if age <= 0 else min(AGE_BINS - 1, 1 + int(BINS_PER_OCTAVE * log2(age)))


AGE_EDGES = tuple(bisect_left(range(1 << 20), b, key=age_bin) for b in range(AGE_BINS))
"""The least age in each bin or a later one."""


@dataclass(frozen=True)
class Evidence:
    """What the index has seen, as counts by (class, bin of age), of shape (classes(policy), AGE_BINS)."""

    waiting: NDArray[np.int64]
    """Blocks that are here and blocks that are remembered, by their age now."""
    reused: NDArray[np.int64]
    """Uses again since the start, by class and age before them."""
    forgotten: NDArray[np.int64]
    """Blocks whose memory was given up since the start, by their age then: until then they had not come back."""

    @classmethod
    def none(cls, policy: Policy) -> Evidence:
        zeros = np.zeros((class_count(policy), AGE_BINS), np.int64)
        return cls(zeros, zeros, zeros)


class Policy(Protocol):
    name: str
    bounds: tuple[int, ...]
    """Class of a block used again `u` times: the number of bounds that are at most `u`. No bounds: one class."""
    gaps: tuple[int, ...]
    """Each class but the first is as many more as there are gaps: by how many of these are at most the age, in
    requests, at which the last use came. Seven at most."""
    ghosts: float
    """How many blocks that left are remembered for each one that is there."""

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        """The value of a block by (class, age bin), of shape (classes, AGE_BINS); none below 0."""


def class_count(policy: Policy) -> int:
    return 1 + len(policy.bounds) * (len(policy.gaps) + 1)


def table_interval_requests(clock: int) -> int:
    """How many requests a policy's table serves, from this time on: one, and an eighth of those so far."""
    return min(128, 1 + clock // 8)


# Least recently used, tail first: one class, the older the less valuable: twice as old, half as valuable. That the
# tail leaves before the head is the index's doing (only blocks without resident children can leave), so this is all
# there is to it.


class LRU:
    name = "lru"
    bounds: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    ghosts = 0.0

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        return np.exp2(-np.arange(AGE_BINS, dtype=np.float64) / BINS_PER_OCTAVE)[None, :]

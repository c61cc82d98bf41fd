"""The contract of an eviction policy: it ranks classes of blocks, never blocks.

The index sorts the blocks without resident children into classes by how often they were used, and keeps each class
ordered by age. A policy answers with the value of a block of each class at each age; the index takes the least
valuable first, deeper blocks before shallower ones on ties. So a decision costs the same for a thousand blocks and for
a million, and a policy knows nothing of bytes, tiers or I/O.

Age is counted in requests. Bins of age are logarithmic: `age_bin(age)`.
"""

from __future__ import annotations

from math import log2
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BINS_PER_OCTAVE = 5
AGE_BINS = 96


def age_bin(age: int) -> int:
    """The bin of an age in requests: 0 for 0, then five bins an octave, the last one open."""
    return 0 if age <= 0 else min(AGE_BINS - 1, 1 + int(BINS_PER_OCTAVE * log2(age)))


class Policy(Protocol):
    name: str
    bounds: tuple[int, ...]
    """Class of a block used `u` times: the number of bounds that are at most `u`. No bounds: one class."""

    def values(self, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The value of a block by (class, age bin), given how many wait in each; both (len(bounds) + 1, AGE_BINS)."""

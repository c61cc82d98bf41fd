"""Least recently used, tail first: one class, the older the less valuable: twice as old, half as valuable.

That the tail leaves before the head is the index's doing (only blocks without resident children can leave), so this
is all there is to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.evict.policy import AGE_BINS, BINS_PER_OCTAVE, Evidence


class LRU:
    name = "lru"
    bounds: tuple[int, ...] = ()
    gaps: tuple[int, ...] = ()
    ghosts = 0.0

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        return np.exp2(-np.arange(AGE_BINS, dtype=np.float64) / BINS_PER_OCTAVE)[None, :]

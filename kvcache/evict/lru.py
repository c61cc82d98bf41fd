"""Least recently used, tail first: one class, the older the less valuable.

That the tail leaves before the head is the index's doing (only blocks without resident children can leave), so this
is all there is to it.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.evict.policy import AGE_BINS, Evidence


class LRU:
    name = "lru"
    bounds: tuple[int, ...] = ()
    ghosts = 0.0

    def values(self, evidence: Evidence) -> NDArray[np.float64]:
        return -np.arange(AGE_BINS, dtype=np.float64)[None, :]

"""What of a prefix lies where, as a plan looks at it: runs of blocks of one tier, and the bytes to move."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np

from kvcache.hierarchy.plan import Span
from kvcache.index.block_run import ALL, Packed, Run
from kvcache.index.index import Index


def spans(
    index: Index,
    places: Sequence[tuple[bytes, int]],
    needs: Sequence[int],
    packed: Packed,
    by_tier: Mapping[str, int],
) -> list[Span]:
    """Of the blocks that a lookup found, from the first. `places`: what the index knows each by, and its payload bytes.

    A prefix can be cut anywhere only where every group needs all of its blocks: else it is one span, of the farthest
    tier, to be taken or left as a whole.
    """
    found = sum(by_tier.values())
    if not found:
        return []
    sizes = [size * min(need, found) for (_, size), need in zip(places, needs, strict=True)]
    if len(by_tier) == 1 or min(needs) < ALL:
        return [Span(list(by_tier)[-1], found, sum(sizes))]
    a_block = sum(size for _, size in places)
    masks = [np.frombuffer(index.where(Run(place, packed).part(0, found)), np.uint8) for place, _ in places]
    nearest = np.max([mask & -mask.astype(np.int16) for mask in masks], axis=0)
    edges = [0, *(np.flatnonzero(np.diff(nearest)) + 1).tolist(), found]
    tiers = {1 << t: tier for t, tier in enumerate(index.tiers)}
    last = index.tiers[-1]  # what left since the lookup
    return [
        Span(tiers.get(int(nearest[first]), last), end - first, (end - first) * a_block)
        for first, end in pairwise(edges)
    ]

"""Hazard policy: keeps the blocks with the most expected uses for the memory they take until then.

A block's class is its use count and its age at the last use: a block reused soon is likely to be reused soon again. For
each class the policy estimates the hazard of reuse. That is the chance that a block of some age is used within the next
age bin. Reuses are events. Cached blocks, ghosts and forgotten ghosts are censored: they have waited at least their age
and may still return (Kaplan and Meier 1958). Eviction therefore does not bias the estimate.

The value of a block of age `a` is its Gittins index (1979): the best, over all T, of the expected uses between a and T
over the expected time held until then. The only manual parameters say how much evidence outweighs the value that thin
evidence is drawn to.

While evidence is thin, a class's hazard is drawn to that of all classes with the same use count. That one is drawn to
the hazard of all classes, and that to the hazard of the bin before; the first bin is drawn to one constant chance. An
unseen case therefore gets the value of the nearest seen one, and a scan does not make old blocks valuable. A prior of a
few hundred blocks from other caches' traces counts as if seen here. It orders classes and ages from the first request
on, and equal evidence of the cache's own outweighs it.

An eviction candidate was not used by the request that needs the room, so it has outlived its age in requests. It gets
the value of the next age. Otherwise a session that has just ended would look as if its next request were due now.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.evict.policy import AGE_BINS, AGE_EDGES, Evidence, Policy, age_bin, class_count

# The prior: reuses and waits of other caches' blocks, shipped as data. `prior.json` has, by class and age bin, the
# blocks that were reused and those that could have been, in millionths of all blocks.
# `python benchmarks/hazard_prior.py --write` makes it from half of each tuning trace (docs/eviction.md). It says how
# classes and ages compare. Within a class the chance per request never grows with age, so that of blocks used alike
# the older is evicted, as by LRU. It counts as PRIOR_BLOCKS more blocks seen here, fewer as the cache sees its own,
# and none from PRIOR_END_BLOCKS on.

PRIOR_FILE = Path(__file__).with_name("prior.json")
PRIOR_BLOCKS, PRIOR_END_BLOCKS = 300.0, 50_000.0


@dataclass(frozen=True)
class Prior:
    """Fractions of all blocks by (class, age bin), of shape (class_count(policy), AGE_BINS)."""

    reused: NDArray[np.float64]
    risk: NDArray[np.float64]
    """Blocks that could have been reused."""

    def weight(self, seen_blocks: float) -> float:
        """The weight of the whole prior, in blocks, beside this many of the cache's own."""
        return PRIOR_BLOCKS * max(0.0, 1 - seen_blocks / PRIOR_END_BLOCKS)


def load_prior(policy: Policy) -> Prior:
    """The prior for a policy; zeros if the data have other classes or bins."""
    return _read_prior(class_count(policy), policy.bounds, policy.gaps)


@lru_cache(maxsize=8)
def _read_prior(rows: int, bounds: tuple[int, ...], gaps: tuple[int, ...]) -> Prior:
    recorded = json.loads(PRIOR_FILE.read_text(encoding="utf-8"))
    parts = np.zeros((2, rows, AGE_BINS))
    if [recorded["bounds"], recorded["gaps"], recorded["edges"]] == [list(bounds), list(gaps), list(AGE_EDGES)]:
        for part, name in zip(parts, ("reused", "risk"), strict=True):
            for row, counts in zip(part, recorded[name], strict=True):
                row[: len(counts)] = counts
    parts /= 1e6
    return Prior(*parts)


Table = NDArray[np.float64]

DEFAULT_REUSE_CHANCE = 0.005
"""The chance of a reuse within a bin that spans a fifth of an octave, before any evidence."""
PSEUDO_COUNT = 30.0
"""How many blocks seen in a bin weigh as much as the value that they are drawn to."""

CLASS_PSEUDO_COUNT = 3000.0
"""The same for a class against all with the same use count.

It is larger because blocks of a long chain return together.
"""

_EDGES = np.asarray(AGE_EDGES, np.float64)
_ENDS = np.append(_EDGES[1:], 2 * _EDGES[-1])
_REACHABLE_BINS = np.flatnonzero(
    _ENDS > _EDGES
)  # bins that can contain an age: the first ones are narrower than one request
_WIDTH = (_ENDS - _EDGES)[_REACHABLE_BINS]
_RELATIVE_WIDTH = (
    _WIDTH / (_EDGES + _ENDS)[_REACHABLE_BINS]
)  # the part of an age that a bin spans: constant except where bins are rounded to requests
# the bin of a block that has outlived its age; 0: new blocks
_NEXT_BIN = [0, *(age_bin(edge + 1) for edge in AGE_EDGES[1:])]
_VALUE_INDEX = np.maximum(np.searchsorted(_REACHABLE_BINS, _NEXT_BIN, "right") - 1, 0)  # the column of each bin's value
_YOUNGER_FIRST = 1 - 1e-6 * np.arange(AGE_BINS)  # among blocks worth the same, the older is evicted
_MIN_TIME = 1e-300  # avoids a division by 0 where no block waits any more
_BINS_PER_CHUNK = 16


class Hazard:
    name = "hazard"
    bounds: tuple[int, ...] = (1, 2, 3, 5, 9, 31)
    gaps: tuple[int, ...] = (8, 32, 128, 512)
    ghosts = 10.0

    def values(self, evidence: Evidence) -> Table:
        seen = evidence.reused[:, _REACHABLE_BINS].astype(np.float64)
        unseen = (evidence.waiting + evidence.forgotten)[:, _REACHABLE_BINS].astype(np.float64)
        risk = (seen + unseen)[:, ::-1].cumsum(1)[:, ::-1] - unseen / 2  # a block last seen waiting counts for half
        prior = load_prior(self)
        own_blocks = float(seen.sum() + unseen.sum())
        weight = prior.weight(own_blocks)
        seen, risk = seen + weight * prior.reused[:, _REACHABLE_BINS], risk + weight * prior.risk[:, _REACHABLE_BINS]
        values: Table = gittins_index(hazards(seen, risk, self._of_uses()))[:, _VALUE_INDEX] * _YOUNGER_FIRST
        if weight > 0:  # a prior may rank blocks for eviction, but is no reason yet to refuse a new block
            values[:, 0] = values.max()
        return values

    def _of_uses(self) -> NDArray[np.int64]:
        """By class, the number of bounds that its use count reaches."""
        return np.append(0, np.repeat(np.arange(1, len(self.bounds) + 1), len(self.gaps) + 1))


def hazards(seen: Table, risk: Table, of_uses: NDArray[np.int64]) -> Table:
    """By (class, bin), the chance that a block that has waited until the bin is used within it.

    Args:
        seen: blocks that were reused.
        risk: blocks that could have been reused.
        of_uses: by class, the number of its use count's group.
    """
    together = (of_uses == np.arange(of_uses[-1] + 1)[:, None]).astype(np.float64)
    whole = _shrunk(together @ seen, together @ risk)[of_uses]
    chance: Table = np.minimum((seen + CLASS_PSEUDO_COUNT * whole) / (risk + CLASS_PSEUDO_COUNT), 1 - 1e-6)
    return chance


def _shrunk(seen: Table, risk: Table) -> Table:
    """Hazards drawn to those of all classes, and these to DEFAULT_REUSE_CHANCE."""
    events, exposed = seen.sum(0), risk.sum(0)
    pooled, part = np.empty_like(events), DEFAULT_REUSE_CHANCE / _RELATIVE_WIDTH[-2]
    for b in range(len(pooled)):
        pooled[b] = (events[b] + PSEUDO_COUNT * part * _RELATIVE_WIDTH[b]) / (exposed[b] + PSEUDO_COUNT)
        part = pooled[b] / _RELATIVE_WIDTH[b]
    drawn: Table = (seen + PSEUDO_COUNT * pooled) / (risk + PSEUDO_COUNT)
    return drawn


def gittins_index(hazard: Table) -> Table:
    """By (class, bin), the best ratio of expected uses to expected time held, from the bin's start on."""
    waits = np.cumprod(np.concatenate([np.ones((len(hazard), 1)), 1 - hazard], 1), 1)  # still waiting at each edge
    held = np.zeros_like(waits)  # until each edge
    np.cumsum(_WIDTH * (waits[:, :-1] + waits[:, 1:]) / 2, 1, out=held[:, 1:])
    best = np.empty_like(hazard)
    for a in range(0, hazard.shape[1], _BINS_PER_CHUNK):
        # the fraction still waiting at the start would divide both uses and time, so it cancels; an end before the
        # start gives negative uses
        uses = waits[:, a : min(a + _BINS_PER_CHUNK, hazard.shape[1]), None] - waits[:, None, a + 1 :]
        time = held[:, None, a + 1 :] - held[:, a : min(a + _BINS_PER_CHUNK, hazard.shape[1]), None]
        np.divide(uses, np.maximum(time, _MIN_TIME, out=time), out=uses)
        best[:, a : a + _BINS_PER_CHUNK] = uses.max(2)
    return best

"""Keep what is expected to be used again soonest for the memory it takes till then.

A block's class is how often it was used, and after how long the last time: who came back soon does so again. For each
class the policy estimates the hazard of reuse, the chance that a block which has waited so long is used again within
the next bin of age, from all that is known of waiting: uses again are events; blocks that are here, ghosts, and ghosts
that were forgotten have waited for their age at least and may yet come (Kaplan and Meier 1958, so eviction does not
bias it). The value of a block that has waited for `a` is the index of
Gittins (1979): the best, over all T, of the expected uses again between a and T over the expected time that it is held
until then. Nothing is set by hand but how much evidence outweighs what it is drawn to.

While evidence is thin, the hazard of a class is drawn to that of all with as many uses, that to the one of all classes,
that to the one of the bin before, and the first to one chance for each bin. So what was never seen counts as what is
nearest to it: a scan makes nothing old dear. Beside it stand a few hundred blocks of other caches' lives (`prior.py`),
as if they had been seen here: they tell how classes and ages compare from the first request on, and are outweighed by
what is seen here as soon as there is as much.

Whoever could leave was not used by the request that asks for room, so it has outlived its age in requests: it is worth
what the next age is. Without that a session that has just ended looks as if its next request was due now."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from kvcache.evict.policy import AGE_BINS, AGE_EDGES, Evidence, Policy, age_bin, class_count

# What `hazard` knows before it has seen anything: uses again and waits of other caches' blocks, shipped as data.
# `prior.json` has, by class and bin of age, the blocks that were used again and those that could have been, in
# millionths of all blocks; `python benchmarks/prior.py --write` makes it from half of each trace that ideas are tuned
# on (docs/eviction.md). It tells how classes and ages compare. Within a class the chance for each request never grows
# with age, so that of blocks used alike the older leaves, as by LRU. It counts as BLOCKS more that were seen here,
# fewer as a cache sees blocks of its own, and is gone at UNTIL of these.

PRIOR_FILE = Path(__file__).with_name("prior.json")
PRIOR_BLOCKS, PRIOR_END_BLOCKS = 300.0, 50_000.0


@dataclass(frozen=True)
class Prior:
    """Parts of all blocks, by (class, bin of age), of shape (classes(policy), AGE_BINS)."""

    reused: NDArray[np.float64]
    risk: NDArray[np.float64]
    """That could have been used again."""

    def weight(self, seen_blocks: float) -> float:
        """Of the whole, in blocks, beside so many of a cache's own."""
        return PRIOR_BLOCKS * max(0.0, 1 - seen_blocks / PRIOR_END_BLOCKS)


def load_prior(policy: Policy) -> Prior:
    """Nothing, where the data are of other classes or bins."""
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
"""Of a use again in a bin that spans a fifth of an octave, where nobody was seen yet."""
PSEUDO_COUNT = 30.0
"""How many blocks seen in a bin weigh as much as what they are drawn to."""

CLASS_PSEUDO_COUNT = 3000.0
"""As many, for a class beside all with as many uses: blocks of a long chain come back together, as one would."""

_EDGES = np.asarray(AGE_EDGES, np.float64)
_ENDS = np.append(_EDGES[1:], 2 * _EDGES[-1])
_REACHABLE_BINS = np.flatnonzero(
    _ENDS > _EDGES
)  # bins in which an age can be: the first ones are narrower than one request
_WIDTH = (_ENDS - _EDGES)[_REACHABLE_BINS]
_RELATIVE_WIDTH = (
    _WIDTH / (_EDGES + _ENDS)[_REACHABLE_BINS]
)  # of an age, that a bin spans: alike but where bins are rounded to requests
_NEXT_BIN = [0, *(age_bin(edge + 1) for edge in AGE_EDGES[1:])]  # the bin of what has outlived its age; 0: newcomers
_VALUE_INDEX = np.maximum(np.searchsorted(_REACHABLE_BINS, _NEXT_BIN, "right") - 1, 0)  # where each bin's value stands
_YOUNGER_FIRST = 1 - 1e-6 * np.arange(AGE_BINS)  # of blocks worth the same, the older leaves
_MIN_TIME = 1e-300  # of what nobody waits for any more
_BINS_PER_CHUNK = 16  # bins


class Hazard:
    name = "hazard"
    bounds: tuple[int, ...] = (1, 2, 3, 5, 9, 31)
    gaps: tuple[int, ...] = (8, 32, 128, 512)
    ghosts = 10.0

    def values(self, evidence: Evidence) -> Table:
        seen = evidence.reused[:, _REACHABLE_BINS].astype(np.float64)
        unseen = (evidence.waiting + evidence.forgotten)[:, _REACHABLE_BINS].astype(np.float64)
        risk = (seen + unseen)[:, ::-1].cumsum(1)[:, ::-1] - unseen / 2  # who was last seen waiting counts for half
        prior = load_prior(self)
        own_blocks = float(seen.sum() + unseen.sum())
        weight = prior.weight(own_blocks)
        seen, risk = seen + weight * prior.reused[:, _REACHABLE_BINS], risk + weight * prior.risk[:, _REACHABLE_BINS]
        values: Table = gittins_index(hazards(seen, risk, self._of_uses()))[:, _VALUE_INDEX] * _YOUNGER_FIRST
        if weight > 0:  # what others saw ranks who leaves; it is no reason yet to take in nothing that is new
            values[:, 0] = values.max()
        return values

    def _of_uses(self) -> NDArray[np.int64]:
        """By class, the number of bounds that its uses reach."""
        return np.append(0, np.repeat(np.arange(1, len(self.bounds) + 1), len(self.gaps) + 1))


def hazards(seen: Table, risk: Table, of_uses: NDArray[np.int64]) -> Table:
    """By (class, bin), the chance that a block which has waited until the bin is used again within it. `seen`: those
    that were, `risk`: those that could have been. `of_uses`: by class, who has as many uses."""
    together = (of_uses == np.arange(of_uses[-1] + 1)[:, None]).astype(np.float64)
    whole = _shrunk(together @ seen, together @ risk)[of_uses]
    chance: Table = np.minimum((seen + CLASS_PSEUDO_COUNT * whole) / (risk + CLASS_PSEUDO_COUNT), 1 - 1e-6)
    return chance


def _shrunk(seen: Table, risk: Table) -> Table:
    """To all classes, and these to `CHANCE`."""
    events, exposed = seen.sum(0), risk.sum(0)
    pooled, part = np.empty_like(events), DEFAULT_REUSE_CHANCE / _RELATIVE_WIDTH[-2]
    for b in range(len(pooled)):
        pooled[b] = (events[b] + PSEUDO_COUNT * part * _RELATIVE_WIDTH[b]) / (exposed[b] + PSEUDO_COUNT)
        part = pooled[b] / _RELATIVE_WIDTH[b]
    drawn: Table = (seen + PSEUDO_COUNT * pooled) / (risk + PSEUDO_COUNT)
    return drawn


def gittins_index(hazard: Table) -> Table:
    """By (class, bin), the best of expected uses over expected time held, from the bin's beginning on."""
    waits = np.cumprod(np.concatenate([np.ones((len(hazard), 1)), 1 - hazard], 1), 1)  # still waiting at each edge
    held = np.zeros_like(waits)  # until each edge
    np.cumsum(_WIDTH * (waits[:, :-1] + waits[:, 1:]) / 2, 1, out=held[:, 1:])
    best = np.empty_like(hazard)
    for a in range(0, hazard.shape[1], _BINS_PER_CHUNK):
        # what still waits at the beginning divides uses and time, and is no more; an end before it has uses below 0
        uses = waits[:, a : min(a + _BINS_PER_CHUNK, hazard.shape[1]), None] - waits[:, None, a + 1 :]
        time = held[:, None, a + 1 :] - held[:, a : min(a + _BINS_PER_CHUNK, hazard.shape[1]), None]
        np.divide(uses, np.maximum(time, _MIN_TIME, out=time), out=uses)
        best[:, a : a + _BINS_PER_CHUNK] = uses.max(2)
    return best

"""What a policy would have found: a trace played to one tier of so many blocks.

Before a request its longest prefix that is there counts as found. `lru` and `hazard` are played by the very index and
the very policies that a cache has, so that what is said here holds there; the others are models from their papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import native
from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import Shard
from kvcache.errors import ConfigError
from kvcache.evict.hazard import Hazard
from kvcache.evict.policy import AGE_EDGES, LRU, Evidence, Policy, requests_between_tables
from kvcache.index.block_run import place_of
from kvcache.index.index import evidence_of, table_of
from kvcache.index.reference.index import PlainIndex, play
from kvcache.trace.classics import CLASSICS, Opt
from kvcache.trace.trace import Trace

RANKING: dict[str, type[Policy]] = {"hazard": Hazard, "lru": LRU}
POLICIES = (*RANKING, *CLASSICS)

PLACE = place_of(bytes(SIGNATURE_BYTES), 0, Shard(0, 1, 0, 1))


@dataclass(frozen=True)
class Played:
    policy: str
    capacity: int
    """Blocks."""
    hits: NDArray[np.int32]
    """By request, how many of its first blocks were there."""
    asked: int
    """Blocks of all requests."""

    @property
    def hit_rate(self) -> float:
        return int(self.hits.sum()) / self.asked if self.asked else 0.0


def simulate(trace: Trace, policy: str | Policy, capacity: int, *, plain: bool = False) -> Played:
    """`plain`: by the twins in Python even where the compiled core is there."""
    name = policy if isinstance(policy, str) else policy.name
    if name not in POLICIES and isinstance(policy, str):
        raise ConfigError(f"no policy {name!r}; there is {', '.join(POLICIES)}")
    if capacity < 1:
        raise ConfigError(f"a capacity of {capacity} blocks; expected one at least")
    plain = plain or not native.available()
    if isinstance(policy, str) and name in CLASSICS:
        hits = _classic(trace, name, capacity, plain)
    else:
        hits, _ = _ranked(trace, RANKING[policy]() if isinstance(policy, str) else policy, capacity, plain)
    return Played(name, capacity, hits, trace.accesses)


def signatures(unique: int) -> NDArray[np.uint64]:
    """A signature for each block, of shape (unique, 4): as good as random, and always the same."""
    words = np.arange(1, 4 * unique + 1, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words.reshape(-1, 4)


def evidence(trace: Trace, policy: Policy, capacity: int) -> Evidence:
    """What a policy has seen when the trace has ended."""
    return evidence_of(_ranked(trace, policy, capacity, not native.available())[1])


def _ranked(trace: Trace, policy: Policy, capacity: int, plain: bool) -> tuple[NDArray[np.int32], Any]:
    """The hits, and the index as it is then."""
    core: Any = PlainIndex if plain else native.core.Index
    index = core(1, policy.bounds, AGE_EDGES, policy.ghosts, policy.gaps)
    names, hits = signatures(trace.unique), np.zeros(len(trace), np.int32)
    done = 0
    while done < len(trace):
        end = min(len(trace), done + requests_between_tables(done))
        table = table_of(policy, evidence_of(index))
        part = trace.starts, trace.blocks, names, done, end, capacity, table, hits[done:end]
        if plain:
            play(index, PLACE, *part)
        else:
            index.play(PLACE, *part)
        done = end
    return hits, index


def _classic(trace: Trace, name: str, capacity: int, plain: bool) -> NDArray[np.int32]:
    hits = np.zeros(len(trace), np.int32)
    if not plain:
        native.core.play_classic(name, trace.starts, trace.blocks, trace.unique, capacity, hits)
        return hits
    chains = [chain.tolist() for chain in trace]
    policy = CLASSICS[name](capacity, _parents(chains, trace.unique))
    next_uses = _next_uses(chains) if isinstance(policy, Opt) else [[]] * len(chains)
    for r, (chain, following) in enumerate(zip(chains, next_uses, strict=True)):
        hits[r] = next((i for i, block in enumerate(chain) if block not in policy.here), len(chain))
        for i in reversed(range(len(chain))):
            if isinstance(policy, Opt):
                policy.next_use = following[i]
            (policy.touch if chain[i] in policy.here else policy.admit)(chain[i])
    return hits


def _parents(chains: Sequence[list[int]], unique: int) -> list[int]:
    parents = [-1] * unique
    for chain in chains:
        for parent, block in pairwise(chain):
            parents[block] = parent
    return parents


def _next_uses(chains: Sequence[list[int]]) -> list[list[float]]:
    """By request and block, in which request it is used again."""
    again: dict[int, float] = {}
    found: list[list[float]] = []
    for r in reversed(range(len(chains))):
        found.append([again.get(block, np.inf) for block in chains[r]])
        again.update((block, float(r)) for block in chains[r])
    return found[::-1]

"""Simulates policies on a trace, with one tier of a number of blocks, and prices tiers.

The longest resident prefix before a request counts as its hit. `lru` and `hazard` run in the cache's own index with its
own policies, so that their results hold there. `opt` knows the future and is the upper limit. `benchmarks/` has other
policies from their papers.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
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
from kvcache.evict.policy import AGE_EDGES, LRU, Evidence, Policy, table_interval_requests
from kvcache.index.block_run import pack_shard_key
from kvcache.index.index import evidence_of, value_table
from kvcache.index.reference.index import ReferenceIndex
from kvcache.settings.types import parse_bytes
from kvcache.trace.formats import Trace

INDEX_POLICIES: dict[str, type[Policy]] = {"hazard": Hazard, "lru": LRU}
OPTIMAL = "opt"
POLICIES = (*INDEX_POLICIES, OPTIMAL)

SHARD_KEY = pack_shard_key(bytes(SIGNATURE_BYTES), 0, Shard(0, 1, 0, 1))


@dataclass(frozen=True)
class SimulationResult:
    policy: str
    capacity: int
    """In blocks."""
    hits: NDArray[np.int32]
    """For each request, how many of its leading blocks were resident."""
    accesses: int
    """Blocks of all requests."""

    @property
    def hit_rate(self) -> float:
        return int(self.hits.sum()) / self.accesses if self.accesses else 0.0


def simulate(trace: Trace, policy: str | Policy, capacity: int, *, use_reference: bool = False) -> SimulationResult:
    """Simulate a policy on a trace. `use_reference` runs the Python twins even where the native core is built."""
    name = policy if isinstance(policy, str) else policy.name
    if name not in POLICIES and isinstance(policy, str):
        raise ConfigError(f"policy {name!r}: expected one of {', '.join(POLICIES)}")
    if capacity < 1:
        raise ConfigError(f"capacity = {capacity} blocks: expected at least 1")
    use_reference = use_reference or not native.available()
    if policy == OPTIMAL:
        hits = _replay_optimal(trace, capacity, use_reference)
    else:
        used = INDEX_POLICIES[policy]() if isinstance(policy, str) else policy
        hits, _ = _replay_index(trace, used, capacity, use_reference)
    return SimulationResult(name, capacity, hits, trace.accesses)


def signatures(unique: int) -> NDArray[np.uint64]:
    """Return a pseudo-random signature for each block, of shape (unique, 4); always the same."""
    words = np.arange(1, 4 * unique + 1, dtype=np.uint64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    return words.reshape(-1, 4)


def evidence(trace: Trace, policy: Policy, capacity: int) -> Evidence:
    """Return the evidence that a policy has at the end of the trace."""
    return evidence_of(_replay_index(trace, policy, capacity, not native.available())[1])


def _replay_index(trace: Trace, policy: Policy, capacity: int, use_reference: bool) -> tuple[NDArray[np.int32], Any]:
    """Return the hits, and the index at the end."""
    core: Any = ReferenceIndex if use_reference else native.core.Index
    index = core(1, policy.bounds, AGE_EDGES, policy.ghosts, policy.gaps)
    names, hits = signatures(trace.unique), np.zeros(len(trace), np.int32)
    done = 0
    while done < len(trace):
        end = min(len(trace), done + table_interval_requests(done))
        table = value_table(policy, evidence_of(index))
        part = trace.starts, trace.blocks, names, done, end, capacity, table, hits[done:end]
        index.replay(SHARD_KEY, *part)
        done = end
    return hits, index


def _replay_optimal(trace: Trace, capacity: int, use_reference: bool) -> NDArray[np.int32]:
    hits = np.zeros(len(trace), np.int32)
    if not use_reference:
        native.core.replay_optimal(trace.starts, trace.blocks, trace.unique, capacity, hits)
        return hits
    chains = [chain.tolist() for chain in trace]
    policy = _Optimal(capacity, parents_of(chains, trace.unique))
    for r, (chain, next_uses) in enumerate(zip(chains, _next_uses(chains), strict=True)):
        hits[r] = next((i for i, block in enumerate(chain) if block not in policy.resident), len(chain))
        for i in reversed(range(len(chain))):  # tail first, so that the head is the most recently touched
            policy.use(chain[i], next_uses[i])
    return hits


class _Optimal:
    """Belady 1966, the twin of csrc/host/optimal.cpp: evicts the block whose next use is latest.

    A block with resident children is not evicted. A parent is used whenever its child is, so this is optimal for
    prefixes too.
    """

    def __init__(self, capacity: int, parents: Sequence[int]) -> None:
        self._capacity, self._parents = capacity, parents
        self.resident: dict[int, tuple[float, int, int]] = {}
        self._order: list[tuple[float, int, int]] = []  # minus the next use, time of the touch, block
        self._children = [0] * len(parents)
        self._time = 0

    def use(self, block: int, next_use: float) -> None:
        """Touch a resident block; admit another one unless every evictable block is used sooner."""
        if block in self.resident:
            del self._order[bisect_left(self._order, self.resident[block])]
        else:
            if len(self.resident) >= self._capacity:
                victim = next(row for row in self._order if not self._children[row[2]])
                if victim[0] > -next_use:
                    return
                self._order.remove(victim)
                del self.resident[victim[2]]
                self._count_child(victim[2], -1)
            self._count_child(block, 1)
        self._time += 1
        self.resident[block] = (-next_use, self._time, block)
        insort(self._order, self.resident[block])

    def _count_child(self, block: int, change: int) -> None:
        if self._parents[block] >= 0:
            self._children[self._parents[block]] += change


def parents_of(chains: Sequence[Sequence[int]], unique: int) -> list[int]:
    """Return for each block the one before it, or -1."""
    parents = [-1] * unique
    for chain in chains:
        for parent, block in pairwise(chain):
            parents[block] = parent
    return parents


def _next_uses(chains: Sequence[list[int]]) -> list[list[float]]:
    """Return the request of the next use, by request and block."""
    again: dict[int, float] = {}
    found: list[list[float]] = []
    for r in reversed(range(len(chains))):
        found.append([again.get(block, np.inf) for block in chains[r]])
        again.update((block, float(r)) for block in chains[r])
    return found[::-1]


# Prices a hierarchy of tiers on a trace: the time to the first token, with every tier simulated alone. A block that a
# tier lacks is read from a lower tier or computed, and enters the tier in both cases. So each tier behaves as if it
# were alone, and a block is read from the highest tier that has it. The time is the read at the tier's rate plus the
# computation of the rest at the engine's rate. Queues are not simulated.

DEFAULT_RATES = {"hbm": 1e12, "host": 20e9, "nvme": 3e9, "redis": 1e9, "object": 0.3e9}
"""Bytes a second by default."""
_MAX_RATE = 1e18


@dataclass(frozen=True)
class TierSpec:
    name: str
    capacity_bytes: int
    bytes_per_s: float

    @classmethod
    def parse(cls, text: str, rates: Mapping[str, float] = DEFAULT_RATES) -> TierSpec:
        """Parse `host:64GiB`, or with a rate `nvme:2TiB@5GB`; the default rate is in `rates`. ConfigError for other
        texts."""
        name, _, rest = text.strip().partition(":")
        size, _, rate = rest.partition("@")
        try:
            if name not in DEFAULT_RATES or not size:
                raise ValueError(f"expected one of {', '.join(DEFAULT_RATES)} and a size")
            return cls(
                name, parse_bytes(size), float(parse_bytes(rate)) if rate else rates.get(name, DEFAULT_RATES[name])
            )
        except ValueError as error:
            raise ConfigError(
                f"tier {text!r}: {error}; write host:64GiB, or with a rate a second nvme:2TiB@5GB"
            ) from None


def measured_rates(stats: Mapping[str, Any]) -> dict[str, float]:
    """Return the bytes a second that a running cache read recently, by tier, from the output of `kvcache stats --json`.

    Raises:
        ConfigError: the statistics have no rates, or an invalid one.
    """
    tiers = stats.get("tiers") if isinstance(stats, Mapping) else None
    rates = {}
    for name, tier in tiers.items() if isinstance(tiers, Mapping) else ():
        rate = tier.get("read_bytes_per_s") if isinstance(tier, Mapping) else None
        if rate is None or rate == 0:
            continue
        if not isinstance(rate, (int, float)) or not 0 < rate <= _MAX_RATE:
            raise ConfigError(
                f"tiers.{name}.read_bytes_per_s = {rate!r}: expected a number of bytes a second, as "
                "`kvcache stats --json` prints"
            )
        rates[name] = float(rate)
    if not rates:
        raise ConfigError(
            "no tier has a recent read rate: expected the output of `kvcache stats --json` of a cache in use"
        )
    return rates


@dataclass(frozen=True)
class PricedTrace:
    hit_rates: dict[str, float]
    """Share of all blocks that each tier supplied."""
    first_token_s: NDArray[np.float64]
    """By request."""
    without_s: NDArray[np.float64]
    """The same without a cache."""


def price_tiers(
    trace: Trace, levels: Sequence[TierSpec], policy: str, *, token_bytes: int, prefill_per_s: float
) -> PricedTrace:
    """Price tiers, given highest first. `prefill_per_s` is the engine's rate in tokens a second."""
    block_bytes = token_bytes * trace.block_tokens
    reached = np.zeros(len(trace), np.int64)
    time = np.zeros(len(trace))
    found = {}
    for level in levels:
        capacity = max(1, level.capacity_bytes // block_bytes)
        hits = np.maximum(simulate(trace, policy, capacity).hits, reached)
        time += (hits - reached) * block_bytes / level.bytes_per_s
        found[level.name] = float((hits - reached).sum()) / max(1, trace.accesses)
        reached = hits
    uncached_tokens = np.maximum(
        trace.input_tokens - reached * trace.block_tokens, 1
    )  # the last token is always computed
    return PricedTrace(found, time + uncached_tokens / prefill_per_s, trace.input_tokens / prefill_per_s)

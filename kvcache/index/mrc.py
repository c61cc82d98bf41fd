"""The miss-ratio curve of a running cache: hit rates with more or less memory, tier by tier, from a sample.

The method is miniature simulation (Waldspurger et al., USENIX ATC 2017) on spatially sampled blocks (SHARDS, FAST
2015). A block is sampled if its signature is under a threshold, so always or never. Each size of a tier has a small
index, scaled like the sample. It replays the sampled requests with the cache's own policy and value table, and its hits
estimate the cache's. Children are evicted before parents, so a cached sampled block has its whole prefix cached. A
sample of a chain can therefore stand for the chain.

The sampling probability is proportional to a block's bytes, so each sampled block stands for the same number of bytes,
whatever its model. About `samples` blocks stand for a tier, so cost and memory depend on neither its size nor the
traffic. Memory is 0.3 KiB for each sampled block and its ten ghosts, times the number of sizes.

Each tier is simulated alone, as if all blocks were written through. Tenants' quotas and class weights are not
simulated: the curve describes the traffic as a whole. Requests count when they are closed, one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import native
from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import Shard
from kvcache.evict.policy import AGE_EDGES, Policy
from kvcache.index.block_run import PackedSignatures, pack_shard_key
from kvcache.index.cost_classes import ModelShape
from kvcache.index.reference.index import ReferenceIndex

CAPACITY_FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Simulated sizes, relative to the tier's."""
BATCH_REQUESTS = 32
"""Requests replayed together."""
MAX_PENDING_REQUESTS = 16 * BATCH_REQUESTS
"""The most requests that wait for the replay; further ones are skipped and counted."""
HALF_LIFE_REQUESTS = 1 << 17
"""A result this many requests ago weighs half."""
MAX_LABELS = 64
"""The most tenants, agents and namespaces reported separately; the rest share one label."""
MAX_SAMPLE_ERROR = 0.25
"""The largest sampling error, relative to the requested tokens, that is corrected."""
OTHER_LABEL = "others"
BREAKDOWNS = ("tenant", "agent", "namespace")

_SAMPLE_SHARD_KEY = pack_shard_key(bytes(SIGNATURE_BYTES), 0, Shard(0, 1, 0, 1))
_SAMPLE_WORD = 2  # a signature's third word; the first two are the key, which decides other things


@dataclass(frozen=True, slots=True)
class SampledRequest:
    """One request: its labels, and its sample for each tier."""

    names: tuple[str, ...]  # in the order of BREAKDOWNS
    asked_tokens: int
    sampled: tuple[tuple[bytes, int, float], ...]  # signatures, how many of them were requested, tokens of each


class HitCounts:
    """Tokens requested, tokens that the sample stands for, and by size the tokens found."""

    def __init__(self) -> None:
        self.requested = self.sampled = 0.0
        self.hits = np.zeros(len(CAPACITY_FACTORS))

    def add(self, requested: float, sampled: float, found: NDArray[np.float64]) -> None:
        self.requested, self.sampled = self.requested + requested, self.sampled + sampled
        self.hits = self.hits + found

    def decay(self) -> None:
        self.requested, self.sampled, self.hits = self.requested / 2, self.sampled / 2, self.hits / 2

    def rates(self) -> list[float]:
        """Hit rates by size.

        A sample has too many or too few of the few blocks that every request starts with, which every size has. The
        difference between requested and sampled tokens corrects that (SHARDS-adj). A large difference is chance and is
        not corrected.
        """
        missing = self.requested - self.sampled
        if abs(missing) > MAX_SAMPLE_ERROR * self.requested:
            return [float(found / self.sampled) if self.sampled else 0.0 for found in self.hits]
        return [float(min(1.0, max(0.0, (found + missing) / max(1.0, self.requested)))) for found in self.hits]


class TierSimulation:
    """One tier: an index for each size, and their hits."""

    def __init__(self, capacity_bytes: int, sample_bytes: int, policy: Policy, *, refuses: bool) -> None:
        core = ReferenceIndex if not native.available() else native.core.Index
        self.capacity_bytes, self.sample_bytes, self._refuses = capacity_bytes, sample_bytes, refuses
        self._capacity_blocks = [max(1, int(times * capacity_bytes / sample_bytes)) for times in CAPACITY_FACTORS]
        self._indexes: list[Any] = [
            core(1, policy.bounds, AGE_EDGES, policy.ghosts, policy.gaps) for _ in CAPACITY_FACTORS
        ]
        self.whole = HitCounts()
        self.by: dict[str, dict[str, HitCounts]] = {name: {} for name in BREAKDOWNS}

    def replay(self, rows: Sequence[SampledRequest], t: int, values: NDArray[np.float64]) -> None:
        of_row = [row.sampled[t] for row in rows]
        starts = np.cumsum([0, *(len(packed) // SIGNATURE_BYTES for packed, _, _ in of_row)], dtype=np.int64)
        signatures = np.frombuffer(b"".join(packed for packed, _, _ in of_row), np.uint64).reshape(-1, 4)
        blocks = np.arange(len(signatures), dtype=np.int32)
        requested = np.array([requested for _, requested, _ in of_row])
        tokens = np.array([tokens for _, _, tokens in of_row])
        found = np.zeros((len(CAPACITY_FACTORS), len(rows)))
        for i, (index, limit) in enumerate(zip(self._indexes, self._capacity_blocks, strict=True)):
            hits = np.zeros(len(rows), np.int32)
            part = starts, blocks, signatures, 0, len(rows), limit, values, hits, self._refuses
            index.replay(_SAMPLE_SHARD_KEY, *part)
            found[i] = np.minimum(hits, requested) * tokens
        for row, sampled, of_sizes in zip(rows, requested * tokens, found.T, strict=True):
            self.whole.add(row.asked_tokens, sampled, of_sizes)
            for by, name in zip(BREAKDOWNS, row.names, strict=True):
                counts = self.by[by]
                has_own_label = name in counts or len(counts) < MAX_LABELS
                counts.setdefault(name if has_own_label else OTHER_LABEL, HitCounts()).add(
                    row.asked_tokens, sampled, of_sizes
                )

    def decay(self) -> None:
        for count in (self.whole, *(count for counts in self.by.values() for count in counts.values())):
            count.decay()

    def report(self) -> dict[str, Any]:
        return {
            "capacity_bytes": self.capacity_bytes,
            "sample_bytes": self.sample_bytes,
            **_token_counts(self.whole),
            "points": [
                {"times": times, "capacity_bytes": int(times * self.capacity_bytes), "hit_rate": rate}
                for times, rate in zip(CAPACITY_FACTORS, self.whole.rates(), strict=True)
            ],
            "by": {
                by: {name: {**_token_counts(count), "hit_rates": count.rates()} for name, count in counts.items()}
                for by, counts in self.by.items()
            },
        }


def _token_counts(count: HitCounts) -> dict[str, int]:
    return {"asked_tokens": round(count.requested), "sampled_tokens": round(count.sampled)}


@dataclass
class _State:
    tiers: dict[str, TierSimulation] = field(default_factory=dict)
    requests: int = 0
    skipped: int = 0


class MissRatioCurve:
    """The curves of all tiers.

    Thread safety: any thread.

    Args:
        capacities: bytes by tier.
        refuses: the tier that evicts nothing worth more than the new block.
        samples: sampled blocks per tier; 0 disables the curve.
    """

    def __init__(
        self,
        capacities: Mapping[str, int],
        policy: Policy,
        values: Callable[[], NDArray[np.float64]],
        submit: Callable[[Callable[[], None]], object],
        *,
        samples: int,
        refuses: str = "",
    ) -> None:
        self._capacities, self._policy, self._values, self._submit = capacities, policy, values, submit
        self._samples, self._refuses = samples, refuses
        self._state = _State()
        self._waiting: list[SampledRequest] = []
        self._lock = threading.Lock()
        self._replay_lock = threading.Lock()
        self.seconds = 0.0
        """Total time spent on replays, on their own thread."""

    def add(
        self,
        signatures: PackedSignatures,
        requested: int,
        model: ModelShape,
        names: tuple[str, str, str],
    ) -> None:
        """Add a closed request.

        Args:
            signatures: the packed chain.
            requested: how many of its leading blocks were requested.
            names: tenant, agent, namespace.
        """
        if not self._samples or not requested:
            return
        block_tokens, block_bytes = model.block_tokens, model.block_bytes
        words = np.frombuffer(signatures, np.uint64).reshape(-1, 4)
        sampled = []
        with self._lock:
            tiers = self._tiers(block_bytes)
        for tier, size in zip(tiers, block_bytes, strict=False):
            chance = min(1.0, size / tier.sample_bytes)
            if chance < 1:
                at = np.flatnonzero(words[:, _SAMPLE_WORD] < np.uint64(chance * 2.0**64))
                packed, count = words[at].tobytes(), int(np.searchsorted(at, requested))
            else:
                packed, count = bytes(signatures), requested
            sampled.append((packed, count, block_tokens / chance))
        row = SampledRequest(names, requested * block_tokens, tuple(sampled))
        with self._lock:
            self._state.requests += 1
            if len(self._waiting) >= MAX_PENDING_REQUESTS:
                self._state.skipped += 1
                return
            self._waiting.append(row)
            due = len(self._waiting) % BATCH_REQUESTS == 0
        if due:
            with suppress(RuntimeError):  # the cache is being closed
                self._submit(self._replay)

    def _tiers(self, block_bytes: Sequence[int]) -> list[TierSimulation]:
        """Create the simulations at the first request, which gives the bytes of a block."""
        if not self._state.tiers:
            self._state.tiers = {
                name: TierSimulation(
                    capacity, max(capacity // self._samples, size), self._policy, refuses=name == self._refuses
                )
                for (name, capacity), size in zip(self._capacities.items(), block_bytes, strict=False)
            }
        return list(self._state.tiers.values())

    def _replay(self) -> None:
        with self._replay_lock:
            with self._lock:
                rows, self._waiting = self._waiting, []
                decay = (
                    self._state.requests - len(rows)
                ) // HALF_LIFE_REQUESTS < self._state.requests // HALF_LIFE_REQUESTS
                tiers = list(self._state.tiers.values())
            begun = time.perf_counter()
            for first in range(0, len(rows), BATCH_REQUESTS):
                values = self._values()
                for t, tier in enumerate(tiers):
                    tier.replay(rows[first : first + BATCH_REQUESTS], t, values)
            if decay:
                for tier in tiers:
                    tier.decay()
            self.seconds += time.perf_counter() - begun

    def report(self) -> dict[str, Any]:
        """By tier, hit rates at each size, in total and by tenant, agent and namespace."""
        self._replay()
        with self._replay_lock:
            return {
                "requests": self._state.requests,
                "skipped_requests": self._state.skipped,
                "times": list(CAPACITY_FACTORS),
                "tiers": {name: tier.report() for name, tier in self._state.tiers.items()},
            }

    def rates(self) -> dict[str, dict[str, float]]:
        """Estimated hit rates by tier and relative size."""
        with self._replay_lock:
            return {
                name: {f"{times:g}": rate for times, rate in zip(CAPACITY_FACTORS, tier.whole.rates(), strict=True)}
                for name, tier in self._state.tiers.items()
            }

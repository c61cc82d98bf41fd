"""Load or recompute: how many of the found blocks are worth loading, from measured load and compute times.

A prefix can be loaded up to any block and computed from there. Loading its first n blocks takes as long as the slowest
tier involved, because the tiers are read at the same time. Computing the rest takes the time that the engine reported
for that many tokens. Within a run of blocks of one tier the sum is smallest at one of its ends. So only these ends are
compared: no block, or all blocks up to a change of tier.

Without knowledge there is no decision: until an engine reports compute times (`NamespaceHandle.computed`), every found
block is loaded. A tier that is never read would teach nothing. A few blocks that are not worth loading are therefore
read in the background and are in host the next time. The benefit of a choice to skip blocks is known at the next read
of their tier; until then the choice stays open. A `match` waits for the lock that a read's report holds, so each call
here evaluates only a few choices.

`LatencyModel` estimates the times. `spans` describes where the blocks of a prefix are.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log
from statistics import median

import numpy as np

from kvcache.index.block_run import ALL_BLOCKS, BlockRun, PackedSignatures
from kvcache.index.index import Index
from kvcache.observe.metrics import Counters
from kvcache.os_env import Clock

# Latency by size, learned from measurements: a tier's reads by bytes, an engine's prefill by tokens. The model is a
# fixed time, a time per unit, and for prefill (attention) a part that grows with the square. The initial guess is
# corrected in two ways. The *level*, one factor for all sizes, is the median of the last few samples relative to their
# expected values. It ignores two outliers of five, and follows a drive that became ten times slower within three
# samples. The ratio of the parts is fitted to more samples, at that level: least squares of the relative error, with
# less weight for older samples, and no part negative.

LEVEL_SAMPLES = 5
"""Samples whose median is the level."""
MAX_LOG_DEVIATION = log(1.5)
SAMPLE_DECAY = 0.98
"""The weight of a sample relative to the next one."""
PRIOR_WEIGHT = 0.1
"""The weight of the initial guess relative to a sample."""
MAX_SAMPLE = 1e15
_FIT_ROUNDS = 4


class LatencyModel:
    """Estimates seconds: `fixed_s` for any size, `unit_s` for each unit, and as much again at each `bend` units.

    Thread safety: none; callers hold a lock.
    """

    def __init__(self, fixed_s: float, unit_s: float, bend: float = float("inf")) -> None:
        self._fixed_s, self._unit_s, self._bend = fixed_s, unit_s, bend
        self._weights = [1.0, 1.0, 1.0]  # of the parts
        self._products = [[0.0] * 3 for _ in range(3)]  # products of parts, summed over samples
        self._sums = [0.0] * 3  # of parts, over samples
        self._gaps: deque[float] = deque(maxlen=LEVEL_SAMPLES)
        self._level = 0.0

    @property
    def known(self) -> bool:
        """Whether there was a sample."""
        return bool(self._gaps)

    @property
    def is_outlier(self) -> bool:
        """Whether the last sample differs from the level: a change or an outlier."""
        return bool(self._gaps) and abs(self._gaps[-1] - self._level) > MAX_LOG_DEVIATION

    def seconds(self, size: float) -> float:
        """The expected seconds for this size; 0 for size 0."""
        return exp(self._level) * self._expected(size) if size > 0 else 0.0

    def learn(self, size: float, seconds: float) -> None:
        """Add a sample."""
        if not (0 < size < MAX_SAMPLE and 0 < seconds < MAX_SAMPLE):  # also rejects NaN
            return
        gap = log(seconds / self._expected(size))
        self._gaps.append(gap)
        self._level = median(self._gaps)
        usual = self._expected(size) * exp(max(-1.0, min(1.0, gap - self._level)))
        row = [part / usual for part in self._parts(size)]
        for i, one in enumerate(row):
            self._sums[i] = SAMPLE_DECAY * self._sums[i] + one
            self._products[i] = [
                SAMPLE_DECAY * p + one * other for p, other in zip(self._products[i], row, strict=True)
            ]
        self._fit()

    def _fit(self) -> None:
        """Gauss-Seidel steps from the current weights, which are close."""
        for _ in range(_FIT_ROUNDS):
            for i, row in enumerate(self._products):
                rest = sum(p * w for j, (p, w) in enumerate(zip(row, self._weights, strict=True)) if j != i)
                self._weights[i] = max(0.0, (self._sums[i] + PRIOR_WEIGHT - rest) / (row[i] + PRIOR_WEIGHT))

    def _parts(self, size: float) -> tuple[float, float, float]:
        return self._fixed_s, self._unit_s * size, self._unit_s * size * size / self._bend

    def _expected(self, size: float) -> float:
        """The expected seconds without the level."""
        parts = self._parts(size)
        return max(1e-12, sum(part * weight for part, weight in zip(parts, self._weights, strict=True)))


INITIAL_LATENCY: Mapping[str, tuple[float, float]] = {
    "host": (20e-6, 1 / 8e9),
    "nvme": (200e-6, 1 / 1e9),
}
"""Seconds per read and per byte, before any measurement."""
INITIAL_NETWORK_LATENCY = (1e-3, 1 / 300e6)
"""The same for tiers behind a network."""
INITIAL_PREFILL = (0.01, 1e-4, 50_000)
"""Seconds per step and per token, and the number of tokens at which attention doubles the cost, before any report.

Only their ratios count.
"""
PROBE_INTERVAL_S = 1.0
"""After this idle time a tier is probed; at once if the last read was not as expected."""
MAX_SPANS = 32
MAX_OPEN_CHOICES = 256
"""The most choices per tier whose regret is not known yet; beyond it the oldest is counted from current knowledge."""
CHOICES_PER_READ = 4
"""The most choices whose regret one read of their tier settles; the others wait for the next read."""
LARGE_READ_BYTES = 64 << 20
MIN_PATIENCE_S = 0.05


@dataclass(frozen=True, slots=True)
class TierSpan:
    """Consecutive blocks whose fastest tier is this one, and the bytes to move to load them."""

    tier: str
    blocks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """Load `blocks` of the found blocks, compute the rest.

    `load_s` is the time to load the found blocks after `blocks`, and `compute_s` the time to compute them instead.
    """

    blocks: int
    hit_blocks: int
    load_s: float = 0.0
    compute_s: float = 0.0
    patience_s: float = float("inf")
    """How long a load may take before computing is the better choice after all."""
    spans: tuple[TierSpan, ...] = ()
    tokens: int = 0
    block_tokens: int = 0
    namespace: bytes = b""
    queued: Mapping[str, int] = field(default_factory=dict)
    """By tier, the bytes that it had to read first."""

    @property
    def skipped_tier(self) -> str | None:
        """The fastest tier of the first found block that is not worth loading; None if there is none."""
        before = self.blocks
        for span in self.spans:
            if before < span.blocks:
                return span.tier
            before -= span.blocks
        return None


@dataclass(frozen=True, slots=True)
class ChoiceResult:
    """The result of a choice: this many blocks after this time."""

    choice: LoadChoice
    blocks: int
    load_s: float
    rest_only: bool = False
    """Other requests load the chosen blocks and report their time."""


@dataclass(slots=True, eq=False)
class TierRead:
    """A batch of reads in progress. `queued_bytes`: bytes that the tier had to read before it."""

    tier: str
    bytes: int
    queued_bytes: int
    begun: float


class LoadPlan:
    """Latency models of tiers and engines, and choices whose result is open.

    Thread safety: any thread.
    """

    def __init__(self, clock: Clock, counters: Counters, *, enabled: bool = True) -> None:
        self._clock, self._counters, self.enabled = clock, counters, enabled
        self._tiers: dict[str, LatencyModel] = {}
        self._engines: dict[bytes, LatencyModel] = {}  # by namespace
        self._bytes_in_flight: dict[str, int] = {}  # bytes by tier
        self._tried: dict[str, float] = {}  # when a tier was last read
        self._open: defaultdict[str, deque[ChoiceResult]] = defaultdict(deque)  # by the tier whose blocks were skipped
        self._lock = threading.Lock()

    # measurements

    def computed(self, namespace: bytes, tokens: int, seconds: float) -> None:
        """An engine computed this many tokens in one step."""
        with self._lock:
            model = self._engines.get(namespace)
            if model is None:
                model = self._engines[namespace] = LatencyModel(*INITIAL_PREFILL)
            model.learn(tokens, seconds)

    def read_started(self, tier: str, size_bytes: int) -> TierRead:
        """Report that a tier started to read a batch."""
        now = self._clock.now()
        with self._lock:
            before = self._bytes_in_flight.get(tier, 0)
            self._bytes_in_flight[tier] = before + size_bytes
            self._tried[tier] = now
        return TierRead(tier, size_bytes, before, now)

    def read_ended(self, tier_read: TierRead, brought_bytes: int, *, late: bool = False) -> None:
        """Report the end of a batch.

        A batch that returned little, for lack of records or by failure, is no sample. A `late` one is always a
        sample; one without any record counts as twice its time.
        """
        seconds = self._clock.now() - tier_read.begun
        with self._lock:
            self._bytes_in_flight[tier_read.tier] -= tier_read.bytes
            late = late and seconds > self._latency_model(tier_read.tier).seconds(
                tier_read.queued_bytes + tier_read.bytes
            )
            if brought_bytes * 2 >= tier_read.bytes or (late and brought_bytes):
                self._learn(tier_read.tier, tier_read.queued_bytes + brought_bytes, seconds)
            elif late:
                self._learn(tier_read.tier, tier_read.queued_bytes + tier_read.bytes, 2 * seconds)

    def copied(self, size_bytes: int, seconds: float) -> None:
        """Report a load that found all of its blocks in host."""
        with self._lock:
            self._learn("host", size_bytes, seconds)

    def read_bytes_per_s(self, tier: str) -> float | None:
        """The recent rate of large reads; None if there was none."""
        with self._lock:
            model = self._tiers.get(tier)
            return LARGE_READ_BYTES / model.seconds(LARGE_READ_BYTES) if model is not None and model.known else None

    def _learn(self, tier: str, size_bytes: int, seconds: float) -> None:
        model = self._latency_model(tier)
        model.learn(size_bytes, seconds)
        if not model.is_outlier:
            remaining = self._open[tier]
            for _ in range(min(CHOICES_PER_READ, len(remaining))):
                self._regret(remaining.popleft())

    def _latency_model(self, tier: str) -> LatencyModel:
        model = self._tiers.get(tier)
        if model is None:
            model = self._tiers[tier] = LatencyModel(*INITIAL_LATENCY.get(tier, INITIAL_NETWORK_LATENCY))
        return model

    # decisions

    def choose(self, namespace: bytes, tokens: int, block_tokens: int, spans: Sequence[TierSpan]) -> LoadChoice:
        """Choose for a prompt of this many tokens whose leading blocks were found in these spans."""
        hit_blocks = sum(span.blocks for span in spans)
        with self._lock:
            engine = self._engines.get(namespace)
            if not self.enabled or engine is None or not hit_blocks or len(spans) > MAX_SPANS:
                return LoadChoice(hit_blocks, hit_blocks)
            queued = dict(self._bytes_in_flight)
            ends = self._ends(engine, tokens, block_tokens, spans, queued)
            blocks, load_s, compute_s = min(ends, key=lambda end: (end[1] + end[2], -end[0]))
            _, all_s, rest_s = ends[-1]
            full_compute_s = ends[0][2]
        return LoadChoice(
            blocks,
            hit_blocks,
            load_s=all_s - load_s,
            compute_s=compute_s - rest_s,
            patience_s=max(2 * load_s, full_compute_s - compute_s, MIN_PATIENCE_S),
            spans=tuple(spans),
            tokens=tokens,
            block_tokens=block_tokens,
            namespace=namespace,
            queued=queued,
        )

    def _ends(
        self, engine: LatencyModel, tokens: int, block_tokens: int, spans: Sequence[TierSpan], queued: Mapping[str, int]
    ) -> list[tuple[int, float, float]]:
        """For each number of blocks to compare: the number, the time to load them, the time to compute the rest."""
        ends = [(0, 0.0, engine.seconds(tokens))]
        blocks = size = 0
        read: dict[str, int] = {}  # bytes by tier
        takes: dict[str, float] = {}  # seconds by tier
        for span in spans:
            blocks, size = blocks + span.blocks, size + span.bytes
            read[span.tier] = read.get(span.tier, queued.get(span.tier, 0)) + span.bytes
            takes[span.tier] = self._latency_model(span.tier).seconds(read[span.tier])
            takes["host"] = self._latency_model("host").seconds(size)  # all blocks pass through host
            ends.append((blocks, max(takes.values()), engine.seconds(max(1, tokens - blocks * block_tokens))))
        return ends

    def probe(self, choice: LoadChoice) -> bool:
        """Whether to read some blocks that are not worth loading, to measure their tier."""
        tier = choice.skipped_tier
        if tier is None:
            return False
        with self._lock:
            if self._bytes_in_flight.get(tier, 0):
                return False
            idle_s = self._clock.now() - self._tried.get(tier, float("-inf"))
            return idle_s >= PROBE_INTERVAL_S or self._latency_model(tier).is_outlier

    def settle(self, choice: LoadChoice, loaded_blocks: int, load_s: float) -> None:
        """Record that the request continued with this many blocks after this time.

        Counts the seconds that a better choice would have saved, from current knowledge. If blocks were skipped, the
        count waits for the next read of their tier.
        """
        self._settle(ChoiceResult(choice, loaded_blocks, load_s))

    def settle_rest(self, choice: LoadChoice) -> None:
        """Record only the skipped blocks: other requests load the chosen ones and settle these."""
        if choice.skipped_tier is not None:
            self._settle(ChoiceResult(choice, choice.blocks, 0.0, rest_only=True))

    def _settle(self, taken: ChoiceResult) -> None:
        if not taken.choice.spans:
            return
        with self._lock:
            self._counters.add("planned_seconds", self._spent(taken))
            tier = taken.choice.skipped_tier
            if tier is None:
                self._regret(taken)
                return
            remaining = self._open[tier]
            remaining.append(taken)
            if len(remaining) > MAX_OPEN_CHOICES:
                self._regret(remaining.popleft())

    def _spent(self, taken: ChoiceResult) -> float:
        rest = max(1, taken.choice.tokens - taken.blocks * taken.choice.block_tokens)
        return taken.load_s + self._engines[taken.choice.namespace].seconds(rest)

    def _regret(self, taken: ChoiceResult) -> None:
        choice, spent = taken.choice, self._spent(taken)
        engine = self._engines[choice.namespace]
        ends = self._ends(engine, choice.tokens, choice.block_tokens, choice.spans, choice.queued)
        if taken.rest_only:
            spent += max(load for blocks, load, _ in ends if blocks <= taken.blocks)
            ends = [end for end in ends if end[0] > taken.blocks]
        others = [load + compute for blocks, load, compute in ends if blocks != choice.blocks]
        self._counters.add("plan_regret_seconds", max(0.0, spent - min(others, default=spent)))


def blocks_by_tier(choice: LoadChoice) -> dict[str, int]:
    """By tier, the number of blocks that are worth loading."""
    by_tier: dict[str, int] = {}
    remaining = choice.blocks
    for span in choice.spans:
        count = min(remaining, span.blocks)
        remaining -= count
        if count:
            by_tier[span.tier] = by_tier.get(span.tier, 0) + count
    return by_tier


# Spans: runs of a prefix's blocks in one tier, and the bytes to move.


def spans(
    index: Index,
    shards: Sequence[tuple[bytes, int]],
    needs: Sequence[int],
    packed: PackedSignatures,
    by_tier: Mapping[str, int],
) -> list[TierSpan]:
    """Spans of the blocks that a lookup found, from the first block.

    A prefix can be cut anywhere only if every group needs all of its blocks. Otherwise it is one span, of the slowest
    tier, to be loaded or skipped as a whole.

    Args:
        shards: the key of each shard in the index, and its payload bytes.
    """
    hit_blocks = sum(by_tier.values())
    if not hit_blocks:
        return []
    sizes = [size * min(need, hit_blocks) for (_, size), need in zip(shards, needs, strict=True)]
    if len(by_tier) == 1 or min(needs) < ALL_BLOCKS:
        return [TierSpan(list(by_tier)[-1], hit_blocks, sum(sizes))]
    a_block = sum(size for _, size in shards)
    masks = [np.frombuffer(index.tier_masks(BlockRun(key, packed).part(0, hit_blocks)), np.uint8) for key, _ in shards]
    nearest = np.max([mask & -mask.astype(np.int16) for mask in masks], axis=0)
    edges = [0, *(np.flatnonzero(np.diff(nearest)) + 1).tolist(), hit_blocks]
    tiers = {1 << t: tier for t, tier in enumerate(index.tiers)}
    last = index.tiers[-1]  # for blocks evicted since the lookup
    return [
        TierSpan(tiers.get(int(nearest[first]), last), end - first, (end - first) * a_block)
        for first, end in pairwise(edges)
    ]

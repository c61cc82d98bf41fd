"""Load or recompute: the choice against the best one in hindsight, on a clock that is turned."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.cache.load_plan import (
    CHOICES_PER_READ,
    MAX_OPEN_CHOICES,
    MAX_SPANS,
    LatencyModel,
    LoadChoice,
    LoadPlan,
    TierRead,
    TierSpan,
)
from kvcache.observe.metrics import Counters

NAMESPACE = b"n" * 32
TOKENS_A_BLOCK, BLOCK_BYTES = 16, 1 << 20


class Turned:
    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


@dataclass
class World:
    """What things really take. A request's prefix lies in host up to some block, then on the drive."""

    drive_s: float = 0.0002  # for a read
    drive_rate: float = 1e9
    host_rate: float = 8e9
    step_s: float = 0.01
    token_s: float = 1e-4
    attention_s: float = 2e-9  # for a token and one before it
    noise: float = 0.1
    deadline_s: float = 5.0  # of a read: what has not come by then does not
    clock: Turned = field(default_factory=Turned)

    def read(self, drive: int, factor: float = 1.0) -> float:
        return (self.drive_s + drive * BLOCK_BYTES / self.drive_rate) * factor if drive else 0.0

    def load(self, host: int, drive: int, factor: float = 1.0) -> float:
        return max((host + drive) * BLOCK_BYTES / self.host_rate, self.read(drive, factor))

    def compute(self, tokens: int, factor: float = 1.0) -> float:
        return (self.step_s + tokens * self.token_s + tokens * tokens * self.attention_s / 2) * factor

    def total(self, loaded: int, host: int, tokens: int) -> float:
        rest = max(1, tokens - loaded * TOKENS_A_BLOCK)
        return self.load(min(loaded, host), max(0, loaded - host)) + self.compute(rest)


def serve(world: World, plan: LoadPlan, rng: random.Random) -> tuple[float, float]:
    """One request: the time that it took on average, and that the best choice would have taken."""
    found, host = rng.randrange(8, 256), 0
    if rng.random() < 0.3:
        host = rng.randrange(found)
    tokens = found * TOKENS_A_BLOCK + rng.randrange(1, 2000)
    spans = [TierSpan("host", host, host * BLOCK_BYTES)] if host else []
    spans.append(TierSpan("nvme", found - host, (found - host) * BLOCK_BYTES))
    choice = plan.choose(NAMESPACE, tokens, TOKENS_A_BLOCK, spans)
    noisy = rng.lognormvariate(0, world.noise), rng.lognormvariate(0, world.noise)
    begun = world.clock.time
    loaded = choice.blocks
    drive = max(0, loaded - host)
    took = world.total(loaded, host, tokens)
    if loaded:
        load_s = world.load(min(loaded, host), drive, noisy[0])
        reading = plan.read_started("nvme", drive * BLOCK_BYTES) if drive else None
        if reading is not None:
            read(world, plan, reading, drive, noisy[0])
        else:
            plan.copied(loaded * BLOCK_BYTES, load_s)
        if (limit := min(choice.patience_s, world.deadline_s)) < load_s:  # the engine computes instead
            load_s, loaded = limit, 0
            took = limit + world.compute(tokens)
        world.clock.time = begun + load_s
        plan.settle(choice, loaded, load_s)
    else:
        reading = plan.read_started("nvme", BLOCK_BYTES) if plan.probe(choice) else None
        plan.settle(choice, 0, 0.0)  # before it is known: a request does not wait for what it does not load
        if reading is not None:
            read(world, plan, reading, 1, noisy[0])
    rest = max(1, tokens - loaded * TOKENS_A_BLOCK)
    world.clock.time += world.compute(rest, noisy[1])
    plan.computed(NAMESPACE, rest, world.compute(rest, noisy[1]))
    world.clock.time += rng.random()  # until the next one comes
    best = min(world.total(n, host, tokens) for n in (0, host, found))
    return took, best


def read(world: World, plan: LoadPlan, reading: TierRead, blocks: int, factor: float) -> None:
    """The drive's part of a load; where that takes too long, what came until then."""
    takes = world.read(blocks, factor)
    world.clock.time += min(takes, world.deadline_s)
    brought = int(min(1.0, world.deadline_s / takes) * blocks)
    plan.read_ended(reading, brought * BLOCK_BYTES, late=takes > world.deadline_s)


def regret(world: World, plan: LoadPlan, rng: random.Random, requests: int) -> float:
    took = best = 0.0
    for _ in range(requests):
        one, other = serve(world, plan, rng)
        took, best = took + one, best + other
    return took / best - 1


def plan_of(world: World, counters: Counters | None = None) -> LoadPlan:
    return LoadPlan(world.clock, counters or Counters())


rates = st.floats(7.0, 10.0).map(lambda exponent: 10.0**exponent)  # 10 MB/s to 10 GB/s
speeds = st.floats(-6.0, -3.0).map(lambda exponent: 10.0**exponent)  # a million to a thousand tokens a second


@given(rates, speeds, st.integers(0, 1 << 30))
@settings(max_examples=100)
def test_regret_is_below_5_percent_when_steady(drive_rate: float, token_s: float, seed: int) -> None:
    rng = random.Random(seed)
    world = World(drive_rate=drive_rate, token_s=token_s)
    plan = plan_of(world)
    regret(world, plan, rng, 60)  # learning what is normal here
    assert regret(world, plan, rng, 300) < 0.05


@given(
    rates,
    speeds,
    st.sampled_from(
        [("drive_rate", 0.1, 100), ("token_s", 0.5, 100), ("drive_rate", 10.0, 200), ("token_s", 2.0, 200)]
    ),
    st.integers(0, 1 << 30),
)
@settings(max_examples=100)
def test_regret_is_below_20_percent_across_a_change(
    drive_rate: float, token_s: float, change: tuple[str, float, int], seed: int
) -> None:
    rng = random.Random(seed)
    world = World(drive_rate=drive_rate, token_s=token_s)
    plan = plan_of(world)
    regret(world, plan, rng, 60)
    name, factor, requests = change
    setattr(world, name, getattr(world, name) * factor)
    assert regret(world, plan, rng, requests) < 0.20


@pytest.mark.parametrize("drive_rate", [1e3, 1e5, 1e6])
def test_a_drive_with_late_reads_is_not_used(drive_rate: float) -> None:
    """What comes in time is little, or nothing: the plan learns from that too, and waits for the drive no more."""
    world, rng = World(drive_rate=drive_rate), random.Random(3)
    plan = plan_of(world)
    regret(world, plan, rng, 10)
    assert regret(world, plan, rng, 100) < 0.05
    world.drive_rate = 1e10
    regret(world, plan, rng, 10)
    assert regret(world, plan, rng, 100) < 0.05, "and is read again when it is well"


def test_regret_of_skipped_loads_is_counted_once_known() -> None:
    """A drive that was slow and is fast again: the metric says what leaving its blocks alone has cost meanwhile."""
    counters, lost = Counters(), 0.0
    for seed in range(8):
        world, rng = World(drive_rate=1e7), random.Random(seed)
        plan = plan_of(world, counters)
        regret(world, plan, rng, 60)
        world.drive_rate = 1e10
        for _ in range(80):
            took, best = serve(world, plan, rng)
            lost += took - best
    assert lost > 5
    assert counters.get("plan_regret_seconds") == pytest.approx(lost, rel=0.3)


@pytest.mark.parametrize("own", [True, False])
def test_regret_of_a_prefixs_rest_counts_for_any_request(own: bool) -> None:
    """Where a rank loads for a scheduler, the scheduler settles what it left out, and the rank what it loaded."""
    counters, world = Counters(), World()
    plan = plan_of(world, counters)
    plan.computed(NAMESPACE, 1600, 0.2)
    spans = [TierSpan("host", 20, 20 << 20), TierSpan("redis", 80, 80 << 20)]
    for _ in range(5):
        plan.read_ended(begun_before(plan, 80 << 20, 10.0), 80 << 20)
    choice = plan.choose(NAMESPACE, 1601, 16, spans)
    assert choice.blocks == 20
    if own:
        plan.settle(choice, 20, 0.003)
    else:
        plan.settle_rest(choice)
        head = plan.choose(NAMESPACE, 320, 16, spans[:1])
        plan.settle(head, 20, 0.003)
    assert counters.get("plan_regret_seconds") == 0
    for _ in range(5):
        plan.read_ended(begun_before(plan, 80 << 20, 0.01), 80 << 20)
    rest_s = plan._engines[NAMESPACE].seconds(1281)
    assert counters.get("plan_regret_seconds") == pytest.approx(rest_s, rel=0.4)
    assert counters.get("planned_seconds") == pytest.approx(rest_s, rel=0.2)


def begun_before(plan: LoadPlan, size_bytes: int, seconds: float) -> TierRead:
    reading = plan.read_started("redis", size_bytes)
    reading.begun -= seconds
    return reading


def test_choices_of_unknown_regret_are_bounded() -> None:
    counters, world = Counters(), World()
    plan = plan_of(world, counters)
    plan.computed(NAMESPACE, 1000, 0.1)
    left = plan.choose(NAMESPACE, 1000, 16, [TierSpan("redis", 60, 1 << 40)])
    assert left.blocks == 0
    for n in range(1, 1001):
        plan.settle(left, 0, 0.0)
        assert counters.get("planned_seconds") == pytest.approx(n * 0.1, rel=0.01)
    assert len(plan._open["redis"]) == MAX_OPEN_CHOICES
    for left_open in range(MAX_OPEN_CHOICES - CHOICES_PER_READ, -1, -CHOICES_PER_READ):
        plan.read_ended(begun_before(plan, 60 << 10, 1e-3), 60 << 10)
        assert len(plan._open["redis"]) == left_open
    plan.settle(LoadChoice(0, 0), 0, 0.0)
    assert not any(plan._open.values()), "where nothing was found nothing was chosen"


def test_a_call_settles_a_bounded_number_of_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it holds what a request has to wait for: however many choices are open, and of whatever tier."""
    world, looks, asked = World(), [0], LatencyModel.seconds
    plan = plan_of(world)

    def counted(pace: LatencyModel, size: float) -> float:
        looks[0] += 1
        return asked(pace, size)

    monkeypatch.setattr(LatencyModel, "seconds", counted)

    def looked(call: Callable[[], object]) -> int:
        looks[0] = 0
        call()
        return looks[0]

    plan.computed(NAMESPACE, 1000, 0.1)
    by_first = {
        first: [
            TierSpan(first, 1, 1 << 40),
            *[TierSpan(("nvme", "redis", "object")[i % 3], 1, 1 << 20) for i in range(31)],
        ]
        for first in ("host", "nvme", "redis")
    }
    assert {len(spans) for spans in by_first.values()} == {MAX_SPANS}
    choices = {first: plan.choose(NAMESPACE, 1000, 16, spans) for first, spans in by_first.items()}
    for first, choice in choices.items():
        assert choice.skipped_tier == first
        for _ in range(MAX_OPEN_CHOICES + 1):
            plan.settle(choice, 0, 0.0)
    most = looked(lambda: plan.choose(NAMESPACE, 1000, 16, by_first["redis"]))
    assert most <= 4 * MAX_SPANS
    for call in (
        lambda: plan.read_ended(begun_before(plan, 1 << 20, 1e-2), 1 << 20),
        lambda: plan.copied(1 << 20, 1e-4),
        lambda: plan.settle(choices["nvme"], 0, 0.0),
        lambda: plan.settle_rest(choices["nvme"]),
        lambda: plan.probe(choices["nvme"]),
        lambda: plan.computed(NAMESPACE, 1000, 0.1),
    ):
        assert looked(call) <= (CHOICES_PER_READ + 1) * most


def test_without_the_plan_regret_is_high() -> None:
    world = World(drive_rate=2e7, token_s=1e-5)
    plan = plan_of(world)
    plan.enabled = False
    assert regret(world, plan, random.Random(1), 100) > 1.0


def test_all_hits_are_loaded_until_compute_times_are_known() -> None:
    plan = plan_of(World())
    assert plan.choose(NAMESPACE, 1000, 16, [TierSpan("redis", 60, 1 << 40)]).blocks == 60
    plan.computed(NAMESPACE, 1000, 0.1)
    choice = plan.choose(NAMESPACE, 1000, 16, [TierSpan("redis", 60, 1 << 40)])
    assert (choice.blocks, choice.hit_blocks) == (0, 60)
    assert choice.load_s > choice.compute_s > 0
    assert plan.choose(b"o" * 32, 1000, 16, [TierSpan("redis", 60, 1 << 40)]).blocks == 60, "another engine's"


def test_a_plan_loads_a_head_and_computes_the_tail() -> None:
    plan = plan_of(World())
    plan.computed(NAMESPACE, 1000, 0.1)
    spans = [TierSpan("host", 20, 20 << 20), TierSpan("nvme", 20, 20 << 20), TierSpan("redis", 20, 1 << 40)]
    assert plan.choose(NAMESPACE, 1000, 16, spans).blocks == 40


def test_queued_reads_count_in_the_plan() -> None:
    plan = plan_of(World())
    plan.computed(NAMESPACE, 1600, 0.2)
    spans = [TierSpan("nvme", 100, 100 << 20)]
    assert plan.choose(NAMESPACE, 1601, 16, spans).blocks == 100
    reading = plan.read_started("nvme", 1 << 30)
    assert plan.choose(NAMESPACE, 1601, 16, spans).blocks == 0
    plan.read_ended(reading, 0)
    assert plan.choose(NAMESPACE, 1601, 16, spans).blocks == 100


@pytest.mark.parametrize(("brought", "late"), [(0, False), (10 << 10, False), (0, True)])
def test_missing_blocks_do_not_train_the_latency_model(brought: int, late: bool) -> None:
    """Nor does a reading that had less time than it should have needed."""
    world = World()
    plan = plan_of(world)
    plan.computed(NAMESPACE, 1000, 0.1)
    for _ in range(5):
        reading = plan.read_started("redis", 1 << 30)
        world.clock.time += 1.0 if late else 60.0
        plan.read_ended(reading, brought, late=late)
    assert plan.read_bytes_per_s("redis") is None


def test_the_metric_counts_the_regret_of_loaded_blocks() -> None:
    counters, world = Counters(), World(noise=0.0)
    plan = plan_of(world, counters)
    plan.computed(NAMESPACE, 1000, 0.1)
    choice = plan.choose(NAMESPACE, 801, 16, [TierSpan("nvme", 50, 50 << 20)])
    assert choice.blocks == 50
    plan.settle(choice, 50, 0.05)
    assert counters.get("plan_regret_seconds") == 0
    plan.settle(choice, 50, 5.0)  # the drive took its time
    assert 4.8 < counters.get("plan_regret_seconds") < 5.0
    assert 5.0 < counters.get("planned_seconds") < 5.3


@given(st.lists(st.tuples(st.floats(0, 40), st.floats(-6, 3)), max_size=60), st.floats(0, 40))
def test_a_latency_model_stays_finite_and_positive(samples: list[tuple[float, float]], size: float) -> None:
    pace = LatencyModel(1e-3, 1e-9)
    for exponent, seconds in samples:
        pace.learn(2.0**exponent, 10.0**seconds)
        assert 0 < pace.seconds(2.0**size) < float("inf")
    assert pace.known == bool(samples)
    assert pace.seconds(0) == 0
    for _ in range(60):
        pace.learn(2.0**size, 0.5)
    assert pace.seconds(2.0**size) == pytest.approx(0.5, rel=0.01)


def test_two_outliers_of_five_do_not_change_the_model() -> None:
    pace = LatencyModel(0.0, 1e-9)
    for _ in range(10):
        pace.learn(1e6, 1e-3)
    before = pace.seconds(1e6)
    pace.learn(1e6, 1.0)
    pace.learn(1e6, 1.0)
    assert pace.seconds(1e6) < 1.6 * before
    for _ in range(3):
        pace.learn(1e6, 1e-2)
    assert pace.seconds(1e6) > 5e-3

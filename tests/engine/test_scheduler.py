"""Anything may happen in any order: requests come and go, loads and stores are late or fail, pages run out."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.sampling import SamplingParams
from kvcache.engine.sequence import Sequence, SequenceState
from kvcache.testing.naive_cache import NaiveCache
from tests.engine.fake_model import FakeModel, FlakyCache, ManualClock, answer

MOST_STEPS = 5000  # far above what the longest of these runs needs


class EngineMachine(RuleBasedStateMachine):
    """Every finished answer is the one worked out by hand, and at every moment the books are in order."""

    @initialize(
        seed=st.integers(0, 2**16),
        pages=st.integers(6, 40),
        budget=st.integers(1, 40),
        sequences=st.integers(1, 6),
        trouble=st.sampled_from([0.0, 0.3, 0.9]),
    )
    def start(self, seed: int, pages: int, budget: int, sequences: int, trouble: float) -> None:
        self.clock, self.cache = ManualClock(), FlakyCache(seed, trouble=trouble)
        self.shape = {"pages": pages, "max_batch_tokens": budget, "max_sequences": sequences}
        self.running: dict[Sequence, list[int]] = {}
        self.open()

    def open(self) -> None:
        self.engine = Engine(FakeModel(), self.cache, EngineConfig(patience_s=5.0, **self.shape), clock=self.clock)  # type: ignore[arg-type]

    @rule(family=st.integers(0, 2), length=st.integers(1, 40), own=st.lists(st.integers(0, 11), max_size=3))
    def add(self, family: int, length: int, own: list[int]) -> None:
        prompt = [*((i * (family + 3)) % 11 for i in range(length)), *own][: self.engine.max_tokens - 1]
        most = 1 + (length * 7 + family) % 12
        sequence = self.engine.add(prompt, SamplingParams(max_tokens=most))
        self.running[sequence] = answer(prompt, most, self.engine.max_tokens)

    @rule(steps=st.integers(1, 8))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            if self.engine.unfinished:
                self.engine.step()
        self.compare()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.running)))
        self.engine.abort(sequence)
        del self.running[sequence]

    @rule(seconds=st.sampled_from([1.0, 6.0]))
    def advance(self, seconds: float) -> None:
        self.clock.advance(seconds)

    @rule()
    def push_out(self) -> None:
        self.engine.pool.clear()

    @rule()
    def lose(self) -> None:
        self.cache.lose()

    @rule()
    def restart(self) -> None:
        self.engine.close()
        self.running.clear()
        assert self.engine.check() == []
        assert not self.cache.open_requests
        self.open()

    def compare(self) -> None:
        for sequence in [s for s in self.running if s.state is SequenceState.FINISHED]:
            assert sequence.answer == self.running.pop(sequence)

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "engine"):
            assert self.engine.check() == []

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(MOST_STEPS):
            if not self.engine.unfinished:
                break
            self.engine.step()
        assert self.engine.unfinished == 0, "no progress"
        self.compare()
        assert not self.running
        assert not self.cache.open_requests
        while self.engine.pool.busy:
            self.engine.pool.poll()
        assert self.engine.pool.available == self.shape["pages"]
        assert self.engine.check() == []


@pytest.fixture(autouse=True)
def without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is late here is late by the number of questions, not by time."""
    monkeypatch.setattr("kvcache.engine.engine._TICK_S", 0.0)


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(stateful_step_count=40, max_examples=4 * settings.default.max_examples)


def test_a_pending_lookup_delays_no_later_request() -> None:
    cache = FlakyCache(trouble=0)
    engine = Engine(FakeModel(), cache, EngineConfig(pages=40, max_sequences=2))
    asked = engine.add([1, 2, 3])
    assert asked.request is not None
    asked.request.pending = 3  # type: ignore[attr-defined]
    second, third, fourth = (engine.add([i] * 5) for i in range(3))
    engine.step()
    assert [s.state for s in (asked, second, third, fourth)] == [
        SequenceState.WAITING,
        SequenceState.RUNNING,
        SequenceState.RUNNING,
        SequenceState.WAITING,
    ]
    while engine.unfinished:
        engine.step()
    assert engine.check() == []


def test_a_prompt_waiting_for_pages_is_not_overtaken() -> None:
    clock = ManualClock()
    engine = Engine(FakeModel(), NaiveCache(), EngineConfig(pages=10), clock=clock)
    first = engine.add([1] * 20, SamplingParams(max_tokens=4, ignore_eos=True))
    large = engine.add([2] * 30, SamplingParams(max_tokens=1))
    small = engine.add([3], SamplingParams(max_tokens=1))
    engine.step()
    assert [s.state for s in (first, large, small)] == [
        SequenceState.RUNNING,
        SequenceState.WAITING,
        SequenceState.WAITING,
    ]
    while engine.unfinished:
        clock.advance(1.0)
        engine.step()
    assert 0 < large.start_s <= small.start_s
    assert not first.preemptions
    assert engine.check() == []


def test_pages_reserved_for_a_prompt_are_not_used_by_a_load() -> None:
    cache = NaiveCache()
    known = [2] * 32
    Engine(FakeModel(), cache, EngineConfig(pages=20)).generate([known], SamplingParams(max_tokens=1))
    engine = Engine(FakeModel(), cache, EngineConfig(pages=12, max_batch_tokens=4))
    first, second = engine.add([1] * 32, SamplingParams(max_tokens=1)), engine.add(known, SamplingParams(max_tokens=1))
    while engine.unfinished:
        engine.step()
    assert (first.preemptions, second.preemptions) == (0, 0)
    assert second.reused == {"host": 28}


def test_own_blocks_after_a_preemption_are_not_reused() -> None:
    engine = Engine(FakeModel(), NaiveCache(), EngineConfig(pages=9))
    first, second = (engine.add([i] * 8, SamplingParams(max_tokens=16, ignore_eos=True)) for i in range(2))
    while engine.unfinished:
        engine.step()
    assert second.preemptions
    assert (first.reused, second.reused) == ({}, {})


def test_an_earlier_prompt_does_not_delay_other_decodes() -> None:
    cache = FlakyCache(trouble=0)
    engine = Engine(FakeModel(), cache, EngineConfig(pages=40, max_batch_tokens=6))
    long = engine.add([1] * 30, SamplingParams(max_tokens=1))
    assert long.request is not None
    long.request.pending = 2  # type: ignore[attr-defined]
    short = engine.add([2] * 3, SamplingParams(max_tokens=30, ignore_eos=True))
    engine.step()
    while not long.answer:
        before = len(short.answer)
        engine.step()
        assert len(short.answer) == before + 1
    assert long.arrival < short.arrival

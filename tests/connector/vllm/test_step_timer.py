"""The step times that the plan receives, and where a hit came from."""

from __future__ import annotations

from typing import Any

import pytest

from kvcache.connector.vllm.request_state import tokens_by_tier
from kvcache.connector.vllm.step_timer import StepTimer


class Told:
    def __init__(self) -> None:
        self.heard: list[tuple[int, float]] = []

    def computed(self, tokens: int, seconds: float) -> None:
        self.heard.append((tokens, seconds))


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_only_prefill_steps_are_reported() -> None:
    clock, handle = Clock(), Told()
    steps, mine = StepTimer(clock), handle
    cache_request: Any = mine
    for prompts, tokens, seconds in ((512, 520, 2.0), (0, 8, 0.1), (3, 8, 0.2), (64, 64, 0.5)):
        steps.prompt(cache_request, prompts)
        steps.begin(tokens)
        clock.now += seconds
        steps.end()
        clock.now += 7  # between steps nothing is computed
    assert handle.heard == [(520, 2.0), (64, pytest.approx(0.5))]


def test_overlapping_steps_start_at_the_previous_end() -> None:
    clock, handle = Clock(), Told()
    steps: StepTimer = StepTimer(clock)
    cache_request: Any = handle
    for _ in range(3):  # all scheduled at once, as pipelines do
        steps.prompt(cache_request, 100)
        steps.begin(100)
    for _ in range(3):
        clock.now += 1.5
        steps.end()
    steps.end()  # more outputs than steps
    assert handle.heard == [(100, 1.5)] * 3


def test_a_step_is_reported_once_per_namespace() -> None:
    clock, one, other = Clock(), Told(), Told()
    steps = StepTimer(clock)
    for handle in (one, other, one, None):
        cache_request: Any = handle
        steps.prompt(cache_request, 10)
    steps.prompt(None, 5)
    steps.begin(30)
    clock.now += 1
    steps.end()
    assert one.heard == other.heard == [(30, 1.0)]


@pytest.mark.parametrize(
    ("first", "end", "expected"),
    [
        (0, 10, {"host": 64, "nvme": 64, "redis": 32}),
        (3, 10, {"host": 16, "nvme": 64, "redis": 32}),
        (4, 9, {"nvme": 64, "redis": 16}),
        (9, 10, {"redis": 16}),
        (0, 2, {"host": 32}),
        (5, 5, {}),
    ],
)
def test_a_hit_is_split_by_tier(first: int, end: int, expected: dict[str, int]) -> None:
    found = tokens_by_tier({"host": 4, "nvme": 4, "redis": 2}, first, end, 16)
    assert found == expected
    assert sum(found.values()) == (end - first) * 16

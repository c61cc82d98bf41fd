"""What a log of prompts reuses: against plain Python over tuples, and what breaks a prefix on prompts made for it."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache.trace.lint import MIN_REPEAT_TOKENS, count_repeated_tokens, lint_prompts, measure_reuse

prompts = st.lists(st.lists(st.integers(0, 2), max_size=60), max_size=12)


def arrays(lists: list[list[int]]) -> list[np.ndarray]:
    return [np.array(ids, np.uint32) for ids in lists]


@given(prompts, st.integers(1, 8))
def test_hits_equal_those_of_unlimited_memory(logs: list[list[int]], block: int) -> None:
    known: set[tuple[int, ...]] = set()
    hits = 0
    for ids in logs:
        ends = range(block, len(ids) + 1, block)
        fronts = [tuple(ids[:end]) for end in ends]
        hits += next((block * i for i, front in enumerate(fronts) if front not in known), block * len(fronts))
        known.update(fronts)
    played = measure_reuse(arrays(logs), block)
    assert (played.tokens, played.hit_tokens) == (sum(map(len, logs)), hits)
    assert 0 <= played.rate <= 1


@given(prompts)
def test_repeated_tokens_are_bounded_by_memory_and_total(logs: list[list[int]]) -> None:
    known: set[tuple[int, ...]] = set()
    sparse: set[tuple[int, ...]] = set()
    most = least = 0
    for ids in logs:
        stretches = [tuple(ids[i : i + MIN_REPEAT_TOKENS]) for i in range(len(ids) - MIN_REPEAT_TOKENS + 1)]
        for seen, every in ((known, True), (sparse, False)):
            covered = {i + j for i, s in enumerate(stretches) if s in seen for j in range(MIN_REPEAT_TOKENS)}
            most, least = (most + len(covered), least) if every else (most, least + len(covered))
        known.update(stretches)
        sparse.update(stretches[::MIN_REPEAT_TOKENS])
    assert count_repeated_tokens(arrays(logs)) == least <= most


@given(prompts)
def test_moving_never_makes_a_log_worse(logs: list[list[int]]) -> None:
    made = lint_prompts(arrays(logs), 4)
    assert made.moved_rate >= made.rate
    assert made.tokens == sum(map(len, logs))


def made(changing: list[tuple[int, int]], requests: int) -> list[np.ndarray]:
    """Prompts of 800 alike tokens, with so many changing ones at each of these places."""
    rng = random.Random(1)
    head = list(range(1000, 1800))
    logs = []
    for _ in range(requests):
        ids, at = [], 0
        for place, length in changing:
            ids += head[at:place] + [rng.randrange(100, 999) for _ in range(length)]
            at = place
        logs.append(ids + head[at:])
    return arrays(logs)


def test_a_break_near_the_head_loses_all_later_blocks() -> None:
    logs = made([(20, 3)], 30)
    found = lint_prompts(logs, 16)
    assert found.rate < 0.05
    assert found.moved_rate > 0.9
    assert [(group.first, len(group.breaks)) for group in found.groups] == [(20, 29)]
    assert found.groups[0].lost_tokens > 29 * 700


def test_a_second_break_is_found() -> None:
    found = lint_prompts(made([(20, 3), (400, 5)], 30), 16)
    assert found.moved_rate > 0.9
    assert {group.first for group in found.groups} == {20, 400}


def test_prompts_with_different_ends_have_no_break() -> None:
    rng = random.Random(2)
    logs = arrays([[*range(500), *(rng.randrange(1000, 9999) for _ in range(100))] for _ in range(20)])
    found = lint_prompts(logs, 16)
    assert found.groups == []
    assert found.moved_rate == found.rate > 0.7

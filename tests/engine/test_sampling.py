"""Greedy, temperature, top-p and seeds."""

from __future__ import annotations

from collections import Counter
from math import exp, inf, nan
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcache.engine.sampling import Sampler, SamplingParams, sample_tokens
from kvcache.errors import ConfigError


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"temperature": -0.1}, "temperature = -0.1"),
        ({"temperature": nan}, "temperature = nan"),
        ({"temperature": inf}, "temperature = inf"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"stop": ("a", "")}, "stop"),
    ],
)
def test_invalid_options_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        SamplingParams(**wrong)


def test_greedy_takes_the_lowest_of_the_likeliest_tokens() -> None:
    rows = torch.tensor([[0.0, 3.0, 3.0], [5.0, 1.0, 2.0]])
    assert sample_tokens(rows, [Sampler(SamplingParams()), Sampler(SamplingParams(seed=3))]) == [1, 0]
    assert sample_tokens(torch.empty((0, 3)), []) == []


def plain(logits: list[float], params: SamplingParams, drawn: float) -> int:
    """The same choice, a token at a time."""
    top = max(logits)
    weights = [exp((x - top) / params.temperature) for x in logits]
    order = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    nucleus, mass, total = [], 0.0, sum(weights)
    for i in order:
        nucleus.append(i)
        mass += weights[i] / total
        if mass >= params.top_p:
            break
    reached = 0.0
    for i in nucleus:
        reached += weights[i] / total
        if reached > drawn * mass:
            return i
    return nucleus[-1]


@given(
    logits=st.lists(st.integers(-80, 80).map(lambda n: n / 8), min_size=1, max_size=20),
    temperature=st.sampled_from([0.25, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    seed=st.integers(0, 2**32),
)
def test_sampling_equals_a_plain_loop(logits: list[float], temperature: float, top_p: float, seed: int) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, seed=seed)
    sampler, dice = Sampler(params), Random(seed)
    for _ in range(3):
        assert sampler.draw(torch.tensor(logits)) == plain(logits, params, dice.random())


@pytest.mark.parametrize("temperature", [1e-308, 1e-3])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    assert Sampler(SamplingParams(temperature=temperature, seed=1)).draw(torch.tensor([1.0, 9.0, 2.0])) == 1


def test_a_tiny_top_p_takes_the_likeliest_token() -> None:
    sampler = Sampler(SamplingParams(temperature=5.0, top_p=0.01, seed=4))
    assert {sampler.draw(torch.tensor([1.0, 1.5, 1.2])) for _ in range(50)} == {1}


def test_sampled_frequencies_match_the_probabilities() -> None:
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5))
    logits = torch.tensor([0.7, 0.2, 0.1]).log()
    seen = Counter(sampler.draw(logits) for _ in range(3000))
    assert [round(seen[i] / 3000, 1) for i in range(3)] == [0.7, 0.2, 0.1]


def test_without_a_seed_two_requests_differ() -> None:
    flat = torch.zeros(50000)
    a, b = (Sampler(SamplingParams(temperature=1.0)) for _ in range(2))
    assert [a.draw(flat) for _ in range(4)] != [b.draw(flat) for _ in range(4)]


def test_each_row_is_drawn_by_its_own_request() -> None:
    row, other = torch.randn((2, 40), generator=torch.Generator().manual_seed(1))
    wish = SamplingParams(temperature=1.0, seed=11)
    alone = sample_tokens(row[None], [Sampler(wish)])
    together = sample_tokens(
        torch.stack((other, row)), [Sampler(SamplingParams(temperature=1.0, seed=2)), Sampler(wish)]
    )
    assert together[1:] == alone

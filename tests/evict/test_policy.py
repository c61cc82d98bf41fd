"""The contract of a policy, for every one there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.evict.hazard import Hazard
from kvcache.evict.lru import LRU
from kvcache.evict.policy import AGE_BINS, BINS_PER_OCTAVE, Evidence, Policy, age_bin

POLICIES = [LRU, Hazard]


@pytest.mark.parametrize("make", POLICIES)
def test_a_policy_ranks_every_class_and_age(make: type[Policy]) -> None:
    policy = make()
    classes = len(policy.bounds) + 1
    values = policy.values(Evidence.none(policy))
    assert values.shape == (classes, AGE_BINS)
    assert np.isfinite(values).all()
    assert list(policy.bounds) == sorted(set(policy.bounds))


@pytest.mark.parametrize("make", POLICIES)
def test_before_anything_was_seen_the_newer_is_worth_more(make: type[Policy]) -> None:
    values = make().values(Evidence.none(make()))
    assert (np.diff(values[0]) < 0).all()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_an_older_block_stands_in_no_younger_bin(one: int, other: int) -> None:
    assert age_bin(min(one, other)) <= age_bin(max(one, other))
    assert 0 <= age_bin(one) < AGE_BINS


def test_bins_are_five_an_octave_and_the_last_is_open() -> None:
    assert [age_bin(1 << octave) for octave in range(4)] == [1 + BINS_PER_OCTAVE * octave for octave in range(4)]
    assert age_bin(1 << 60) == AGE_BINS - 1

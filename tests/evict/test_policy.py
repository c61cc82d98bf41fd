"""The contract of a policy, for every one there is."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.evict import hazard
from kvcache.evict.hazard import Hazard
from kvcache.evict.policy import AGE_BINS, BINS_PER_OCTAVE, LRU, Evidence, Policy, age_bin, class_count

POLICIES = [LRU, Hazard]


@pytest.mark.parametrize("make", POLICIES)
def test_a_policy_ranks_every_class_and_age(make: type[Policy]) -> None:
    policy = make()
    values = policy.values(Evidence.none(policy))
    assert values.shape == (class_count(policy), AGE_BINS)
    assert np.isfinite(values).all()
    assert list(policy.bounds) == sorted(set(policy.bounds))
    assert list(policy.gaps) == sorted(set(policy.gaps))


@pytest.mark.parametrize("make", POLICIES)
def test_without_evidence_newer_blocks_are_worth_more(make: type[Policy]) -> None:
    values = make().values(Evidence.none(make()))
    assert (np.diff(values[0]) < 0).all()


@given(st.integers(0, 1 << 40), st.integers(0, 1 << 40))
def test_older_blocks_are_never_in_younger_age_bins(one: int, other: int) -> None:
    assert age_bin(min(one, other)) <= age_bin(max(one, other))
    assert 0 <= age_bin(one) < AGE_BINS


def test_bins_are_five_an_octave_and_the_last_is_open() -> None:
    assert [age_bin(1 << octave) for octave in range(4)] == [1 + BINS_PER_OCTAVE * octave for octave in range(4)]
    assert age_bin(1 << 60) == AGE_BINS - 1


def test_blocks_reused_soon_are_worth_more() -> None:
    """Of blocks used once again: those after a short while always came back within ten requests, the others never."""
    policy = Hazard()
    evidence = Evidence.none(policy)
    reused, waiting = evidence.reused.copy(), evidence.waiting.copy()
    soon, late = 1, len(policy.gaps) + 1
    reused[soon, age_bin(8)] = 100_000
    waiting[late, age_bin(100)] = 100_000
    values = policy.values(Evidence(waiting, reused, evidence.forgotten))
    assert values[soon, age_bin(4)] > 10 * values[late, age_bin(4)]


def test_a_rate_is_the_gittins_index_of_its_curve() -> None:
    """The index of Gittins against its definition, on curves of any form."""
    chance = np.random.default_rng(5).beta(0.2, 2, (4, len(hazard._REACHABLE_BINS)))
    found = hazard.gittins_index(chance)
    for of_class, best in zip(chance, found, strict=True):
        for a in range(len(best)):
            waits, uses, held, rates = 1.0, 0.0, 0.0, []
            for now, width in zip(of_class[a:], hazard._WIDTH[a:], strict=True):
                uses, held = uses + waits * now, held + width * waits * (1 - now / 2)
                waits *= 1 - now
                rates.append(uses / held)
            assert best[a] == pytest.approx(max(rates), rel=1e-6)

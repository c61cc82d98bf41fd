"""`benchmarks/classic_policies`: the compiled policies and their Python twins agree, and no policy beats foresight."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.trace.simulate import simulate
from tests.trace.test_simulate import traffic

ROOT = Path(__file__).parents[2]
NAMES = ("s3fifo", "arc", "lru2", "lfuda", "wtinylfu", "sieve")
needs_compiler = pytest.mark.skipif(not shutil.which(os.environ.get("CXX", "c++")), reason="no C++ compiler")


@pytest.fixture(scope="module")
def policies() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        import classic_policies

        yield classic_policies


def test_all_policies_are_tested(policies: Any) -> None:
    assert set(policies.CLASSICS) == set(NAMES)


@needs_compiler
@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1 << 30), capacity=st.integers(1, 60))
@settings(deadline=None, max_examples=15)
def test_compiled_policy_equals_its_reference(policies: Any, name: str, seed: int, capacity: int) -> None:
    trace = traffic(seed, 50)
    compiled = policies.simulate(trace, name, capacity)
    assert compiled.hits.tolist() == policies.simulate(trace, name, capacity, use_reference=True).hits.tolist()


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 1 << 30), capacity=st.integers(1, 80))
@settings(deadline=None, max_examples=15)
def test_no_policy_beats_opt(policies: Any, name: str, seed: int, capacity: int) -> None:
    trace = traffic(seed, 50)
    hits = policies.simulate(trace, name, capacity, use_reference=True).hits
    assert hits.sum() <= simulate(trace, "opt", capacity).hits.sum()
    with_room = policies.simulate(trace, name, max(1, trace.unique), use_reference=True).hits
    assert with_room.tolist() == simulate(trace, "opt", max(1, trace.unique)).hits.tolist()


@needs_compiler
def test_unknown_policy_is_refused(policies: Any) -> None:
    with pytest.raises(ValueError, match="policy 'mru'"):
        policies.simulate(traffic(0, 3), "mru", 5)

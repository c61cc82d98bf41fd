"""The compiled players and their twins find the same, for every policy, on any traffic; and facts that no policy may
break."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache import native
from kvcache.errors import ConfigError
from kvcache.evict.hazard import Hazard
from kvcache.trace.formats import Trace
from kvcache.trace.simulate import POLICIES, simulate


def traffic(seed: int, requests: int, *, heads: int = 6, longest: int = 12) -> Trace:
    """Conversations that grow, branch and come back: a block is named by all tokens up to it."""
    draw = Random(seed)
    known: list[list[tuple[int, ...]]] = [[]]
    chains, names = [], dict[tuple[int, ...], int]()
    for _ in range(requests):
        chain = list(draw.choice(known[-20:])) if draw.random() < 0.7 else []
        chain = chain[: draw.randint(0, len(chain))]
        for _ in range(draw.randint(0, longest)):
            chain.append((*chain[-1], draw.randrange(3)) if chain else (draw.randrange(heads),))
        known.append(chain)
        chains.append(np.array([names.setdefault(block, len(names)) for block in chain], np.int64))
    lengths = [16 * len(chain) for chain in chains]
    trace = Trace.of("traffic", 16, chains, list(range(requests)), lengths, [0] * requests)
    trace.check()
    return trace


@pytest.mark.skipif(not native.built, reason="the compiled core was not built")
@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 1 << 30), capacity=st.integers(1, 60))
@settings(deadline=None, max_examples=15)
def test_compiled_simulation_equals_the_reference(policy: str, seed: int, capacity: int) -> None:
    trace = traffic(seed, 50)
    assert (
        simulate(trace, policy, capacity).hits.tolist()
        == simulate(trace, policy, capacity, use_reference=True).hits.tolist()
    )


@pytest.mark.parametrize("policy", POLICIES)
@given(seed=st.integers(0, 1 << 30), capacity=st.integers(1, 80))
@settings(deadline=None, max_examples=15)
def test_no_policy_beats_opt_and_all_equal_at_full_size(policy: str, seed: int, capacity: int) -> None:
    trace = traffic(seed, 50)
    best = simulate(trace, "opt", capacity).hits.sum()
    assert simulate(trace, policy, capacity).hits.sum() <= best
    seen: set[int] = set()
    ideal = []
    for chain in trace:
        ideal.append(next((i for i, block in enumerate(chain) if int(block) not in seen), len(chain)))
        seen.update(chain.tolist())
    assert simulate(trace, policy, max(1, trace.unique)).hits.tolist() == ideal


def test_lru_equals_a_list_of_blocks() -> None:
    """A model of blocks and times of use, with nothing of the index in it."""
    for seed in range(8):
        trace, capacity = traffic(seed, 200), 25
        used: dict[int, tuple[int, int]] = {}  # time of use, and how deep in its chain
        hits = []
        for now, chain in enumerate(map(np.ndarray.tolist, trace)):
            found = next((i for i, block in enumerate(chain) if block not in used), len(chain))
            hits.append(found)
            used.update({block: (now, i) for i, block in enumerate(chain[:found])})
            for i, block in enumerate(chain[found:], found):
                if len(used) >= capacity:
                    old = [(time, -depth, b) for b, (time, depth) in used.items() if time < now]
                    if not old:
                        break
                    del used[min(old)[2]]
                used[block] = now, i
        assert simulate(trace, "lru", capacity).hits.tolist() == hits


def test_a_custom_policy_is_simulated_by_its_classes() -> None:
    class Greedy(Hazard):
        name = "greedy"
        ghosts = 1.0

    trace = traffic(3, 400)
    found = simulate(trace, Greedy(), 40)
    assert found.policy == "greedy"
    assert 0 < found.hit_rate < 1


@pytest.mark.parametrize(("policy", "capacity"), [("mru", 5), ("lru", 0)])
def test_invalid_arguments_are_refused(policy: str, capacity: int) -> None:
    with pytest.raises(ConfigError, match=r"expected|there is"):
        simulate(traffic(0, 3), policy, capacity)

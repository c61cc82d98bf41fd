"""What a trial counts, against a plain list."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.connector.vllm.identity import NamespaceKey
from kvcache.connector.vllm.observe_mode import ObserveMode

WHO = NamespaceKey()
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=4)


def chain(prompt: list[int]) -> list[bytes]:
    return [bytes(prompt[: i + 1]).ljust(32, b"\xff") for i in range(len(prompt))]


@given(st.lists(PROMPT, max_size=30), st.integers(1, 12))
def test_observed_hits_equal_an_lru_of_prefixes(prompts: list[list[int]], capacity: int) -> None:
    trial, known = ObserveMode(capacity * 10), []
    gone: set[bytes] = set()
    reasons = {"cold": 0, "evicted": 0}
    hits = asked = 0
    for prompt in prompts:
        digests = chain(prompt)
        found = next((i for i, d in enumerate(digests) if d not in known), len(digests))
        assert trial.lookup(WHO, digests, 4) == found
        if found < len(digests):
            reasons["evicted" if digests[found] in gone else "cold"] += 1
        for digest in reversed(digests[:found]):
            known.remove(digest)
            known.append(digest)
        trial.record_store(WHO, digests[found:], 10)
        known += [d for d in digests[found:] if d not in known]
        gone |= set(known[: max(0, len(known) - capacity)])
        del known[: max(0, len(known) - capacity)]
        hits, asked = hits + 4 * found, asked + 4 * len(digests)
    counters = trial.stats()["counters"]
    assert counters.get("asked_tokens", 0) == asked
    assert counters.get("hit_tokens", {}).get("host", 0) == hits
    assert trial.stats()["tiers"]["host"]["used_bytes"] == 10 * len(known)
    assert counters.get("misses", {}) == {reason: count for reason, count in reasons.items() if count}
    trial.close()


@given(st.integers(1, 20), st.integers(0, 20), st.integers(0, 3), st.sampled_from([1e-5, 1e-3]))
def test_the_saving_is_compute_time_minus_load_time(blocks: int, there: int, tail: int, token_s: float) -> None:
    trial, digests, block_bytes = ObserveMode(10**9), [bytes([i]) * 32 for i in range(blocks)], 4 * 1000
    trial.record_store(WHO, digests[:there], block_bytes)
    trial.lookup(WHO, digests, 4, block_bytes, 4 * blocks + tail)
    assert "saved_seconds" not in trial.stats()["counters"], "the engine's speed is not known yet"
    for _ in range(40):
        for tokens in (1, 20, 80):
            trial.computed(tokens, tokens * token_s)
    found = trial.lookup(WHO, digests, 4, block_bytes, 4 * blocks + tail)
    computed = min(4 * found, 4 * blocks + tail - 1) * token_s  # the last token is computed in any case
    loaded = (20e-6 + found * block_bytes / 8e9) if found else 0.0
    saved = trial.stats()["counters"].get("saved_seconds", 0.0)
    assert saved == pytest.approx(max(0.0, computed - loaded), rel=0.1, abs=0.1 * 4 * blocks * token_s)
    trial.close()


def test_tenants_share_no_hits() -> None:
    trial = ObserveMode(1000)
    trial.record_store(WHO, chain([1, 2]), 10)
    assert trial.lookup(NamespaceKey(tenant="other"), chain([1, 2]), 4) == 0
    assert trial.lookup(WHO, chain([1, 2]), 4) == 2
    trial.close()


def test_the_curve_shows_hits_at_larger_capacities() -> None:
    """Forty prompts of one block in turn, with room for twenty: an LRU finds nothing; with twice that, all."""
    trial = ObserveMode(20 * 10, samples=1000)
    prompts = [[bytes([i]).ljust(32, b"x")] for i in range(40)]
    for _ in range(30):
        for digests in prompts:
            trial.lookup(WHO, digests, 4, 10)
            trial.record_store(WHO, digests, 10)
        trial.curve()  # which takes in what waits: beyond a bound it would be left out
    points = {p["times"]: p["hit_rate"] for p in trial.curve()["tiers"]["host"]["points"]}
    found = trial.stats()
    trial.close()
    assert "hit_tokens" not in found["counters"] or not sum(found["counters"]["hit_tokens"].values())
    assert points[1.0] < 0.02
    assert points[2.0] == points[4.0] > 0.95
    assert found["curve"]["host"]["2"] == points[2.0]

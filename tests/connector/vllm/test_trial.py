"""What a trial counts, against a plain list."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.trial import Trial

WHO = Who()
PROMPT = st.lists(st.integers(0, 2), min_size=1, max_size=4)


def chain(prompt: list[int]) -> list[bytes]:
    return [bytes(prompt[: i + 1]).ljust(32, b"\xff") for i in range(len(prompt))]


@given(st.lists(PROMPT, max_size=30), st.integers(1, 12))
def test_an_lru_of_prefixes(prompts: list[list[int]], capacity: int) -> None:
    trial, known = Trial(capacity * 10), []
    hits = asked = 0
    for prompt in prompts:
        digests = chain(prompt)
        found = next((i for i, d in enumerate(digests) if d not in known), len(digests))
        assert trial.ask(WHO, digests, 4) == found
        for digest in reversed(digests[:found]):
            known.remove(digest)
            known.append(digest)
        trial.keep(WHO, digests[found:], 10)
        known += [d for d in digests[found:] if d not in known]
        del known[: max(0, len(known) - capacity)]
        hits, asked = hits + 4 * found, asked + 4 * len(digests)
    counters = trial.stats()["counters"]
    assert counters.get("asked_tokens", 0) == asked
    assert counters.get("hit_tokens", {}).get("host", 0) == hits
    assert trial.stats()["tiers"]["host"]["used_bytes"] == 10 * len(known)


def test_tenants_keep_apart() -> None:
    trial = Trial(1000)
    trial.keep(WHO, chain([1, 2]), 10)
    assert trial.ask(Who(tenant="other"), chain([1, 2]), 4) == 0
    assert trial.ask(WHO, chain([1, 2]), 4) == 2

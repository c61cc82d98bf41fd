"""The prefixes that prompts share, held against trying every one."""

from __future__ import annotations

from collections import defaultdict
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from kvcache.observe.recent_requests import SUBSUMED_SHARE, RecentRequest, find_prefix, prefixes

SPACE = b"n" * 32


def chain(blocks: tuple[int, ...], space: bytes = SPACE) -> bytes:
    packed, parent = b"", space
    for block in blocks:
        parent = sha256(parent + bytes([block])).digest()
        packed += parent
    return packed


def asked(blocks: tuple[int, ...], *, time: float = 0.0, found: int = 0, space: bytes = SPACE) -> RecentRequest:
    return RecentRequest(f"r{time}", space, (), 16, chain(blocks, space), 0, time, hit_blocks=found)


CHAINS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6).map(tuple), max_size=20)


@given(CHAINS)
def test_every_shared_prefix_is_reported(chains: list[tuple[int, ...]]) -> None:
    told = {p.signature: p for p in prefixes([asked(each, time=i) for i, each in enumerate(chains)], 10_000)}
    begun: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for i, each in enumerate(chains):
        for end in range(1, len(each) + 1):
            begun[each[:end]].append(i)
    # where the requests of a prefix part, or end: no longer one has them all
    shared = {
        prefix: who
        for prefix, who in begun.items()
        if len(who) > 1 and all(begun[longer] != who for longer in begun if longer[:-1] == prefix)
    }
    expected = {
        chain(prefix)[-32:]: (len(prefix), len(who), max(who))
        for prefix, who in shared.items()
        if not any(
            len(longer) > len(prefix) and longer[: len(prefix)] == prefix and len(of) >= SUBSUMED_SHARE * len(who)
            for longer, of in shared.items()
        )
    }
    assert {s: (p.blocks, p.requests, p.last) for s, p in told.items()} == expected


def test_prefixes_are_sorted_by_value_per_namespace() -> None:
    other = b"m" * 32
    prompts = [asked((1, 2, 3, i), found=2, time=i) for i in range(3)]
    prompts += [asked((1, i), space=other) for i in range(9)] + [asked((7,))]
    long, short = prefixes(prompts, 5)
    assert (short.namespace, short.blocks, short.requests) == (SPACE, 3, 3)
    assert (short.hit_blocks, short.saved_blocks, short.last) == (6, 6, 2)
    assert (long.namespace, long.blocks, long.requests, long.saved_blocks) == (other, 1, 9, 8)
    assert [p.signature for p in prefixes(prompts, 1)] == [long.signature]


def test_a_prefix_name_resolves_to_its_prompt() -> None:
    prompts = [asked((1, 2, 3, 4)), asked((1, 2, 5))]
    (shared,) = prefixes(prompts, 5)
    found = find_prefix(prompts, shared.name)
    assert found is not None
    assert (found[0], found[1]) == (prompts[0], 2)
    assert find_prefix(prompts, "00" * 8) is None
    assert find_prefix(prompts, "xyz") is None
    assert find_prefix(prompts, shared.name[:8]) is None

"""Which lengths of a prefix a side pool allows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.connector.sglang.pool_store import lengths_with_all_pages, lengths_with_last_pages


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8))
def test_prefix_lengths_equal_their_definition(here: list[bool], last: int) -> None:
    lengths = range(1, len(here) + 1)
    assert lengths_with_all_pages(here) == {n for n in lengths if all(here[:n])}
    assert lengths_with_last_pages(here, last) == {n for n in lengths if all(here[max(0, n - last) : n])}

"""SGLang's page chain, as its specification has it."""

from __future__ import annotations

from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.chain import page_digests
from kvcache.errors import TokenError


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(1, 9), st.binary(max_size=32))
def test_a_page_digest_depends_on_all_earlier_pages(tokens: list[int], size: int, seed: bytes) -> None:
    expected, before = [], seed
    for at in range(0, len(tokens) - size + 1, size):
        before = sha256(before + b"".join(t.to_bytes(4, "little") for t in tokens[at : at + size])).digest()
        expected.append(before)
    assert page_digests(tokens, size, seed) == expected


def test_an_invalid_token_id_is_refused() -> None:
    with pytest.raises(TokenError):
        page_digests([-1], 1)

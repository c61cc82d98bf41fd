"""The names of a request's blocks: what is in them and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.connector.vllm.identity import BlockDigests, DigestOrigin, unnamed_reason

SIZE = 4


@dataclass
class Position:
    offset: int
    length: int


@dataclass
class Feature:
    identifier: str
    mm_position: Position


@dataclass
class Request:
    all_token_ids: list[int]
    cache_salt: str | None = None
    mm_features: list[Feature] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    prompt_embeds: Any = None
    resumable: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)


def names(request: Request, origin: DigestOrigin = "chain", hash_tokens: int = SIZE) -> list[bytes]:
    return list(BlockDigests(request, origin, SIZE, hash_tokens).up_to(1 << 20))


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.lists(st.integers(1, 9), max_size=12))
@pytest.mark.parametrize("origin", ["chain", "pages"])
def test_chunking_does_not_change_digests(origin: DigestOrigin, tokens: list[int], steps: list[int]) -> None:
    growing = Request([])
    digests = BlockDigests(growing, origin, SIZE, SIZE)
    for step in steps:
        growing.all_token_ids += tokens[len(growing.all_token_ids) :][:step]
        digests.up_to(len(growing.all_token_ids) // SIZE)
    growing.all_token_ids += tokens[len(growing.all_token_ids) :]
    assert list(digests.up_to(100)) == names(Request(tokens), origin)
    assert len(names(Request(tokens), origin)) == len(tokens) // SIZE


def test_media_salt_and_position_change_the_digest() -> None:
    tokens = list(range(16))

    def image(identifier: str, offset: int) -> list[Feature]:
        return [Feature(identifier, Position(offset, 3))]

    plain = names(Request(tokens))
    there = names(Request(tokens, mm_features=image("a" * 64, 6)))
    assert there[0] == plain[0]
    assert there[1] != plain[1]
    assert names(Request(tokens, mm_features=image("b" * 64, 6)))[1] != there[1]
    assert names(Request(tokens, mm_features=image("a" * 64, 5)))[1] != there[1]
    assert names(Request(tokens, mm_features=image("a" * 64, 6), cache_salt="s"))[0] != plain[0]
    # a salt that reads like a medium is another thing
    assert names(Request(tokens, cache_salt="6 a"))[0] != names(Request(tokens, mm_features=image("a", 6)))[0]


def test_vllm_hashes_of_smaller_blocks_are_accepted() -> None:
    hashes = [bytes([i]) * 32 for i in range(7)]
    request = Request(list(range(15)), block_hashes=hashes)
    assert names(request, "vllm", hash_tokens=2) == [hashes[1], hashes[3], hashes[5]]


def test_page_digests_equal_those_of_sglang() -> None:
    (found,) = json.loads((Path(__file__).parents[2] / "vectors/key.json").read_text())["sglang"]
    size = found["page_tokens"]
    digests = BlockDigests(Request(found["token_ids"]), "pages", size, size).up_to(100)
    assert [d.hex() for d in digests] == found["digests"]


def test_a_request_without_digests_is_not_cached() -> None:
    assert unnamed_reason(Request([1]), "chain") == ""
    assert unnamed_reason(Request([1], prompt_embeds=object()), "chain") == "embeddings"
    assert unnamed_reason(Request([1], prompt_embeds=object()), "vllm") == ""
    assert unnamed_reason(Request([1], mm_features=[Feature("a", Position(0, 1))]), "pages") == "media"
    assert unnamed_reason(Request([1], resumable=True), "vllm") == "streamed input"

"""What users of other connectors have met, as far as no engine is needed to see that it does not happen here. The
reports are on the page of vLLM, by their numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

import kvcache
from kvcache.cache.api import Hit
from kvcache.testing.naive_cache import NaiveCache, NaiveRequest
from tests.connector.vllm.conftest import TOKENS, blocks, output, request, store_three

MakeConnector = Callable[..., tuple[Any, Any]]


@pytest.fixture
def cache() -> Iterator[Any]:
    settings: dict[str, Any] = {"host": {"capacity_bytes": "1MiB"}, "nvme": {"enabled": False}}
    with closing(kvcache.open(**settings, control={"enabled": False})) as cache:
        yield cache


@pytest.fixture
def filled(make_connector: MakeConnector, cache: Any) -> Any:
    """The scheduler's side of an engine that has stored a prompt of three blocks."""
    scheduling, working = make_connector(cache, "async")
    asked = request("first")
    store_three(scheduling, working, asked)
    scheduling.on_request_finished(asked)
    return scheduling


def counted(cache: Any) -> tuple[float, float]:
    return cache.counters.get("requests"), cache.counters.get("misses")


def test_prompt_logprobs_are_not_counted_as_misses(filled: Any, cache: Any) -> None:
    """vllm 57596"""
    before, asked = counted(cache), request("logprobs")
    asked.skip_reading_prefix_cache = True
    assert filled.match_tokens(asked, 0) == (0, False)
    filled.on_allocated(asked, blocks([4, 5, 6]), 0)
    filled.on_request_finished(asked)
    assert counted(cache) == before


def test_a_repeated_lookup_is_counted_once(filled: Any, cache: Any) -> None:
    """vllm 18232"""
    (before, _), asked = counted(cache), request("again")
    for _ in range(5):
        assert filled.match_tokens(asked, 0) == (3 * TOKENS, True)
    assert counted(cache)[0] == before
    filled.on_allocated(asked, blocks([4, 5, 6]), 3 * TOKENS)
    assert filled.match_tokens(asked, 3 * TOKENS) == (0, False), "asked once more when its load is over"
    assert counted(cache)[0] == before + 1


@pytest.mark.parametrize("local", [0, 1, 2, 3])
def test_local_hits_are_not_overwritten_by_a_load(filled: Any, local: int) -> None:
    """LMCache 2206, 2091, 2574"""
    asked = request("local")
    tokens, _ = filled.match_tokens(asked, local * TOKENS)
    assert tokens == (3 - local) * TOKENS
    filled.on_allocated(asked, blocks([4, 5, 6]), tokens)
    loads = filled.build_metadata(output()).loads
    assert [(move.first, move.pages) for move in loads] == ([(local, ((4, 5, 6)[local:],))] if tokens else [])


def test_a_load_covers_the_blocks_that_vllm_allocated(filled: Any) -> None:
    """LMCache 4614, vllm 52617"""
    asked = request("less")
    assert filled.match_tokens(asked, 0) == (3 * TOKENS, True)
    filled.on_allocated(asked, blocks([4, 5, 6]), 2 * TOKENS)
    (move,) = filled.build_metadata(output()).loads
    assert (move.first, move.pages) == (0, ((4, 5),))


@pytest.mark.parametrize("told", ["pages", "request"])
def test_a_failed_load_is_not_repeated(filled: Any, told: str) -> None:
    """vllm 49176"""
    asked = request("failed")
    assert filled.match_tokens(asked, 0) == (3 * TOKENS, True)
    filled.on_allocated(asked, blocks([4, 5, 6]), 3 * TOKENS)
    filled.on_loads_finished({5} if told == "pages" else set(), ["failed"] if told == "request" else [], ["failed"])
    for _ in range(3):
        assert filled.match_tokens(asked, 0) == (0, False)
    assert filled.match_tokens(request("another"), 0) == (3 * TOKENS, True)


class Undecided(NaiveCache):
    """A shared tier that never answers."""

    def namespace(self, *given: Any, **named: Any) -> Any:
        handle = super().namespace(*given, **named)
        handle.request = lambda name="", **_: Asking(handle, name)  # type: ignore[method-assign]
        return handle


class Asking(NaiveRequest):
    def match(self, *given: Any, **named: Any) -> Hit:
        return replace(super().match(*given, **named), pending=True)


def test_a_lookup_without_answer_times_out(make_connector: MakeConnector, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm 53130, 23620"""
    scheduling, _ = make_connector(Undecided())
    now = [0.0]
    monkeypatch.setattr(sys.modules[type(scheduling).__module__], "monotonic", lambda: now[0])
    asked = request("waits")
    for _ in range(3):
        assert scheduling.match_tokens(asked, 0) == (None, False)
    now[0] = 0.2  # later than `lookup_s`
    assert scheduling.match_tokens(asked, 0) == (0, False)

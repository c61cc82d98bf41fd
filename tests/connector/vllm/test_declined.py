"""Whatever a caller asks for, the engine's scheduler sees no error of ours: the request is a miss, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.layout import KVLayout
from kvcache.connector.vllm.bounds import Bounds
from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.model import Model
from kvcache.connector.vllm.tracked import Wishes
from kvcache.errors import AccessError, ConfigError
from kvcache.hierarchy.edge import check_ttl
from kvcache.hierarchy.naive import NaiveCache
from tests.connector.vllm.conftest import MODEL, blocks, output, request


class Refusing(NaiveCache):
    """As a daemon does."""

    def namespace(self, layout: KVLayout, **given: Any) -> Any:
        if given["tenant"] == "other":
            raise AccessError("tenant 'other': you came in as 'mine'")
        if given["tenant"] == "many":
            raise ConfigError("256 namespaces are bound already")
        if given["tenant"] == "broken":
            raise ZeroDivisionError("ours")
        return super().namespace(layout, **given)


@pytest.fixture
def scheduling(sides: Callable[..., tuple[Any, Any]]) -> Any:
    return sides(Refusing())[0]


def step(scheduling: Any, asked: Any) -> Any:
    """As vLLM's scheduler: match, allocate, one step that computes all of it."""
    assert scheduling.matched(asked, 0) == (0, False)
    scheduling.allocated(asked, blocks([1, 2, 3]), 0)
    message = scheduling.message(output(asked, [1, 2, 3]))
    scheduling.steps.end()
    scheduling.finished(asked)
    return message


@pytest.mark.parametrize(
    ("tenant", "kind"), [("other", "AccessError"), ("many", "ConfigError"), ("broken", "ZeroDivisionError")]
)
def test_a_namespace_that_is_refused_is_a_miss(
    scheduling: Any, tenant: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3):
        assert step(scheduling, request(f"r{i}", tenant=tenant)).stores == []
        assert len(step(scheduling, request(f"s{i}")).stores) == 1, "others go on"
    assert scheduling.declined.counts == {kind: 3}
    assert sum(kind in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("ttl", [0, 0.0, -1, 1e300, float("nan"), float("inf")])
def test_a_ttl_that_is_no_time_to_come_is_ignored_and_said(
    scheduling: Any, ttl: float, caplog: pytest.LogCaptureFixture
) -> None:
    (move,) = step(scheduling, request("r", ttl=ttl)).stores
    assert move.ttl_s is None
    assert "kvcache.ttl" in caplog.text
    assert scheduling.declined.counts == {}


def test_digests_that_cannot_be_made_stop_nobody(scheduling: Any) -> None:
    for wishes in ({}, {"skip_load": True}):
        bad = request("r", **wishes)
        bad.block_hashes = None
        assert step(scheduling, bad).stores == []
    assert scheduling.declined.counts == {"TypeError": 2}


def test_tenants_that_callers_make_up_fill_no_memory_and_no_log(
    scheduling: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(1500):
        step(scheduling, request(f"r{i}", tenant=f"t{i}", ttl=-1 - i))
    assert len(scheduling._bound) <= 1024
    assert len(caplog.records) <= 300


def test_the_oldest_namespace_leaves_first_and_is_told_of_no_more() -> None:
    class Heard:
        def __init__(self) -> None:
            self.bounds: list[Any] = []

        def follow(self, model: Model, bound: Any) -> None:
            self.bounds.append(bound)

        def leave(self, bound: Any) -> None:
            self.bounds.remove(bound)

    heard: Any = Heard()
    bounds, cache = Bounds(heard, most=2), NaiveCache()
    one = bounds.bind(MODEL, cache, Who("1"))
    bounds.bind(MODEL, cache, Who("2"))
    assert bounds.bind(MODEL, cache, Who("1")) is one
    three = bounds.bind(MODEL, cache, Who("3"))
    assert bounds.get(Who("2")) is None
    assert heard.bounds == [one, three]


@given(st.dictionaries(st.sampled_from(["ttl", "tenant", "max_load_tokens", "skip_load"]), st.floats() | st.integers()))
def test_whatever_is_wished_what_is_left_can_be_asked_for(wishes: dict[str, Any]) -> None:
    found, _ = Wishes.of({f"kvcache.{name}": value for name, value in wishes.items()})
    assert check_ttl(found.ttl) == found.ttl

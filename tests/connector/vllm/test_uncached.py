"""Whatever a caller asks for, the engine's scheduler sees no error of ours: the request is a miss, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.layout import KVLayout
from kvcache.cache.api import Hit, check_ttl
from kvcache.connector.vllm.identity import NamespaceKey
from kvcache.connector.vllm.kv_layout import ModelIdentity
from kvcache.connector.vllm.namespaces import Namespaces
from kvcache.connector.vllm.request_state import RequestOptions
from kvcache.daemon.client.request import UNREACHABLE
from kvcache.errors import AccessError, ClosedError, ConfigError, UnreachableError
from kvcache.observe.reasons import REASONS, meaning
from kvcache.testing.naive_cache import NaiveCache, NaiveRequest
from tests.connector.vllm.conftest import MODEL, blocks, output, request


class Refusing(NaiveCache):
    """As a daemon does."""

    def namespace(self, layout: KVLayout, **given: Any) -> Any:
        if given["tenant"] == "other":
            raise AccessError("tenant 'other': you came in as 'mine'")
        if given["tenant"] == "many":
            raise ConfigError("256 namespaces are bound already")
        if given["tenant"] == "away":
            raise UnreachableError("no answer")
        if given["tenant"] == "closed":
            raise ClosedError("closed")
        if given["tenant"] == "broken":
            raise ZeroDivisionError("ours")
        return super().namespace(layout, **given)


def counts(scheduling: Any) -> dict[str, int]:
    found: dict[str, int] = scheduling.uncached.counters.tree().get("declined", {})
    assert found.keys() <= REASONS["declined", "reason"].keys()
    return found


@pytest.fixture
def scheduling(make_connector: Callable[..., tuple[Any, Any]]) -> Any:
    return make_connector(Refusing())[0]


def step(scheduling: Any, asked: Any) -> Any:
    """As vLLM's scheduler: match, allocate, one step that computes all of it."""
    assert scheduling.match_tokens(asked, 0) == (0, False)
    scheduling.on_allocated(asked, blocks([1, 2, 3]), 0)
    message = scheduling.build_metadata(output(asked, [1, 2, 3]))
    scheduling.step_timer.end()
    scheduling.on_request_finished(asked)
    return message


@pytest.mark.parametrize(
    ("tenant", "kind", "reason"),
    [
        ("other", "AccessError", "refused"),
        ("many", "ConfigError", "refused"),
        ("away", "UnreachableError", "unreachable"),
        ("closed", "ClosedError", "failed"),
        ("broken", "ZeroDivisionError", "failed"),
    ],
)
def test_a_refused_namespace_is_a_miss(
    scheduling: Any, tenant: str, kind: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    for i in range(3):
        assert step(scheduling, request(f"r{i}", tenant=tenant)).stores == []
        assert len(step(scheduling, request(f"s{i}")).stores) == 1, "others go on"
    assert counts(scheduling) == {reason: 3}
    assert sum(kind in record.getMessage() for record in caplog.records) == 1


@pytest.mark.parametrize("ttl", [0, 0.0, -1, 1e300, float("nan"), float("inf")])
def test_an_invalid_ttl_is_logged_and_ignored(scheduling: Any, ttl: float, caplog: pytest.LogCaptureFixture) -> None:
    (move,) = step(scheduling, request("r", ttl=ttl)).stores
    assert move.ttl_s is None
    assert "kvcache.ttl" in caplog.text
    assert counts(scheduling) == {}


def test_failed_digests_fail_no_request(scheduling: Any) -> None:
    for request_options in ({}, {"skip_load": True}):
        bad = request("r", **request_options)
        bad.block_hashes = None
        assert step(scheduling, bad).stores == []
    assert counts(scheduling) == {"failed": 2}


def test_an_uncached_request_is_counted_once(scheduling: Any, tmp_path: Path) -> None:
    lost = SimpleNamespace(lora_name="lost", lora_path=str(tmp_path / "lost"))
    for name, more in {
        "r": {"resumable": True},
        "s": {"lora_request": lost},
        "t": {"resumable": True, "lora_request": lost},
    }.items():
        asked = request(name)
        vars(asked).update(more)
        assert scheduling.match_tokens(asked, 0) == (0, False)
        assert step(scheduling, asked).stores == []
        assert name not in scheduling.uncached, "nothing is kept of a request that is over"
    assert counts(scheduling) == {"streamed input": 2, "adapter": 1}


def test_the_log_says_more_than_the_label(scheduling: Any, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("r", "s"):
        asked = request(name)
        asked.resumable = True
        step(scheduling, asked)
    (record,) = caplog.records
    assert meaning("declined", "reason", "streamed input") in record.getMessage()


def test_requests_before_registration_are_counted(scheduling: Any) -> None:
    model, scheduling._model = scheduling._model, None
    asked = request("r")
    assert scheduling.match_tokens(asked, 0) == (0, False)
    assert counts(scheduling) == {}, "it is asked about again, and may be admitted later"
    assert step(scheduling, asked).stores == []
    scheduling._model = model
    assert len(step(scheduling, request("s")).stores) == 1
    assert counts(scheduling) == {"starting": 1}


def test_requests_without_a_daemon_are_counted(scheduling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as away:
        away.setattr(NaiveRequest, "match", lambda *_, **__: Hit(tokens=0, blocks=0, reason=UNREACHABLE))
        for name in ("r", "s"):
            step(scheduling, request(name))
        waits = request("t")
        assert scheduling.match_tokens(waits, 0) == (0, False)
    assert step(scheduling, request("u")).stores
    step(scheduling, waits)
    assert counts(scheduling) == {"unreachable": 2}, "one that was asked about again when it was back is none"


@pytest.fixture
def filled(make_connector: Callable[..., tuple[Any, Any]]) -> Any:
    """The scheduler's side of an engine that has stored a prompt."""
    scheduling, working = make_connector(NaiveCache())
    message = step(scheduling, request("first"))
    working.begin(message)
    working.store(message)
    return scheduling


def broken(*_: Any) -> None:
    raise ZeroDivisionError("ours")


def test_a_hit_whose_store_fails_counts_as_cached(
    filled: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduling = filled
    monkeypatch.setattr(scheduling, "_store", broken)
    asked = request("second")
    tokens, _ = scheduling.match_tokens(asked, 0)
    assert tokens > 0
    scheduling.on_allocated(asked, blocks([4, 5, 6]), tokens)
    assert scheduling.build_metadata(output(asked, [4, 5, 6], tokens)).stores == []
    assert counts(scheduling) == {}
    assert "the rest of a request is not cached: ZeroDivisionError" in caplog.text
    step(scheduling, request("third", digests=[bytes([9]) * 32] * 3))
    assert counts(scheduling) == {"failed": 1}


def test_a_hit_that_cannot_be_reported_is_released(filled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = request("second")
    tokens, _ = filled.match_tokens(asked, 0)
    with monkeypatch.context() as once:
        once.setattr(filled.requests["second"].digests, "up_to", broken)
        filled.on_allocated(asked, blocks([4, 5, 6]), tokens)
    message = filled.build_metadata(output(asked, [4, 5, 6], tokens))
    assert [move.known_digests for move in message.loads] == [-1], "its load fails"
    assert message.stores == []
    assert counts(filled) == {"failed": 1}


def test_a_disabled_engine_counts_each_request(scheduling: Any) -> None:
    scheduling.disabled_reason = "a reason"
    for i in range(3):
        assert step(scheduling, request(f"r{i}")).stores == []
    assert counts(scheduling) == {"off": 3}


def test_invented_tenants_fill_neither_memory_nor_log(scheduling: Any, caplog: pytest.LogCaptureFixture) -> None:
    for i in range(1500):
        step(scheduling, request(f"r{i}", tenant=f"t{i}", ttl=-1 - i))
    assert len(scheduling._namespaces) <= 1024
    assert len(caplog.records) <= 300


def test_the_oldest_namespace_is_dropped_unreported() -> None:
    class Heard:
        def __init__(self) -> None:
            self.namespaces: list[Any] = []

        def subscribe(self, model: ModelIdentity, handle: Any) -> None:
            self.namespaces.append(handle)

        def unsubscribe(self, handle: Any) -> None:
            self.namespaces.remove(handle)

    heard: Any = Heard()
    namespaces, cache = Namespaces(heard, most=2), NaiveCache()
    one = namespaces.bind(MODEL, cache, NamespaceKey("1"))
    namespaces.bind(MODEL, cache, NamespaceKey("2"))
    assert namespaces.bind(MODEL, cache, NamespaceKey("1")) is one
    three = namespaces.bind(MODEL, cache, NamespaceKey("3"))
    assert namespaces.get(NamespaceKey("2")) is None
    assert heard.namespaces == [one, three]


@given(st.dictionaries(st.sampled_from(["ttl", "tenant", "max_load_tokens", "skip_load"]), st.floats() | st.integers()))
def test_accepted_request_options_have_valid_ttls(request_options: dict[str, Any]) -> None:
    found, _ = RequestOptions.of({f"kvcache.{name}": value for name, value in request_options.items()})
    assert check_ttl(found.ttl) == found.ttl

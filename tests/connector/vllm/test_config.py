"""What users write, in the configuration and beside a request."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

import kvcache
from kvcache.connector.vllm.config import Options, parse_options
from kvcache.connector.vllm.request_state import RequestOptions
from kvcache.errors import ConfigError
from tests.connector.vllm.conftest import request, store_three


def test_options_have_defaults() -> None:
    assert parse_options({}, Options) == Options()


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"lod": "sync"}, r"'lod': no such setting; expected one of config, settings, address"),
        ({"load": "later"}, r"load = 'later'"),
        ({"load_s": 0}, r"load_s = 0"),
        ({"tenant": ""}, r"tenant = ''"),
    ],
)
def test_invalid_options_are_refused(extra: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_options(extra, Options)


def test_invalid_request_options_are_logged_and_ignored() -> None:
    request_options, wrong = RequestOptions.of(
        {
            "kvcache.skip_load": True,
            "kvcache.ttl": 60,
            "kvcache.tenant": "a",
            "kvcache.max_load_tokens": True,
            "kvcache.skip_store": "yes",
            "kvcache.agent": 7,
            "kvcache.nonsense": 1,
            "do_remote_decode": False,
        }
    )
    assert (request_options.skip_load, request_options.ttl, request_options.tenant) == (True, 60.0, "a")
    assert (request_options.max_load_tokens, request_options.skip_store, request_options.agent) == (None, False, None)
    assert wrong == (
        "kvcache.max_load_tokens = True, kvcache.skip_store = 'yes', kvcache.agent = 7, kvcache.nonsense = 1"
    )
    assert RequestOptions.of({"kvcache.ttl": -1}) == (RequestOptions(), "kvcache.ttl = -1")
    assert RequestOptions.of(None) == (RequestOptions(), "")


def test_agent_and_session_reach_the_ranks_events(make_connector: Callable[..., tuple[Any, Any]]) -> None:
    settings: dict[str, Any] = {"host": {"capacity_bytes": "1MiB"}, "nvme": {"enabled": False}}
    with closing(kvcache.open(**settings, control={"enabled": False})) as cache:
        scheduling, working = make_connector(cache)
        asked = request("r", agent="planner", session="one")
        store_three(scheduling, working, asked)
        (stored,) = [event for event in cache.events.last() if event.kind == "stored"]
        assert (stored.request, stored.agent, stored.session, stored.blocks) == ("r", "planner", "one", 3)

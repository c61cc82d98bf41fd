"""Why a daemon's client missed: as well told as in the process, though the client hashes its tokens itself."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from kvcache.block.layout import KVLayout
from kvcache.daemon.server.client_session import MAX_SIGNATURE_BYTES
from kvcache.log import MAX_LABEL_CHARS
from kvcache.observe.recent_requests import RecentRequest
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to
from tests.daemon.in_process_daemon import InProcessDaemon, until

OLD, NEW = list(range(40)), [*range(22), 501, 502, *range(23, 39)]


def ask(handle: Any, ids: list[int], name: str, *, store: bool = False, **more: Any) -> None:
    with handle.request(id=name) as r:
        r.match(ids, **more)
        r.admit()
        if store:
            engine, blocks = Engine(LAYOUT), list(range(len(r.signatures)))
            assert r.store(engine.described, engine.ids(blocks)).wait(60)


def test_a_miss_names_its_agent_and_session(in_process: InProcessDaemon) -> None:
    handle = bound_to(in_process.open())
    with handle.request(id="named", agent="planner", session="s" * 1000) as r:
        r.match(OLD)
        r.admit()
        engine = Engine(LAYOUT)
        assert r.store(engine.described, engine.ids(list(range(10)))).wait(60)
    told = story(in_process, "named")
    assert (told["reason"], told["agent"], told["session"]) == ("cold", "planner", "s" * MAX_LABEL_CHARS)
    stored = next(event for event in in_process.cache.events.last() if event.kind == "stored")
    assert (stored.request, stored.agent, stored.session) == ("named", "planner", "s" * MAX_LABEL_CHARS)


def asked(in_process: InProcessDaemon, name: str) -> RecentRequest:
    found = in_process.cache.miss_explainer.recent_requests.find(name)
    assert found is not None
    return found


def story(in_process: InProcessDaemon, name: str) -> dict[str, Any]:
    return in_process.cache.miss_explainer.explain(asked(in_process, name), in_process.cache.namespaces)


@pytest.mark.parametrize("digests", [False, True])
def test_a_diverged_miss_names_the_token(in_process: InProcessDaemon, digests: bool) -> None:
    def named(ids: list[int]) -> dict[str, Any]:
        ends = range(4, len(ids) + 1, 4)
        return {"digests": [hashlib.sha256(str(ids[:end]).encode()).digest() for end in ends]} if digests else {}

    handle = bound_to(in_process.open())
    ask(handle, OLD, "old", store=True, **named(OLD))
    ask(handle, NEW, "new", **named(NEW))
    told = story(in_process, "new")
    assert (told["reason"], told["block"], told["token"]) == ("diverged", 5, 22)
    assert told["other"]["request"] == "old"
    assert (told["before"][-2:], told["ours"][:3], told["theirs"][:2]) == ([20, 21], [501, 502, 23], [22, 23])
    assert told["meet"]["tokens"] >= 8
    until(lambda: in_process.cache.counters.tree()["misses"] == {"cold": 1, "diverged": 1})


def test_divergence_within_the_first_block_is_found(in_process: InProcessDaemon) -> None:
    wide = KVLayout.mha(layers=1, kv_heads=1, head_dim=4, block_tokens=16)
    handle = in_process.open().namespace(wide, model="m", revision="1")
    ask(handle, OLD, "old")
    ask(handle, [*range(9), 77, *range(10, 40)], "new")
    told = story(in_process, "new")
    assert (told["reason"], told["token"], told["other"]["request"]) == ("diverged", 9, "old")
    until(lambda: in_process.cache.counters.tree()["misses"] == {"cold": 1, "diverged": 1})


def test_a_namespace_mismatch_names_the_field(in_process: InProcessDaemon) -> None:
    cache = in_process.open()
    ask(bound_to(cache), OLD, "old", store=True)
    with cache.namespace(LAYOUT, model="another", revision="1").request(id="apart") as r:
        assert r.match(OLD).reason == "cold", "an answer tells nothing of other namespaces"
        r.admit()
    told = story(in_process, "apart")
    assert (told["reason"], told["other"]["request"]) == ("apart", "old")
    assert "model" in told["differs"]


def test_a_full_hit_sends_no_tokens(in_process: InProcessDaemon) -> None:
    handle = bound_to(in_process.open())
    ask(handle, OLD, "old", store=True)
    ask(handle, OLD, "again")
    assert asked(in_process, "old").ids[0].tolist() == OLD
    assert asked(in_process, "again").ids == []


def test_sent_tokens_count_in_the_clients_memory(in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = bound_to(in_process.open())
    assert MAX_SIGNATURE_BYTES > 1 << 20
    monkeypatch.setattr("kvcache.daemon.server.client_session.MAX_SIGNATURE_BYTES", 10 * 32 + 40 * 4 - 1)
    with handle.request(id="much") as r:
        r.match(OLD)
        r.admit()
        assert asked(in_process, "much").ids == [], "passed over, and nothing fails"
    monkeypatch.setattr("kvcache.daemon.server.client_session.MAX_SIGNATURE_BYTES", 10 * 32 + 40 * 4)
    ask(handle, OLD, "enough")
    assert asked(in_process, "enough").ids[0].tolist() == OLD

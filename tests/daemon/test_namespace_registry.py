"""Namespaces that clients bind: how many, and that they are released."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kvcache.daemon.server import namespace_registry as of_bindings
from kvcache.daemon.server.namespace_registry import NamespaceRegistry
from kvcache.errors import AccessError, ConfigError, LayoutError
from tests.contract.fake_engine import wait_background
from tests.daemon.daemon_process import bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon, until
from tests.daemon.test_tenant import ACME, BETA, came_in, everybody

Make = Callable[..., InProcessDaemon]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that a test reaches."""
    monkeypatch.setattr(of_bindings, "MAX_BOUND_NAMESPACES", 12)
    monkeypatch.setattr(of_bindings, "MAX_IDLE_NAMESPACES", 4)
    monkeypatch.setattr(of_bindings, "IDLE_EVICTION_BATCH", 2)
    for module in ("server.client_session", "client.request"):
        monkeypatch.setattr(f"kvcache.daemon.{module}.MAX_CLIENT_NAMESPACES", 8)


@pytest.mark.usefixtures("few")
def test_a_client_of_many_namespaces_releases_the_oldest(in_process: InProcessDaemon) -> None:
    cache, tokens = in_process.open(), list(range(8))
    handles = [bound_to(cache, cache_salt=str(i)) for i in range(20)]
    (session,) = in_process.daemon.sessions
    expected = []
    for i, handle in enumerate(handles):
        expected.append(store(handle, tokens, i))
        assert len(session._handles) <= 8
    for i, handle in enumerate(handles):
        assert load(handle, tokens) == expected[i]
        assert len(session._handles) <= 8
    with handles[0].request() as open_one:
        assert open_one.match(tokens).blocks == 2
        for handle in handles[1:]:
            load(handle, tokens)
        assert open_one.match(tokens).blocks == 2, "what is open goes on"


@pytest.mark.usefixtures("few")
def test_a_tenant_cannot_bind_into_anothers_share(make_in_process: Make, tmp_path: Path) -> None:
    in_process = make_in_process(daemon__tenants_file=str(everybody(tmp_path / "t")))
    share, tokens = 12 // 6, list(range(8))
    engines = [came_in(in_process, ACME, tmp_path) for _ in range(3)]
    handles, expected = [], []
    for i in range(3 * 6):
        handles.append(bound_to(engines[i // 6], cache_salt=str(i)))
        expected.append(store(handles[i], tokens, i))
        assert in_process.daemon._namespace_registry._fair_share.used("acme") <= 12 - 2 * share
    assert in_process.daemon._namespace_registry._fair_share.used("acme") == 12 - 2 * share
    beta = came_in(in_process, BETA, tmp_path)
    for i in range(share):
        other = bound_to(beta, cache_salt=str(i))
        stored = store(other, tokens, 100 + i)
        assert load(other, tokens) == stored
    assert [load(handle, tokens) for handle in handles] == expected, "whose place another took has it again"
    assert in_process.daemon._namespace_registry._fair_share.used("acme") == 12 - 2 * share
    assert in_process.daemon._namespace_registry._fair_share.used("beta") == share


def test_sessions_at_their_share_can_bind_new_namespaces(
    make_in_process: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have all of them bound, and neither gives up any by itself."""
    monkeypatch.setattr(of_bindings, "MAX_BOUND_NAMESPACES", 12)
    in_process = make_in_process(daemon__tenants_file=str(everybody(tmp_path / "t")))
    scheduler, worker = (came_in(in_process, ACME, tmp_path, engine="e") for _ in range(2))
    tokens, expected = list(range(8)), []
    for i in range(30):
        asks, moves = (bound_to(part, cache_salt=str(i)) for part in (scheduler, worker))
        expected.append(store(moves, tokens, i))
        with asks.request("r") as r:
            assert r.match(tokens).blocks == 2
            with moves.join("r") as joined:
                assert len(joined.signatures) == 2
        assert load(asks, tokens) == expected[i]
    for part in (worker, scheduler):
        assert [load(bound_to(part, cache_salt=str(i)), tokens) for i in range(30)] == expected
    assert in_process.daemon._namespace_registry._fair_share.used("acme") <= 12 - 2


@pytest.mark.usefixtures("few")
def test_a_tenant_with_a_zero_limit_is_refused(in_process: InProcessDaemon) -> None:
    bindings = NamespaceRegistry(in_process.cache, lambda: 100)
    for i in range(12):
        bindings.acquire("first", partial(bound_to, in_process.cache, cache_salt=str(i)), "session")
    with pytest.raises(ConfigError, match=r"'late' cannot bind a namespace"):
        bindings.acquire("late", partial(bound_to, in_process.cache, cache_salt="late"), "session")
    assert bindings._fair_share.used("first") == 12
    bindings.acquire("first", partial(bound_to, in_process.cache, cache_salt="more"), "session")
    assert bindings._fair_share.used("first") == 12


@pytest.mark.usefixtures("few")
def test_a_client_at_its_share_keeps_recent_namespaces(make_in_process: Make, tmp_path: Path) -> None:
    in_process = make_in_process(daemon__tenants_file=str(everybody(tmp_path / "t")))
    fills, engine = came_in(in_process, ACME, tmp_path), came_in(in_process, ACME, tmp_path)
    for i in range(6):
        bound_to(fills, cache_salt=f"fills {i}")
    tokens, expected = list(range(8)), []
    handles = [bound_to(engine, cache_salt=str(i)) for i in range(10)]
    for i, handle in enumerate(handles):
        expected.append(store(handle, tokens, i))
    assert [load(handle, tokens) for handle in handles] == expected
    assert in_process.daemon._namespace_registry._fair_share.used("acme") <= 12 - 2
    bound_to(came_in(in_process, ACME, tmp_path), cache_salt="fills 0")  # another engine has it: it is free


@pytest.mark.usefixtures("few")
def test_a_refused_namespace_keeps_the_others_bound(in_process: InProcessDaemon) -> None:
    cache, tokens = in_process.open(), list(range(8))
    handles = [bound_to(cache, cache_salt=str(i)) for i in range(8)]
    expected = [store(handle, tokens, i) for i, handle in enumerate(handles)]
    connection, (session,) = cache.connection, in_process.daemon.sessions
    first = min(connection.namespace_numbers)
    with pytest.raises(LayoutError):
        connection.call(
            "namespace", layout={}, model="m", revision="1", tenant="t", cache_salt="", facts={}, ends=[first]
        )
    assert first in session._handles
    for error in (ConfigError, AccessError):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_process.daemon._namespace_registry, "acquire", partial(refuse, error))
            with pytest.raises(error):
                bound_to(cache, cache_salt="more")
        assert [load(handle, tokens) for handle in handles] == expected
    for i in range(8, 12):
        bound_to(cache, cache_salt=str(i))
    assert list(session._handles) == sorted(connection.namespace_numbers)
    assert connection.ends == []


def refuse(error: type[Exception], *_: object) -> NoReturn:
    raise error("not this one")


@pytest.mark.usefixtures("few")
def test_a_namespace_bound_again_while_released_stays(in_process: InProcessDaemon) -> None:
    cache = in_process.open()
    handle = bound_to(cache)
    with cache.connected() as connection:
        number = handle.number(connection)
        connection.unbind_oldest(1)
        assert handle.number(connection) == number
    expected = store(handle, list(range(8)), 1)
    assert load(handle, list(range(8))) == expected


@pytest.mark.usefixtures("few")
def test_unbound_namespaces_are_dropped_and_found_again(in_process: InProcessDaemon) -> None:
    tokens, expected = list(range(8)), []
    seen: list[weakref.ref[Any]] = []
    for i in range(14):
        with in_process.open() as cache:
            handle = bound_to(cache, cache_salt=str(i))
            expected.append(store(handle, tokens, i))
            seen.append(weakref.ref(next(b for b in in_process.cache.handles if b.id == handle.id)))
        until(lambda: not in_process.daemon.sessions)
    assert len(in_process.cache.handles) <= 4 + 2
    wait_background(in_process.cache)

    def left() -> int:
        gc.collect()
        return sum(each() is not None for each in seen)

    until(lambda: left() <= 4 + 2)  # a thread may still have one in its hand
    with in_process.open() as cache:
        for i in (0, 13):
            assert load(bound_to(cache, cache_salt=str(i)), tokens) == expected[i]


@pytest.mark.usefixtures("few")
def test_a_records_owner_is_known_while_it_exists(in_process: InProcessDaemon) -> None:
    """An engine that binds one namespace after the other escapes neither its quota nor an erasure."""
    cache = in_process.cache
    for i in range(12):
        with in_process.open() as engine:
            store(bound_to(engine, tenant="churns", cache_salt=str(i)), list(range(4)), i)
        until(lambda: not in_process.daemon.sessions)
    wait_background(cache)
    assert len(cache.handles) < 12
    used = cache.cost_classes.used_bytes("host")["churns"]
    assert used == cache.host.usage().records * 12288 > 0
    assert len(cache.erasure.erase(tenant="churns").namespaces) == 12
    assert cache.host.usage().records == 0
    cache.unbind(cache.handles)
    wait_background(cache)
    assert cache._namespace_gc.shard_keys == set()
    assert cache.cost_classes._class_of_shard == {}
    assert cache.erasure._owners == {}
    assert cache._context.record_codec._layouts == {}
    assert cache.check() == []


def test_a_shared_binding_lasts_until_its_last_session(in_process: InProcessDaemon) -> None:
    bindings, made = NamespaceRegistry(in_process.cache, lambda: 1), bound_to(in_process.cache)
    for session in (1, 2, 3, 3):
        assert bindings.acquire("a", lambda: made, session) is made
    assert bindings._fair_share.used("a") == 1
    bindings.acquire("b", lambda: made, 4)
    for tenant, session in (("a", 1), ("a", 3), ("a", 2), ("a", 2), ("b", 4)):
        assert made not in bindings._idle
        assert bindings.touch("b", made, 4)
        bindings.release(tenant, made, session)
        assert not bindings.touch(tenant, made, session)
    assert made in bindings._idle
    assert bindings._fair_share.used("a") == bindings._fair_share.used("b") == 0


@pytest.mark.usefixtures("few")
def test_endless_binding_evicts_no_other_tenant(in_process: InProcessDaemon) -> None:
    bindings = NamespaceRegistry(in_process.cache, lambda: 1)
    quiet_one = bound_to(in_process.cache, tenant="quiet")
    bindings.acquire("a", lambda: quiet_one, 1)
    bindings.release("a", quiet_one, 1)
    for i in range(20):
        handle = bindings.acquire("a", partial(bound_to, in_process.cache, tenant="churns", cache_salt=str(i)), 2)
        bindings.release("a", handle, 2)
    assert quiet_one in in_process.cache.handles
    assert handle in in_process.cache.handles
    assert len(in_process.cache.handles) < 4 + 2


@pytest.mark.usefixtures("few")
def test_a_namespace_of_an_open_request_stays_bound(in_process: InProcessDaemon) -> None:
    cache, tokens = in_process.open(), list(range(8))
    first = bound_to(cache)
    with first.request() as request:
        assert request.match(tokens).blocks == 0
        for i in range(24):
            bound_to(cache, cache_salt=str(i))
        (session,) = in_process.daemon.sessions
        (mine,) = session._handle_of.values()
        assert mine not in [handle for handle, _ in session._handles.values()]
        assert len(in_process.cache.handles) < 24, "others were released"
        assert mine in in_process.cache.handles
    until(lambda: mine in in_process.daemon._namespace_registry._idle)


def test_a_namespace_bound_during_gc_keeps_its_tenant(
    in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, index = in_process.cache, in_process.cache.index
    handle = bound_to(cache, tenant="late")
    wait_background(cache)  # the counting thread looks at the same shards
    seen = index.records_by_shard

    def records_by_shard(tier: str) -> dict[bytes, int]:
        """What is there, and then somebody comes."""
        found = seen(tier)
        if not found:
            monkeypatch.undo()
            again = bound_to(cache, tenant="late")
            store(again, list(range(4)), 1)
            cache.unbind([again])
        return found

    monkeypatch.setattr(index, "records_by_shard", records_by_shard)
    cache.unbind([handle])
    wait_background(cache)
    wait_background(cache)
    assert cache.cost_classes.used_bytes("host")["late"] > 0
    assert handle.id in cache.erasure._owners

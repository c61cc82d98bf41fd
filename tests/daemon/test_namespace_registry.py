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
    bounds = [bound_to(cache, cache_salt=str(i)) for i in range(20)]
    (session,) = in_process.daemon.sessions
    expected = []
    for i, bound in enumerate(bounds):
        expected.append(store(bound, tokens, i))
        assert len(session._bound) <= 8
    for i, bound in enumerate(bounds):
        assert load(bound, tokens) == expected[i]
        assert len(session._bound) <= 8
    with bounds[0].request() as open_one:
        assert open_one.match(tokens).blocks == 2
        for bound in bounds[1:]:
            load(bound, tokens)
        assert open_one.match(tokens).blocks == 2, "what is open goes on"


@pytest.mark.usefixtures("few")
def test_a_tenant_cannot_bind_into_anothers_share(make_in_process: Make, tmp_path: Path) -> None:
    in_process = make_in_process(daemon__tenants_file=str(everybody(tmp_path / "t")))
    share, tokens = 12 // 6, list(range(8))
    engines = [came_in(in_process, ACME, tmp_path) for _ in range(3)]
    bounds, expected = [], []
    for i in range(3 * 6):
        bounds.append(bound_to(engines[i // 6], cache_salt=str(i)))
        expected.append(store(bounds[i], tokens, i))
        assert in_process.daemon._namespace_registry._fair_share.used("acme") <= 12 - 2 * share
    assert in_process.daemon._namespace_registry._fair_share.used("acme") == 12 - 2 * share
    beta = came_in(in_process, BETA, tmp_path)
    for i in range(share):
        other = bound_to(beta, cache_salt=str(i))
        stored = store(other, tokens, 100 + i)
        assert load(other, tokens) == stored
    assert [load(bound, tokens) for bound in bounds] == expected, "whose place another took has it again"
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
    bounds = [bound_to(engine, cache_salt=str(i)) for i in range(10)]
    for i, bound in enumerate(bounds):
        expected.append(store(bound, tokens, i))
    assert [load(bound, tokens) for bound in bounds] == expected
    assert in_process.daemon._namespace_registry._fair_share.used("acme") <= 12 - 2
    bound_to(came_in(in_process, ACME, tmp_path), cache_salt="fills 0")  # another engine has it: it is free


@pytest.mark.usefixtures("few")
def test_a_refused_namespace_keeps_the_others_bound(in_process: InProcessDaemon) -> None:
    cache, tokens = in_process.open(), list(range(8))
    bounds = [bound_to(cache, cache_salt=str(i)) for i in range(8)]
    expected = [store(bound, tokens, i) for i, bound in enumerate(bounds)]
    connection, (session,) = cache.connection, in_process.daemon.sessions
    first = min(connection.bound)
    with pytest.raises(LayoutError):
        connection.call(
            "namespace", layout={}, model="m", revision="1", tenant="t", cache_salt="", facts={}, ends=[first]
        )
    assert first in session._bound
    for error in (ConfigError, AccessError):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(in_process.daemon._namespace_registry, "acquire", partial(refuse, error))
            with pytest.raises(error):
                bound_to(cache, cache_salt="more")
        assert [load(bound, tokens) for bound in bounds] == expected
    for i in range(8, 12):
        bound_to(cache, cache_salt=str(i))
    assert list(session._bound) == sorted(connection.bound)
    assert connection.ends == []


def refuse(error: type[Exception], *_: object) -> NoReturn:
    raise error("not this one")


@pytest.mark.usefixtures("few")
def test_a_namespace_bound_again_while_released_stays(in_process: InProcessDaemon) -> None:
    cache = in_process.open()
    bound = bound_to(cache)
    with cache.connected() as connection:
        number = bound.number(connection)
        connection.unbind_oldest(1)
        assert bound.number(connection) == number
    expected = store(bound, list(range(8)), 1)
    assert load(bound, list(range(8))) == expected


@pytest.mark.usefixtures("few")
def test_unbound_namespaces_are_dropped_and_found_again(in_process: InProcessDaemon) -> None:
    tokens, expected = list(range(8)), []
    seen: list[weakref.ref[Any]] = []
    for i in range(14):
        with in_process.open() as cache:
            bound = bound_to(cache, cache_salt=str(i))
            expected.append(store(bound, tokens, i))
            seen.append(weakref.ref(next(b for b in in_process.cache.bounds if b.id == bound.id)))
        until(lambda: not in_process.daemon.sessions)
    assert len(in_process.cache.bounds) <= 4 + 2
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
    assert len(cache.bounds) < 12
    used = cache.cost_classes.used_bytes("host")["churns"]
    assert used == cache.host.usage().records * 12288 > 0
    assert len(cache.erasure.erase(tenant="churns").namespaces) == 12
    assert cache.host.usage().records == 0
    cache.unbind(cache.bounds)
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
        bound = bindings.acquire("a", partial(bound_to, in_process.cache, tenant="churns", cache_salt=str(i)), 2)
        bindings.release("a", bound, 2)
    assert quiet_one in in_process.cache.bounds
    assert bound in in_process.cache.bounds
    assert len(in_process.cache.bounds) < 4 + 2


@pytest.mark.usefixtures("few")
def test_a_namespace_of_an_open_request_stays_bound(in_process: InProcessDaemon) -> None:
    cache, tokens = in_process.open(), list(range(8))
    first = bound_to(cache)
    with first.request() as request:
        assert request.match(tokens).blocks == 0
        for i in range(24):
            bound_to(cache, cache_salt=str(i))
        (session,) = in_process.daemon.sessions
        (mine,) = session._bound_of.values()
        assert mine not in [bound for bound, _ in session._bound.values()]
        assert len(in_process.cache.bounds) < 24, "others were released"
        assert mine in in_process.cache.bounds
    until(lambda: mine in in_process.daemon._namespace_registry._idle)


def test_a_namespace_bound_during_gc_keeps_its_tenant(
    in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, index = in_process.cache, in_process.cache.index
    bound = bound_to(cache, tenant="late")
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
    cache.unbind([bound])
    wait_background(cache)
    wait_background(cache)
    assert cache.cost_classes.used_bytes("host")["late"] > 0
    assert bound.id in cache.erasure._owners

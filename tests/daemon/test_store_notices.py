"""A client says that its store begins; whatever becomes of that, its engine goes on."""

from __future__ import annotations

import threading
from unittest.mock import Mock

import pytest

from kvcache.tier.tier import Outcome
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to
from tests.daemon.in_process_daemon import InProcessDaemon, until
from tests.daemon.test_pending_stores import PAGES, TOKENS, begin


def test_an_older_daemon_gets_no_store_notices(in_process: InProcessDaemon) -> None:
    cache = in_process.open()
    cache.connection.accepts_store_notices = False
    tell, said = cache.connection.post, list[str]()
    cache.connection.post = lambda op, **fields: (said.append(op), tell(op, **fields))[1]
    transfer, _ = begin(bound_to(cache))
    assert transfer.wait(60)
    assert cache.flush(60)
    assert "open" in said
    assert not {"storing", "stored"} & set(said)


@pytest.mark.parametrize("why", ["the daemon is gone", "another thread asks", "the daemon reads nothing"])
def test_a_store_notice_never_blocks_the_engine_thread(
    in_process: InProcessDaemon, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, go, stands = in_process.open(), threading.Event(), threading.Event()
    handle, engine, reached, stood = bound_to(cache), Engine(LAYOUT), list[threading.Thread](), list[bool]()
    connect, connection = cache._connect, cache.connection
    monkeypatch.setattr(cache, "_connect", lambda: (reached.append(threading.current_thread()), connect())[1])

    def stand() -> None:
        stands.set()
        stood.append(go.wait(120))

    def ask() -> None:
        with cache.connected():
            stand()

    with handle.request() as r:
        r.match(TOKENS)
        asks = threading.Thread(target=ask)
        if why == "the daemon is gone":
            in_process.daemon._loop.call_soon_threadsafe(
                lambda: [peer.close() for peer in list(in_process.daemon._peers)]
            )
            until(lambda: cache.connection.wire.hung_up)
        elif why == "another thread asks":
            asks.start()
            assert stands.wait(60)
        else:
            in_process.daemon._loop.call_soon_threadsafe(stand)
            assert stands.wait(60)
            while cache.connection.wire.writable(0):
                cache.connection.post("stored", store=1 << 40)
        store = r.store(engine.described, engine.ids(PAGES))
        assert not stood
        assert threading.current_thread() not in reached
        assert why == "the daemon is gone" or cache.connection is connection
        go.set()
        assert store.wait(60)
    if asks.ident:
        asks.join(60)
    until(lambda: sum(len(session._stores) for session in in_process.daemon.sessions) == 0)


@pytest.mark.parametrize("why", ["closing", "no thread"])
def test_a_store_that_cannot_begin_fails_at_once(
    in_process: InProcessDaemon, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = in_process.open(), in_process.open()
    handle, engine = bound_to(cache), Engine(LAYOUT)
    if why == "closing":  # as another thread is within `close`
        cache.executor.close()
    else:
        monkeypatch.setattr(cache.executor, "submit", Mock(side_effect=RuntimeError("can't start new thread")))
    with handle.request() as r:
        r.match(TOKENS)
        store, load = r.store(engine.described, engine.ids(PAGES)), r.load(4, engine.described, engine.ids(PAGES))
    assert store.wait(0)
    assert load.wait(0)
    assert store.outcomes == load.outcomes == (Outcome.FAILED,) * 4
    assert cache.flush(60)
    assert other.flush(60)
    until(lambda: sum(len(session._requests) for session in in_process.daemon.sessions) == 0)

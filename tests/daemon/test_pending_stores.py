"""A flush waits for what clients have begun to store, for every requester, and never for a client that is gone."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from kvcache.cache.cache import Cache
from kvcache.cache.slot_copy import PagesSlotCopy
from kvcache.daemon.discovery import SocketClaim
from kvcache.daemon.server.client_session import MAX_PENDING_STORES, MAX_STORE_S, PendingStores
from kvcache.daemon.server.server import Daemon
from kvcache.os_env import SystemClock
from kvcache.settings.sources import load as load_settings
from kvcache.testing.tier import Clock
from kvcache.tier.tier import Outcome
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to, load
from tests.daemon.in_process_daemon import InProcessDaemon, until
from tests.daemon.test_tenant import ACME, BETA, ROOT, came_in, everybody

TOKENS = list(range(16))
PAGES = [0, 1, 2, 3]
ROOT_OF_TESTS = Path(__file__).parents[2]

Hold = Callable[[Any], threading.Event]


@pytest.fixture(autouse=True)
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flush that is not done waits for a store: a busy loop has all the time to hear of it."""
    monkeypatch.setattr("kvcache.daemon.server.client_session.MIN_CATCH_UP_S", 600.0)


def done(cache: Any) -> bool:
    """What the daemon answers a flush for which there is no time; an error where it does not answer."""
    return bool(cache.long_call("flush", 0, {"timeout_s": 0})["done"])


@pytest.fixture
def hold() -> Iterator[Hold]:
    """A client's copying threads do nothing until the event is set."""
    made: list[threading.Event] = []

    def make(cache: Any) -> threading.Event:
        go, entered = threading.Event(), threading.Semaphore(0)
        made.append(go)

        def stand() -> None:
            entered.release()
            assert go.wait(120)

        for _ in range(2):  # as many as it has
            cache.executor.submit(stand)
        for _ in range(2):
            assert entered.acquire(timeout=60)
        return go

    yield make
    for go in made:
        go.set()


def begin(handle: Any, tokens: list[int] = TOKENS, seed: int = 1) -> tuple[Any, list[bytes]]:
    """A store without a waiter, its request closed at once, as engines do; and the blocks' bytes."""
    engine = Engine(LAYOUT)
    engine.fill(seed, PAGES)
    with handle.request() as r:
        r.match(tokens)
        return r.store(engine.described, engine.ids(PAGES)), [engine.block(i) for i in PAGES]


def test_every_flush_waits_for_a_begun_store(in_process: InProcessDaemon, hold: Hold) -> None:
    cache, other = in_process.open(), in_process.open()
    go = hold(cache)
    transfer, blocks = begin(bound_to(cache))
    assert not done(other)
    assert not in_process.cache.flush(0)
    go.set()
    assert other.flush(60)
    assert in_process.cache.flush(60)
    assert load(bound_to(other), TOKENS) == blocks
    assert transfer.wait(60)


def test_a_flush_waits_for_an_unread_store_notice(
    in_process: InProcessDaemon, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks may come before the client's message has had its turn."""
    cache, stands, coming = in_process.open(), threading.Event(), in_process.daemon._pending_stores
    go, handle = hold(cache), bound_to(cache)
    engine, answers, to_do = Engine(LAYOUT), list[bool](), Queue[Callable[[], None]]()
    asks = threading.Thread(target=lambda: answers.append(coming.wait(0)))

    def stand() -> None:
        """On the loop's thread, where nothing else has its turn until there is the answer."""
        stands.set()
        to_do.get(timeout=60)()
        asks.join(60)

    with handle.request() as r:
        r.match(TOKENS)
        in_process.daemon._loop.call_soon_threadsafe(stand)
        assert stands.wait(60)
        transfer = r.store(engine.described, engine.ids(PAGES))
        with monkeypatch.context() as patch:
            patch.setattr(coming, "_loop", SimpleNamespace(call_soon_threadsafe=to_do.put))
            asks.start()
            asks.join(60)
    assert answers == [False]
    go.set()
    assert transfer.wait(60)
    assert coming.wait(60)


def test_a_closed_requests_store_still_completes(in_process: InProcessDaemon, hold: Hold) -> None:
    cache = in_process.open()
    go, handle = hold(cache), bound_to(cache)
    stores = [begin(handle, [turn, *TOKENS[1:]], turn) for turn in range(5)]
    assert sum(len(session._requests) for session in in_process.daemon.sessions) == 5
    go.set()
    for turn, (transfer, blocks) in enumerate(stores):
        assert transfer.wait(60)
        assert transfer.outcomes == (Outcome.DONE,) * 4
        assert load(handle, [turn, *TOKENS[1:]]) == blocks
    until(lambda: sum(len(session._requests) for session in in_process.daemon.sessions) == 0)


@pytest.mark.parametrize("how", ["cancelled", "failed", "hung up"])
def test_an_announced_store_without_data_delays_no_flush(
    in_process: InProcessDaemon, hold: Hold, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = in_process.open(), in_process.open()
    go = hold(cache)
    transfer, _ = begin(bound_to(cache))
    assert not done(other)
    if how == "hung up":
        cache.connection.close()
        assert other.flush(60)
    elif how == "cancelled":
        transfer.cancel()
    else:
        monkeypatch.setattr(PagesSlotCopy, "gather", lambda mover, parts: 1 // 0)
    go.set()
    assert other.flush(60)
    assert transfer.wait(60)


def test_a_flush_does_not_wait_for_other_tenants(
    make_in_process: Callable[..., InProcessDaemon], tmp_path: Path, hold: Hold
) -> None:
    in_process = make_in_process(daemon__tenants_file=str(everybody(tmp_path / "tenants")))
    acme, beta, root = (came_in(in_process, token, tmp_path) for token in (ACME, BETA, ROOT))
    go = hold(acme)
    begin(bound_to(acme))
    assert not done(came_in(in_process, ACME, tmp_path))
    assert beta.flush(60)
    assert not done(root)
    go.set()
    assert root.flush(60)


def test_pending_stores_per_client_are_bounded(in_process: InProcessDaemon) -> None:
    cache, other = in_process.open(), in_process.open()
    for number in range(MAX_PENDING_STORES + 10):
        cache.connection.post("storing", store=number)
    assert not done(other)
    cache.connection.post("stored", store=1 << 40)  # a number that was never announced
    for number in range(MAX_PENDING_STORES - 1):
        cache.connection.post("stored", store=number)
    assert not done(other)
    cache.connection.post("stored", store=MAX_PENDING_STORES - 1)
    assert other.flush(60)


def test_a_silent_clients_store_ends_at_its_time_limit(
    in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = in_process.open(), in_process.open()
    cache.connection.post("storing", store=1)
    assert not done(other)
    monkeypatch.setattr("kvcache.daemon.server.client_session.MAX_STORE_S", 0.0)
    assert done(other)
    assert in_process.cache.flush(0)


def test_a_client_that_dies_delays_no_flush(in_process: InProcessDaemon) -> None:
    program = (
        "import sys, threading, kvcache\n"
        "from tests.daemon.daemon_process import bound_to\n"
        "from tests.daemon.test_pending_stores import begin\n"
        "cache, stands = kvcache.open(sys.argv[1], patience_s=30.0), threading.Event()\n"
        "for _ in range(2): cache.executor.submit(stands.wait)\n"
        "begin(bound_to(cache))\n"
        "print('begun', flush=True)\n"
        "stands.wait()\n"
    )
    command = [sys.executable, "-c", program, f"unix:{in_process.path}"]
    with subprocess.Popen(command, cwd=ROOT_OF_TESTS, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "begun\n"
            assert not in_process.cache.flush(0)
        finally:
            engine.kill()
    assert in_process.cache.flush(60)


def test_a_failed_daemon_delays_no_flush(tmp_path: Path) -> None:
    async def fails() -> None:
        raise ArithmeticError

    settings = load_settings(None, host={"capacity_bytes": "768KiB"}, nvme__enabled=False)
    with Cache(settings, shared=True) as cache:
        claim = SocketClaim(Path(os.path.relpath(tmp_path / "d")), 0o600)
        daemon = Daemon(cache, claim)
        daemon._ended = SimpleNamespace(wait=fails)
        with pytest.raises(ArithmeticError):
            daemon.run()
        claim.release()
        assert cache.flush(60)


class TestComing:
    @pytest.fixture
    def loop(self) -> Iterator[asyncio.AbstractEventLoop]:
        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_forever)
        thread.start()
        yield loop
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def test_a_flush_does_not_wait_for_later_stores(self, loop: asyncio.AbstractEventLoop) -> None:
        coming = PendingStores(loop, {}, SystemClock())
        last, answers = coming.begin("a"), list[bool]()
        waits = threading.Thread(target=lambda: answers.append(coming.wait(120)))
        waits.start()
        while waits.is_alive():  # there is one at every moment
            last, before = coming.begin("a"), last
            coming.end("a", before)
        assert answers == [True]
        coming.end("a", last)
        coming.end("a", last)
        assert coming.wait(60)

    def test_after_the_loop_a_flush_waits_for_begun_stores(self) -> None:
        loop = asyncio.new_event_loop()
        coming = PendingStores(loop, {}, SystemClock())
        number, answers = coming.begin("a"), list[bool]()
        waits = threading.Thread(target=lambda: answers.append(coming.wait(120)))
        waits.start()
        coming.close()
        loop.close()
        assert not coming.wait(0)
        coming.end("a", number)
        waits.join(120)
        assert answers == [True]
        assert coming.wait(0)

    @pytest.mark.parametrize("whose", ["a", None])
    def test_a_store_that_is_too_old_delays_no_flush(self, loop: asyncio.AbstractEventLoop, whose: str | None) -> None:
        clock = Clock()
        coming = PendingStores(loop, {}, clock)
        old, clock.seconds = coming.begin("a"), clock.seconds + MAX_STORE_S - 1
        coming.begin("a")
        assert not coming.wait(0, whose)
        clock.seconds += 1
        assert not coming.wait(0, whose)
        coming.end("a", old)
        clock.seconds += MAX_STORE_S - 2
        assert not coming.wait(0, whose)
        clock.seconds += 1
        assert coming.wait(0, whose)

    def test_a_store_that_is_too_old_ends_earlier_waits(
        self, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kvcache.daemon.server.client_session.MAX_STORE_S", 0.1)
        coming = PendingStores(loop, {}, SystemClock())
        coming.begin("a")
        assert coming.wait(None)

    def test_pending_stores_may_end_in_any_order(self, loop: asyncio.AbstractEventLoop) -> None:
        coming = PendingStores(loop, {}, SystemClock())
        numbers = {coming.begin(tenant): tenant for tenant in "abcab" * 3}
        for number in random.Random(1).sample(sorted(numbers), len(numbers)):
            for tenant in "abc":
                assert coming.wait(0, tenant) == (tenant not in numbers.values())
            assert not coming.wait(0)
            coming.end(numbers.pop(number), number)
        assert coming.wait(0)

    def test_waiters_share_one_read_of_their_tenants_clients(self) -> None:
        to_do, heard = Queue[Callable[[], None]](), list[str]()
        clients = {
            Mock(catch_up=partial(heard.append, name)): SimpleNamespace(tenant=SimpleNamespace(name=name))
            for name in "abc"
        }
        coming = PendingStores(SimpleNamespace(call_soon_threadsafe=to_do.put), clients, SystemClock())
        waits = [threading.Thread(target=coming.wait, args=(120, whose)) for whose in "aaab"]
        for thread in waits:
            thread.start()
        hear = to_do.get(timeout=60)
        until(lambda: coming._waiting_tenants == {"a", "b"} and len(coming._changed._waiters) == 4)
        hear()
        for thread in waits:
            thread.join(120)
        assert sorted(heard) == ["a", "b"]
        assert to_do.empty()
        last = threading.Thread(target=coming.wait, args=(120,))
        last.start()
        to_do.get(timeout=60)()
        last.join(120)
        assert sorted(heard) == ["a", "a", "b", "b", "c"]

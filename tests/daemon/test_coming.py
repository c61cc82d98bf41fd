"""A flush waits for what clients have begun to store, whoever asks for it, and for nobody who is gone."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from kvcache.daemon.coming import STORES, Coming
from kvcache.daemon.control.client import ask, find
from kvcache.hierarchy.mover import PagesMover
from kvcache.tier.tier import Outcome
from tests.contract.caches import Engine
from tests.daemon.house import LAYOUT, House, bound_to, load
from tests.daemon.test_tenant import ACME, BETA, ROOT, came_in, everybody
from tests.daemon.within import Within, until

TOKENS = list(range(16))
PAGES = [0, 1, 2, 3]
ROOT_OF_TESTS = Path(__file__).parents[2]

Hold = Callable[[Any], threading.Event]


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


def begin(bound: Any, tokens: list[int] = TOKENS, seed: int = 1) -> tuple[Any, list[bytes]]:
    """A store that nobody waits for, its request closed at once, as engines do; and the blocks' bytes."""
    engine = Engine(LAYOUT)
    engine.fill(seed, PAGES)
    with bound.request() as r:
        r.match(tokens)
        return r.store(engine.described, engine.ids(PAGES)), [engine.block(i) for i in PAGES]


def test_a_store_that_was_begun_is_waited_for_whoever_asks(within: Within, hold: Hold) -> None:
    cache, other = within.open(), within.open()
    go = hold(cache)
    transfer, blocks = begin(bound_to(cache))
    assert not other.flush(0)
    assert not within.cache.flush(0)
    go.set()
    assert other.flush(60)
    assert within.cache.flush(60)
    assert load(bound_to(other), TOKENS) == blocks
    assert transfer.wait(60)


def test_it_is_waited_for_also_where_the_daemon_has_not_read_of_it(
    within: Within, hold: Hold, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asks may come before the client's message has had its turn."""
    cache, stands, coming = within.open(), threading.Event(), within.daemon._coming
    go, bound = hold(cache), bound_to(cache)
    engine, answers, to_do = Engine(LAYOUT), list[bool](), Queue[Callable[[], None]]()
    asks = threading.Thread(target=lambda: answers.append(coming.wait(0)))

    def stand() -> None:
        """On the loop's thread, where nothing else has its turn until there is the answer."""
        stands.set()
        to_do.get(timeout=60)()
        asks.join(60)

    with bound.request() as r:
        r.match(TOKENS)
        within.daemon._loop.call_soon_threadsafe(stand)
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


def test_a_request_that_is_closed_does_not_lose_what_it_stores(within: Within, hold: Hold) -> None:
    cache = within.open()
    go, bound = hold(cache), bound_to(cache)
    stores = [begin(bound, [turn, *TOKENS[1:]], turn) for turn in range(5)]
    assert sum(len(session._requests) for session in within.daemon.sessions) == 5
    go.set()
    for turn, (transfer, blocks) in enumerate(stores):
        assert transfer.wait(60)
        assert transfer.outcomes == (Outcome.DONE,) * 4
        assert load(bound, [turn, *TOKENS[1:]]) == blocks
    until(lambda: sum(len(session._requests) for session in within.daemon.sessions) == 0)


@pytest.mark.parametrize("how", ["cancelled", "failed", "hung up"])
def test_a_store_that_never_comes_keeps_nobody_waiting(
    within: Within, hold: Hold, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, other = within.open(), within.open()
    go = hold(cache)
    transfer, _ = begin(bound_to(cache))
    assert not other.flush(0)
    if how == "hung up":
        cache.link.close()
        assert other.flush(60)
    elif how == "cancelled":
        transfer.cancel()
    else:
        monkeypatch.setattr(PagesMover, "gather", lambda mover, parts: 1 // 0)
    go.set()
    assert other.flush(60)
    assert transfer.wait(60)


def test_a_tenant_does_not_wait_for_another_s(make_within: Callable[..., Within], tmp_path: Path, hold: Hold) -> None:
    within = make_within(daemon__tenants_file=str(everybody(tmp_path / "tenants")))
    acme, beta, root = (came_in(within, token, tmp_path) for token in (ACME, BETA, ROOT))
    go = hold(acme)
    begin(bound_to(acme))
    assert not came_in(within, ACME, tmp_path).flush(0)
    assert beta.flush(60)
    assert not root.flush(0)
    go.set()
    assert root.flush(60)


def test_what_one_client_can_keep_others_waiting_with_is_bounded(within: Within) -> None:
    cache, other = within.open(), within.open()
    for number in range(STORES + 10):
        cache.link.tell("storing", store=number)
    assert not other.flush(0)
    for number in range(STORES + 10):
        cache.link.tell("stored", store=number)
    cache.link.tell("stored", store=1 << 40)  # of which nobody has heard
    assert other.flush(60)


def test_a_daemon_that_does_not_know_of_stores_is_not_told(within: Within) -> None:
    cache = within.open()
    cache.link.hears_stores = False
    tell, said = cache.link.tell, list[str]()
    cache.link.tell = lambda op, **fields: (said.append(op), tell(op, **fields))[1]
    transfer, _ = begin(bound_to(cache))
    assert transfer.wait(60)
    assert cache.flush(60)
    assert "open" in said
    assert not {"storing", "stored"} & set(said)


def test_a_client_that_dies_keeps_nobody_waiting(make_house: Callable[..., House], runtime: Path) -> None:
    house = make_house(CONTROL__ENABLED="true").start()
    program = (
        "import sys, threading, kvcache\n"
        "from tests.daemon.house import bound_to\n"
        "from tests.daemon.test_coming import begin\n"
        "cache, stands = kvcache.open(sys.argv[1], patience_s=30.0), threading.Event()\n"
        "for _ in range(2): cache.executor.submit(stands.wait)\n"
        "begin(bound_to(cache))\n"
        "print('begun', flush=True)\n"
        "stands.wait()\n"
    )
    command = [sys.executable, "-c", program, house.where]
    with subprocess.Popen(command, cwd=ROOT_OF_TESTS, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            assert engine.stdout.readline() == "begun\n"
            (found,) = find()
            assert ask(found.path, "flush", seconds=0, timeout_s=60) == {"flushed": False}
        finally:
            engine.kill()
    assert ask(found.path, "flush", seconds=60, timeout_s=120) == {"flushed": True}


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

    def test_what_begins_later_is_not_waited_for(self, loop: asyncio.AbstractEventLoop) -> None:
        coming = Coming(loop, list)
        last, answers = coming.begin("a"), list[bool]()
        waits = threading.Thread(target=lambda: answers.append(coming.wait(120)))
        waits.start()
        while waits.is_alive():  # there is one at every moment
            last, before = coming.begin("a"), last
            coming.end(before)
        assert answers == [True]
        coming.end(last)
        coming.end(last)
        assert coming.wait(60)

    def test_once_the_loop_is_over_it_waits_for_what_has_begun_alone(self) -> None:
        loop = asyncio.new_event_loop()
        coming = Coming(loop, list)
        number, answers = coming.begin("a"), list[bool]()
        waits = threading.Thread(target=lambda: answers.append(coming.wait(120)))
        waits.start()
        coming.close()
        loop.close()
        assert not coming.wait(0)
        coming.end(number)
        waits.join(120)
        assert answers == [True]
        assert coming.wait(0)

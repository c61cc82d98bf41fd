"""What users of another cache's server reported (LMCache, seen up to 0.5.6), each as a test that would have caught it.

By its issue there: what was seen, and which test here. Those without a test of this file are tests of others:

    4715, 4795    an idle client is reaped after an hour and never back; every load hangs       here
    3206, 3208    a restart between two heartbeats goes unnoticed, views of its memory crash    here
    4642, 4069    a crashed server takes its workers with it                                    here, test_kill
    4676, 4759    a server that hangs keeps its clients waiting                                 here
    1780, 3685    loads wait for each other one by one                                          here
    817, 1150     layerwise loads crash or differ                                               tests/transfer, contract
    3106, 2863    a hybrid's state is not restored, its output is garbled                       here, contract
    1030, 1339    a buffer that is too small is asked for for ever                              here
    1938, 1326    slower than without a cache where nothing is reused                           vllm_overhead.py
    kivi          a codec that is not there stores without a word                               tests/codec
    1109, 2334    users cannot tell whether it works                                              kvcache doctor, ps
    4691, 4137    a lease ends while its request waits, locks of lookups leak                   test_leases, here
    1379, 1467    ranks find different numbers of blocks after an eviction on one of them       here
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcache.block.layout import KVLayout
from kvcache.cache.api import FlushReport, TierFlush
from kvcache.daemon.protocol import MAX_FLUSH_S
from kvcache.tier.tier import Outcome
from tests.contract.fake_engine import HYBRID, Engine, bind
from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon, until

Make = Callable[..., DaemonProcess]


def test_a_silent_clients_session_is_kept(in_process: InProcessDaemon) -> None:
    """However much others do meanwhile: nothing of it ends by a timer, so there is none to turn."""
    cache = in_process.open()
    handle = bound_to(cache)
    expected = store(handle, list(range(16)), 1)
    session = in_process.daemon.sessions[0]
    busy = bound_to(in_process.open())
    for turn in range(5):
        store(busy, [turn, *range(15)], turn)
    assert load(handle, list(range(16))) == expected
    assert in_process.daemon.sessions[0] is session


def test_a_restart_between_two_calls_fails_no_request(make_daemon: Make) -> None:
    daemon = make_daemon(nvme=True).start()
    with daemon.open() as cache:
        handle, engine = bound_to(cache), Engine(LAYOUT)
        expected = store(handle, list(range(16)), 1)
        assert cache.flush(60)
        with handle.request() as r:
            assert r.match(list(range(16))).blocks == 4
            r.admit()
            daemon.kill()
            daemon.start()
            assert r.match().blocks == 4, "the new daemon does not know an open request"
            transfer = r.load(4, engine.described, engine.ids([0, 1, 2, 3]))
            assert transfer.wait(60)
            assert [engine.block(i) for i in range(transfer.blocks)] == expected
        joined = handle.request(id="x")
        joined.match(list(range(16)))
        assert len(handle.join("x").signatures) == 4


def test_a_hung_daemon_delays_a_client_once(make_daemon: Make) -> None:
    daemon = make_daemon().start()
    cache = daemon.open()
    assert daemon.process is not None
    handle, engine = bound_to(cache), Engine(LAYOUT)
    expected = store(handle, list(range(16)), 1)
    cache.patience_s = cache.deadline_s = cache.connection.patience_s = 0.3
    os.kill(daemon.process.pid, signal.SIGSTOP)
    try:
        with handle.request() as r:
            assert r.match(list(range(16))).reason == "unreachable"
            assert cache.connection is None, "the next request would wait again"
            assert r.match().blocks == 0
            for transfer in (
                r.load(4, engine.described, engine.ids([0, 1, 2, 3])),
                r.store(engine.described, engine.ids([0, 1, 2, 3])),
            ):
                assert transfer.wait(60)
                assert Outcome.DONE not in transfer.outcomes
    finally:
        os.kill(daemon.process.pid, signal.SIGCONT)
    cache.patience_s = cache.deadline_s = 30.0
    assert cache.wait_reachable(60)
    cache.connection.patience_s = 30.0  # it may have been reached before
    assert load(handle, list(range(16))) == expected
    cache.close()


def test_a_daemon_answers_a_flush_before_its_client_gives_up(
    in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float | None] = []

    def flush(timeout_s: float | None = None, **_: Any) -> FlushReport:
        asked.append(timeout_s)
        late = TierFlush(reached=1, refused=len(asked) % 2, lost=len(asked) % 2, waiting=1)
        return FlushReport({"nvme": late if len(asked) % 4 else TierFlush(reached=1)})

    monkeypatch.setattr(in_process.cache.tier_manager, "flush", flush)
    cache = in_process.open()
    for given in ({}, {"timeout_s": 1e9}, {"timeout_s": 0.5}):
        assert cache.long_call("flush", None, given)["done"] is False
    assert asked == [MAX_FLUSH_S, MAX_FLUSH_S, 0.5]
    asked.clear()
    assert not cache.flush(), "it was answered before the time that it gave"
    monkeypatch.setattr("kvcache.daemon.client.cache.MAX_FLUSH_S", 0.0)
    report = cache.flush()
    assert len(asked) == 4, "it asks again"
    assert report.tiers == {"nvme": TierFlush(reached=3, refused=1, lost=1)}, "what each answer told once is kept"


def test_loads_of_several_requests_overlap(in_process: InProcessDaemon) -> None:
    """One that waits keeps no other: each of them is let in before any is let go."""
    clients = [in_process.open(threads=1) for _ in range(8)]
    expected = store(bound_to(clients[0]), list(range(8)), 1)
    gate = threading.Barrier(len(clients), timeout=60)
    found: list[list[bytes]] = []

    class Together:
        def __init__(self, copier: Any) -> None:
            self._copier = copier

        def mark(self) -> Any:
            return self._copier.mark()

        def scatter(self, *arguments: Any, **more: Any) -> Any:
            gate.wait()
            return self._copier.scatter(*arguments, **more)

    def work(client: Any) -> None:
        of = client.copiers.of
        client.copiers.of = lambda device: Together(of(device))
        found.append(load(bound_to(client), list(range(8))))

    threads = [threading.Thread(target=work, args=(client,)) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


def test_a_hybrid_hit_ends_where_a_group_has_no_block(in_process: InProcessDaemon) -> None:
    handle, engine = bind(in_process.open(), HYBRID), Engine(HYBRID)
    engine.fill(1, list(range(6)))
    tokens = list(range(24))
    with handle.request() as r:
        r.match(tokens)
        assert r.store(engine.described, engine.ids(list(range(6)))).wait(60)
        assert r.match().blocks == 6
        last = in_process.cache.namespace(HYBRID, model="m", revision="r")
        with last.request() as inner:
            inner.match(tokens)
            state = inner._chains()[2][5]
        in_process.cache.index.discard(state, "host")
        in_process.cache.host.unpublish(state)
        assert r.match().blocks == 5


def test_a_prompt_larger_than_host_is_stored_in_part(in_process: InProcessDaemon) -> None:
    engine = Engine(LAYOUT, pages=200)
    engine.fill(1, list(range(200)))
    tokens = list(range(800))
    handle = bound_to(in_process.open())
    with handle.request() as r:
        r.match(tokens)
        transfer = r.store(engine.described, engine.ids(list(range(200))))
        assert transfer.wait(60)
        assert 0 < transfer.blocks < 200
        assert set(transfer.outcomes[transfer.blocks :]) == {Outcome.DROPPED}
        assert r.match().blocks == transfer.blocks


def test_ranks_agree_on_the_common_hit(in_process: InProcessDaemon) -> None:
    layout = KVLayout.mha(layers=2, kv_heads=4, head_dim=64, dtype="fp32", block_tokens=4)
    ranks = [[layout.shard(heads=(0, 2))], [layout.shard(heads=(2, 4))]]
    from kvcache.transfer.pages import GroupPages

    memory = [np.random.default_rng(i).standard_normal((2, 2, 8, 4, 2, 64), np.float32) for i in (0, 1)]
    pages = [
        [GroupPages.from_tensors(layout, m, axes=("kv", "page", "token", "head", "dim"), shard=ranks[i][0])]
        for i, m in enumerate(memory)
    ]
    processes = [in_process.open(engine="e") for _ in range(3)]
    scheduler = bind(processes[0], layout, ranks=ranks)
    workers = [bind(processes[i + 1], layout, shards=ranks[i]) for i in (0, 1)]
    tokens = list(range(16))
    with scheduler.request(id="1") as r:
        r.match(tokens)
        for worker, there in zip(workers, pages, strict=True):
            with worker.join("1") as mine:
                assert mine.store(there, [[0, 1, 2, 3]]).wait(60)
        assert r.match().blocks == 4
        with in_process.cache.namespace(layout, model="m", revision="r", shards=ranks[1]).request() as inner:
            inner.match(tokens)
            lost = inner._chains()[0][2]
        in_process.cache.index.discard(lost, "host")
        in_process.cache.host.unpublish(lost)
        assert r.match().blocks == 2, "the first rank has more, which is of no use"
        r.admit()
        before = [m.copy() for m in memory]
        for worker, there, m, was in zip(workers, pages, memory, before, strict=True):
            with worker.join("1") as mine:
                assert mine.match().blocks in (2, 4)  # of its own shards
                transfer = mine.load(2, there, [[6, 7]])
                assert transfer.wait(60)
                assert transfer.blocks == 2
            assert (m[:, :, 6:8] == was[:, :, :2]).all()
    processes[0].close()
    until(lambda: in_process.held_blocks == 0)

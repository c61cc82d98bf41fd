"""Daemons and clients killed at any moment: who is left goes on, what was durable is there, nothing is lost."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, reached
from tests.daemon.in_process_daemon import InProcessDaemon, until

ROOT = Path(__file__).parents[2]
BLOCKS = 8


class Worker:
    """Stores prompts and loads them, and remembers what was said of each: wrong bytes are the only fault."""

    def __init__(self, handle: Any, number: int, most: int | None = None) -> None:
        """`most`: it ends by itself after so many turns."""
        self.handle, self.number, self.most = handle, number, most
        self.rng = random.Random(number)
        self.turns = self.misses = self.hits = 0
        self.faults: list[str] = []
        self.stored: set[int] = set()
        self.ending = threading.Event()
        self.turned = threading.Condition()
        self.thread = threading.Thread(target=self.run)

    def tokens(self, prompt: int) -> list[int]:
        return [self.number, prompt, *range(BLOCKS * LAYOUT.block_tokens - 2)]

    def expected(self, prompt: int) -> list[bytes]:
        engine = Engine(LAYOUT)
        engine.fill(self.number * 1000 + prompt, list(range(BLOCKS)))
        return [engine.block(i) for i in range(BLOCKS)]

    def run(self) -> None:
        engine, ids = Engine(LAYOUT), list(range(BLOCKS))
        while not self.ending.is_set() and self.turns != self.most:
            prompt = self.rng.randrange(12)
            with self.handle.request() as r:
                hit = r.match(self.tokens(prompt))
                r.admit()
                if hit.blocks < BLOCKS:
                    self.misses += 1
                    engine.fill(self.number * 1000 + prompt, ids)
                    if r.store(engine.described, engine.ids(ids)).wait(60) and r.match().blocks == BLOCKS:
                        self.stored.add(prompt)
                else:
                    transfer = r.load(BLOCKS, engine.described, engine.ids(ids))
                    if not transfer.wait(60):
                        self.faults.append("a load did not end")
                    expected = self.expected(prompt)
                    self.faults += [
                        f"prompt {prompt}: block {i} is another's"
                        for i in range(transfer.blocks)
                        if engine.block(i) != expected[i]
                    ]
                    self.hits += transfer.blocks == BLOCKS
            with self.turned:
                self.turns += 1
                self.turned.notify_all()

    def wait_turns(self, count: int) -> None:
        """Until it has done so many more."""
        with self.turned:
            end = self.turns + count
            assert self.turned.wait_for(lambda: self.turns >= end, 120), "a worker hangs"

    def wait_hit(self) -> None:
        """Until it has loaded a prompt, whenever that was."""
        with self.turned:
            assert self.turned.wait_for(lambda: self.hits > 0, 120), "a worker finds nothing"


@contextmanager
def working(cache: Any) -> Iterator[list[Worker]]:
    """Two that go on meanwhile, and by the end have stored and loaded, and met no fault."""
    workers = [Worker(bound_to(cache), number) for number in (1, 2)]
    for worker in workers:
        worker.thread.start()
    try:
        yield workers
        for worker in workers:
            worker.wait_hit()
    finally:
        for worker in workers:
            worker.ending.set()
        for worker in workers:
            worker.thread.join()
    assert [fault for worker in workers for fault in worker.faults] == []
    assert all(worker.hits and worker.misses for worker in workers)


def durable(cache: Any, workers: list[Worker]) -> list[set[int]]:
    """By worker, what it stored up to now: of this nothing may be lost. Nothing where that took too long."""
    sure = [set(worker.stored) for worker in workers]
    return sure if cache.flush(60) else [set() for _ in workers]


def check_durable(cache: Any, workers: list[Worker], sure: list[set[int]]) -> None:
    for worker, prompts in zip(workers, sure, strict=True):
        for prompt in prompts:
            with bound_to(cache).request() as r:
                assert r.match(worker.tokens(prompt)).blocks == BLOCKS, "what was durable is gone"


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_a_killed_daemon_keeps_durable_blocks(
    make_daemon: Callable[..., DaemonProcess], request: pytest.FixtureRequest, tcp: bool
) -> None:
    kills = 50 if request.config.getoption("--long") else 2 if tcp else 5
    rng = random.Random(1)
    daemon = make_daemon(nvme=True, tcp=tcp).start()
    with daemon.open() as cache, working(cache) as workers:
        for _ in range(kills):
            for worker in workers:
                worker.wait_turns(rng.randrange(1, 12))
            sure = durable(cache, workers)
            for worker in workers:
                worker.wait_turns(rng.randrange(3))
            daemon.kill()
            for worker in workers:
                worker.wait_turns(3)  # without a daemon: it goes on
            daemon.start()
            reached(cache)
            with daemon.open() as other:
                assert other.check() == []
                check_durable(other, workers, sure)


@pytest.mark.parametrize("kind", ["in_process", "tcp_daemon"])
def test_a_killed_client_leaves_nothing_behind(request: pytest.FixtureRequest, kind: str) -> None:
    in_process: InProcessDaemon = request.getfixturevalue(kind)
    where = f"unix:{in_process.path}" if in_process.port is None else str(in_process.port)
    kills = 50 if request.config.getoption("--long") else 5
    rng = random.Random(2)
    for first in range(0, kills, 5):
        with ExitStack() as undo:
            victims = []
            for seed in range(first, first + 5):
                words = [sys.executable, "-m", "tests.daemon.load_generator", where, str(seed)]
                victims.append(subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT))
                undo.callback(victims[-1].communicate)
                undo.callback(victims[-1].kill)
            for victim in victims:
                assert victim.stdout is not None
                assert victim.stdout.readline() == "begins\n"
            for victim in victims:
                seen = in_process.cache.counters.tree().get("stored_blocks", 0) + rng.randrange(1, 64)
                until(lambda seen=seen: in_process.cache.counters.tree().get("stored_blocks", 0) >= seen)
                victim.kill()
        until(lambda: in_process.daemon.sessions == [])
        until(lambda: in_process.held_blocks == 0 and in_process.leaked_slots == 0)
        assert in_process.cache.check() == []


def test_64_concurrent_clients_load_their_own_blocks(
    in_process: InProcessDaemon, request: pytest.FixtureRequest
) -> None:
    clients = [in_process.open(threads=1) for _ in range(64)]
    assert len(in_process.daemon.sessions) == 64
    turns = 200 if request.config.getoption("--long") else 3
    workers = [Worker(bound_to(client, cache_salt=str(number)), number, turns) for number, client in enumerate(clients)]
    for worker in workers:
        worker.thread.start()
    for worker in workers:
        worker.thread.join()
    assert [worker.turns for worker in workers] == [turns] * 64
    assert [fault for worker in workers for fault in worker.faults] == []
    for client in clients:
        client.close()
    until(lambda: in_process.daemon.sessions == [])

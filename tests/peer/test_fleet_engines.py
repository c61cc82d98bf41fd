"""Three reference engines and one Redis Cluster through a minute of mixed traffic: a node is killed and comes back
empty, another is out of reach for a while. Greedy answers are those of an engine without a cache, no request fails,
and hits come back.

A round is a second of the simulated minute: each engine serves a few requests at once, among them the next turns of
conversations that another engine began.
"""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from typing import Any

import pytest
import torch

import kvcache
from kvcache.engine.engine import Engine, EngineConfig
from kvcache.engine.model import Model, load_model
from kvcache.engine.sampling import SamplingParams
from tests.engine import tiny_model
from tests.peer.redis_server import MISSING
from tests.peer.redis_topology import Cluster, until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

BLOCK = 4
ANSWER = SamplingParams(max_tokens=6, ignore_eos=True)
ENGINES = 3
SYSTEM = [[(7 * s + 13 * i * i) % 256 for i in range(60)] for s in range(2)]
AGENTS = 8


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@lru_cache
def model() -> Model:
    with tempfile.TemporaryDirectory() as directory:
        return load_model(tiny_model.make(directory), block_tokens=BLOCK)


def without(prompts: list[list[int]]) -> list[list[int]]:
    engine = Engine(model(), None, EngineConfig(pages=256))
    return [result.token_ids for result in engine.generate(prompts, ANSWER)]


class Node:
    def __init__(self, url: str) -> None:
        self.cache: Any = kvcache.open(
            host={"capacity_bytes": 96 * 8192, "slab_bytes": 4 * 8192},
            nvme={"enabled": False},
            redis={"enabled": True, "url": url, "mode": "cluster", "timeout_s": 1},
            flow={"lookup_timeout_s": 1, "deadline_s": 2},
            plan={"enabled": False},
            control={"enabled": False},
        )
        self.faults: list[str] = []
        self.served: list[tuple[list[int], list[int]]] = []
        self.brought: list[int] = []

    def serve(self, prompts: list[list[int]]) -> None:
        """A fresh engine, whose own pages have nothing: what is reused comes from the cache, and it from the fleet."""
        before = self.cache.counters.get("promoted_blocks", tier="redis")
        engine = Engine(model(), self.cache, EngineConfig(pages=256, max_batch_tokens=96))
        try:
            for prompt, result in zip(prompts, engine.generate(prompts, ANSWER), strict=True):
                self.served.append((prompt, result.token_ids))
                if result.finish != "length":
                    self.faults.append(f"a request ended by {result.finish}")
            self.faults += engine.check()
        finally:
            engine.close()
        self.brought.append(self.cache.counters.get("promoted_blocks", tier="redis") - before)


def traffic(rounds: int) -> list[list[list[list[int]]]]:
    """By round and engine its prompts: agents that share two system prompts go on, each round at another engine."""
    draw = random.Random(7)
    said = [list(SYSTEM[agent % 2]) for agent in range(AGENTS)]
    made = []
    for _ in range(rounds):
        for agent, talk in enumerate(said):
            said[agent] = list(SYSTEM[agent % 2]) if len(talk) > 220 else talk + [draw.randrange(256) for _ in range(9)]
        order = draw.sample(range(AGENTS), AGENTS)
        made.append([[list(said[agent]) for agent in order[e::ENGINES]] for e in range(ENGINES)])
    return made


@pytest.fixture
def fleet() -> Iterator[tuple[Cluster, list[Node]]]:
    model()  # made here: its imports are not for several threads at once
    with ExitStack() as stack:
        cluster = Cluster()
        stack.callback(cluster.end)
        nodes: list[Node] = []
        for _ in range(ENGINES):
            nodes.append(Node(cluster.url))
            stack.callback(nodes[-1].cache.close)
        stack.callback(cluster.nodes[2].go_on)
        yield cluster, nodes


def test_cluster_faults_change_no_answer(fleet: tuple[Cluster, list[Node]], request: pytest.FixtureRequest) -> None:
    cluster, nodes = fleet
    rounds = 60 if request.config.getoption("--long") else 20
    work, gate = traffic(rounds), threading.Barrier(ENGINES)
    killed, paused = cluster.nodes[1], cluster.nodes[2]
    events = {
        rounds // 4: killed.stop,
        rounds // 2: killed.start,
        rounds * 5 // 8: paused.pause,
        rounds * 3 // 4: paused.go_on,
    }

    def run(which: int) -> None:
        try:
            for i, prompts in enumerate(work):
                if gate.wait(120) == 0 and i in events:
                    events[i]()
                gate.wait(120)
                nodes[which].serve(prompts[which])
        except Exception as error:  # noqa: BLE001  shown at the end
            nodes[which].faults.append(repr(error))
            gate.abort()

    threads = [threading.Thread(target=run, args=(which,)) for which in range(ENGINES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [node.faults for node in nodes] == [[], [], []]
    for node in nodes:
        report = node.cache.flush(60)  # blocks that the nodes refused while they were away may be lost
        assert (report.fault, report.tiers["redis"].waiting) == ("", 0)
        assert node.cache.check() == []
    served = [both for node in nodes for both in node.served]
    assert len(served) == rounds * AGENTS
    for first in range(0, len(served), 16):
        prompts, answers = zip(*served[first : first + 16], strict=True)
        assert without(list(prompts)) == list(answers)
    assert sum(sum(node.brought[: rounds // 4]) for node in nodes) > 0, "nothing was shared"
    turns = itertools.cycle(range(1, ENGINES))

    def back() -> bool:
        """Whether hits have come, by then or once each engine has served what another one did."""
        found = sum(sum(node.brought[rounds * 3 // 4 :]) for node in nodes) > 0
        turn = next(turns)
        for which, node in enumerate([] if found else nodes):
            node.serve(work[-1][(which + turn) % ENGINES])
        return found

    until(back, "hits have come back", 120)

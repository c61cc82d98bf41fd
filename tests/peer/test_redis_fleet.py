"""Three engines and one Redis Cluster under mixed traffic: a node is killed and comes back empty, another is out of
reach for a while. What is loaded equals what would be computed, no request fails, and hits come back."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.tier.tier import Outcome
from tests.contract.test_cache import FULL, Engine, bind
from tests.peer.redis_server import MISSING
from tests.peer.redis_topology import Cluster, until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

KIB = 1 << 10
BLOCK = FULL.block_tokens
DOCUMENTS = [[1000 * d + t for t in range(20 * BLOCK)] for d in range(6)]


def compute(engine: Engine, tokens: Sequence[int], first: int, end: int) -> None:
    """What a model would write to pages `first` to `end`: it depends on all tokens up to there."""
    for page in range(first, end):
        seed = hashlib.sha256(repr(list(tokens[: (page + 1) * BLOCK])).encode()).digest()
        rng = np.random.default_rng(int.from_bytes(seed[:8], "little"))
        for layer in engine.memory[0]:
            layer[:, page] = rng.standard_normal(layer[:, page].shape, np.float32)


class Traffic:
    """Requests of one engine, each a part of a document and something of its own behind it."""

    def __init__(self, url: str, seed: int) -> None:
        self.cache: Any = kvcache.open(
            host={"capacity_bytes": 768 * KIB},
            nvme={"enabled": False},
            redis={"enabled": True, "url": url, "mode": "cluster", "timeout_s": 0.5},
            flow={"lookup_timeout_s": 0.5, "deadline_s": 1},
            control={"enabled": False},
        )
        self.handle, self.random = bind(self.cache), random.Random(seed)
        self.engine, self.truth = Engine(FULL), Engine(FULL)
        self.faults: list[str] = []

    def serve(self) -> tuple[int, int]:
        """One request: blocks asked for, and those that came from the cluster."""
        document = self.random.choice(DOCUMENTS)
        tokens = document[: self.random.randrange(4, 20) * BLOCK] + [self.random.randrange(1 << 20) for _ in range(12)]
        blocks = len(tokens) // BLOCK
        before = self.cache.counters.get("promoted_blocks", tier="redis")
        self.engine.poison()
        with self.handle.request() as r:
            hit = r.match(tokens)
            while hit.pending:
                threading.Event().wait(0.001)
                hit = r.match()
            r.admit()
            loaded = r.load(hit.blocks, self.engine.described, self.engine.ids(list(range(hit.blocks))))
            if not loaded.wait(20):
                self.faults.append("a load did not end")
            compute(self.engine, tokens, loaded.blocks, blocks)
            compute(self.truth, tokens, 0, blocks)
            wrong = [page for page in range(blocks) if self.engine.block(page) != self.truth.block(page)]
            self.faults += [f"block {page} of {blocks} is another's" for page in wrong]
            ids = list(range(loaded.blocks, blocks))
            stored = r.store(self.engine.described, self.engine.ids(ids), first_block=loaded.blocks)
            if not stored.wait(20):
                self.faults.append("a store did not end")
            if Outcome.FAILED in stored.outcomes:
                self.faults.append("a store failed")
        return blocks, self.cache.counters.get("promoted_blocks", tier="redis") - before


def test_cluster_faults_give_no_wrong_block(request: pytest.FixtureRequest) -> None:
    rounds = 600 if request.config.getoption("--long") else 60
    cluster = Cluster()
    traffic = [Traffic(cluster.url, seed) for seed in range(3)]
    brought: list[list[int]] = [[0] * rounds for _ in traffic]
    gates = [threading.Barrier(len(traffic)) for _ in range(4)]
    killed, paused = cluster.nodes[1], cluster.nodes[2]
    events = {
        rounds // 4: killed.stop,
        rounds // 2: killed.start,
        rounds * 5 // 8: paused.pause,
        rounds * 3 // 4: paused.go_on,
    }

    def engine(which: int) -> None:
        try:
            for i in range(rounds):
                if i in events:
                    gate = gates[list(events).index(i)]
                    if gate.wait(60) == 0:
                        events[i]()
                _, brought[which][i] = traffic[which].serve()
        except Exception as error:  # noqa: BLE001  shown at the end
            traffic[which].faults.append(repr(error))
            for gate in gates:
                gate.abort()

    threads = [threading.Thread(target=engine, args=(which,)) for which in range(3)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [each.faults for each in traffic] == [[], [], []]
        for each in traffic:
            report = each.cache.flush(30)  # blocks that the nodes refused while they were away may be lost
            assert (report.fault, report.tiers["redis"].waiting) == ("", 0)
            assert each.cache.check() == []
        fleet = [sum(some) for some in zip(*brought, strict=True)]
        assert sum(fleet[: rounds // 4]) > 0, "nothing was shared"
        came = sum(fleet[rounds * 3 // 4 :])
        until(lambda: came or any(each.serve()[1] for each in traffic), "hits have come back", 120)
        assert [each.faults for each in traffic] == [[], [], []]
    finally:
        paused.go_on()
        for each in traffic:
            each.cache.close()
        cluster.end()

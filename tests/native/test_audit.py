"""An audit of the index while others change it: it sees one moment, so it finds nothing where there is nothing."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest

from kvcache import native
from kvcache.block.layout import Shard
from kvcache.evict.policy import LRU
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index

pytestmark = pytest.mark.skipif(not native.built, reason="the compiled core was not built")


def test_an_audit_beside_threads_that_change_everything(request: pytest.FixtureRequest) -> None:
    audits = 400 if request.config.getoption("--long") else 40
    index = Index(["host", "nvme"], LRU())
    stop, faults = threading.Event(), list[str]()

    def change(seed: int) -> None:
        rng, random_bytes = random.Random(seed), np.random.default_rng(seed)
        space = bytes([seed]) * 32
        shard_key = pack_shard_key(space, 0, Shard(0, 1, 0, 1))
        runs: list[BlockRun] = []
        held: list[BlockRun] = []
        while not stop.is_set():
            if len(runs) < 300:
                runs.append(BlockRun(shard_key, random_bytes.bytes(32 * rng.randrange(1, 100))))
                index.insert_run(runs[-1], space, rng.choice(index.tiers))
            run = rng.choice(runs)
            match rng.randrange(5):
                case 0:
                    index.touch(run, index.tick())
                case 1:
                    part = run.part(0, sum(index.hold(run)))
                    if part.blocks:
                        held.append(part)
                case 2 if held:
                    index.release(held.pop())
                case 3:
                    index.insert_run(run, space, rng.choice(index.tiers))
                case _:
                    index.evict(rng.choice(index.tiers), rng.randrange(1, 200))
        for part in held:
            index.release(part)

    threads = [threading.Thread(target=change, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(audits):
            faults += index.check()
            for tier in index.tiers:
                names = index.names(tier)
                assert all(len(name) == 26 for name in names)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []
    assert index.check() == []
    assert index.held() == 0
    assert [len(index.names(tier)) for tier in index.tiers] == [index.resident(tier) for tier in index.tiers]

"""What a cache tells of its changes, played again, is what is in its tiers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

import kvcache
from tests.contract.fake_engine import FULL, HYBRID, Engine, MiB, bind, store


def played(changes: Any, there: dict[str, set[tuple[int, bytes]]]) -> None:
    for change in changes:
        blocks = {(change.group, signature) for signature in change.each}
        if change.kind == "stored":
            there.setdefault(change.tier, set()).update(blocks)
        else:
            there.setdefault(change.tier, set()).difference_update(blocks)


@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["full", "hybrid"])
@pytest.mark.parametrize("seed", range(4))
def test_replayed_events_give_the_tiers_contents(tmp_path: Path, layout: Any, seed: int) -> None:
    rng, engine = random.Random(seed), Engine(layout)
    with kvcache.open(
        host={"capacity_bytes": MiB, "slab_bytes": MiB // 4},
        nvme={"path": tmp_path, "capacity_bytes": 4 * MiB, "segment_bytes": MiB, "min_free_bytes": 0},
        control={"enabled": False},
    ) as cache:
        mine, other = bind(cache, layout), bind(cache, layout, model="other")
        there: dict[str, set[tuple[int, bytes]]] = {}
        heard = []
        number = cache.kv_events(None, [mine]).next
        for i in range(60):
            bound = rng.choice([mine, mine, other])
            start = rng.randrange(40)
            tokens = list(range(start * 1000, start * 1000 + 4 * rng.randrange(4, 40)))
            blocks = len(tokens) // 4
            with bound.request() as r:
                hit = r.match(tokens)
                r.admit()
                if rng.random() < 0.5:
                    r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks)))).wait(30)
            store(bound, engine, tokens, list(range(blocks)))
            if i % 10 == 9:  # written blocks can be evicted, however late a busy machine writes them
                assert cache.flush(30)
            if rng.random() < 0.03:
                bound.clear()
            if rng.random() < 0.3:
                told = cache.kv_events(number, [mine])
                assert not told.lost
                played(told.kv_events, there)
                heard += told.kv_events
                number = told.next
        for _ in range(3):  # a promotion may end behind its request
            cache.tier_manager.promoter.wait_idle()
        assert cache.flush(30)
        told = cache.kv_events(number, [mine])
        played(told.kv_events, there)
        heard += told.kv_events
        assert {(c.kind, c.tier) for c in heard} >= {("stored", "host"), ("removed", "host"), ("stored", "nvme")}
        for tier in (cache.host, *cache.lower_tiers):
            found = {(a.group, a.signature) for a in tier.scan() if a.namespace == mine.id}
            assert there.get(tier.name, set()) == found
        assert cache.check() == []

"""What the simulator says of a policy is what a cache does that has it."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.record import record_bytes
from kvcache.cache.cache import Cache
from kvcache.settings import Settings
from kvcache.trace.formats import Trace
from kvcache.trace.simulate import simulate
from tests.trace.test_simulate import traffic

LAYOUT = kvcache.KVLayout.mha(layers=1, kv_heads=1, head_dim=8, dtype="fp32", block_tokens=16)
SLOT_BYTES = record_bytes(LAYOUT.block_bytes())
ROOM = 64  # blocks


def digests(trace: Trace) -> list[bytes]:
    return [sha256(b"%d" % block).digest() for block in range(trace.unique)]


@pytest.mark.parametrize("policy", ["hazard", "lru"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_cache_hits_as_the_simulator_predicts(policy: str, seed: int) -> None:
    trace = traffic(seed, 400)
    names = digests(trace)
    tensors: Any = np.zeros((1, 2, 512, 16, 1, 8), np.float32)
    pages = [kvcache.GroupPages.from_tensors(LAYOUT, tensors, axes=("kv", "page", "token", "head", "dim"))]
    settings = Settings.model_validate(
        {
            "host": {"capacity_bytes": ROOM * SLOT_BYTES, "slab_bytes": ROOM * SLOT_BYTES},
            "nvme": {"enabled": False},
            "evict": {"policy": policy},
            "flow": {"deadline_s": 60},
        }
    )
    found = []
    with Cache(settings) as cache:
        bound = cache.namespace(LAYOUT, model="m", revision="1")
        for chain in trace:
            with bound.request() as r:
                hit = r.match(digests=[names[block] for block in chain])
                found.append(hit.blocks)
                r.admit()
                r.store(pages, [list(range(len(chain) - hit.blocks))], first_block=hit.blocks).wait()
        assert cache.check() == []
    expected = simulate(trace, policy, ROOM).hits.tolist()
    assert len(set(expected)) > 5
    assert found == expected

"""What the compiled index takes at every size, and that it finds its blocks through every growth of its tables."""

from __future__ import annotations

from hashlib import sha256

import pytest

from kvcache import native
from kvcache.block.layout import Shard
from kvcache.index.block_run import pack_shard_key
from tests.native.test_index import SHARD_KEYS, TABLES, new, signatures

pytestmark = pytest.mark.skipif(not native.built, reason="the compiled core was not built")


@pytest.mark.parametrize("turns", [3])
def test_a_hundred_thousand_come_and_go(turns: int) -> None:
    """Through every growth of the tables, on the way there and back, with all of them found at each step."""
    index, runs = new(ghosts=1.0), [signatures(i, 1000) for i in range(100)]
    shard_key = SHARD_KEYS[0]
    for turn in range(turns):
        for i, run in enumerate(runs):
            index.tick()
            index.insert(shard_key, run, shard_key[:32], 0)
            for earlier in range(0, i + 1, 7):
                assert index.tier_masks(shard_key, runs[earlier]) == b"\1" * 1000
        assert index.resident(0) == 100_000
        assert index.check() == []
        taken = 0
        while victims := index.evict(0, TABLES[0][:1].copy(), 997, None, False):
            taken += len(victims)
        assert taken == 100_000, turn
        assert index.tier_masks(shard_key, runs[0]) == bytes(1000)
        assert len(index) == 0


@pytest.mark.parametrize("tiers", [1, 4])
def test_what_a_block_and_a_ghost_take(tiers: int) -> None:
    """At every moment of growth, nodes in whole pieces of 4,096; so that at 10^6 four tiers take 96 bytes at most."""
    index, ghosts, slots = new(tiers, ghosts=100.0), new(ghosts=100.0), []
    for i in range(1 << 8):
        for tier in range(tiers):
            index.insert(SHARD_KEYS[0], signatures(i, 512), SHARD_KEYS[0][:32], tier)
        if (count := len(index)) >= 1 << 16:
            slots.append((index.bytes() - -(-count // 4096) * 4096 * (52 + 8 * tiers)) / count)
    assert max(slots) < 11.6
    ghosts.insert(SHARD_KEYS[0], signatures(0, 1 << 12), SHARD_KEYS[0][:32], 0)
    for i in range(1, 1 << 6):
        ghosts.refuse(SHARD_KEYS[0], signatures(i, 1 << 11))
    assert ghosts.ghosts() >= 1 << 16
    assert ghosts.ghost_bytes() / ghosts.ghosts() < 24


def test_a_place_without_blocks_takes_nothing() -> None:
    """Each user with a salt has a namespace, and so a shard_key."""
    index, sizes = new(), []
    for user in range(20_000):
        shard_key = pack_shard_key(sha256(b"%d" % user).digest(), 0, Shard(0, 1, 0, 1))
        index.insert(shard_key, shard_key[:32], b"", 0)
        if user >= 100:
            assert index.evict(0, TABLES[0][:1].copy(), 1, None, False)
        sizes.append(index.bytes())
    assert max(sizes[200:]) == sizes[200]

"""An engine of several ranks: what counts, who joins whom, and what is refused: every implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import Group, KVLayout
from kvcache.transfer.pages import GroupPages
from tests.contract.fake_engine import FULL, Engine, bind

TWO = KVLayout(
    (
        Group(layers=2, kv_heads=4, head_dim=8, dtype="fp32"),
        Group(layers=1, head_dim=16, dtype="fp32", kind="mla", name="latent"),
    ),
    block_tokens=4,
)
HALVES = [[TWO.shard(heads=(h, h + 2)), TWO.shard(group=1)] for h in (0, 2)]


def rank_pages(rank: int, pages: int = 16) -> tuple[list[Any], list[GroupPages]]:
    """What one of two ranks has: half of the heads of one group, all of the latent."""
    full = np.zeros((2, 2, pages, 4, 2, 8), np.float32)
    latent = np.zeros((1, pages, 4, 16), np.float32)
    axes = (("kv", "page", "token", "head", "dim"), ("page", "token", "latent"))
    return [full, latent], [
        GroupPages.from_tensors(TWO, t, axes=a, shard=HALVES[rank][g], group=g)
        for g, (t, a) in enumerate(zip((full, latent), axes, strict=True))
    ]


def test_a_block_is_a_hit_only_if_all_ranks_have_it(cache: Any) -> None:
    scheduler = bind(cache, TWO, ranks=HALVES)
    ranks = [bind(cache, TWO, shards=held) for held in HALVES]
    tokens = list(range(12))
    memory, described = zip(*[rank_pages(rank) for rank in (0, 1)], strict=True)
    for rank in (0, 1):
        memory[rank][0][:, :, :3] = np.random.default_rng(rank).standard_normal((2, 2, 3, 4, 2, 8))
        memory[rank][1][:, :3] = 7  # the latent is the same on every rank
    with scheduler.request(id="42") as r:
        assert r.match(tokens).blocks == 0
        for rank, stored, found in ((0, 3, 0), (1, 2, 2)):
            with ranks[rank].join("42") as mine:
                ids = list(range(stored))
                assert mine.store(described[rank], [ids, ids]).wait(30)
            assert r.match().blocks == found
    before = [[part.copy() for part in of_rank] for of_rank in memory]
    with scheduler.request(id="43") as r:
        assert r.match(tokens).blocks == 2
        r.admit()
        for rank in (0, 1):
            for part in memory[rank]:
                part.fill(np.nan)
            with ranks[rank].join("43") as mine:
                transfer = mine.load(2, described[rank], [[8, 9], [8, 9]])
                assert transfer.wait(30)
                assert transfer.blocks == 2
            assert (memory[rank][0][:, :, 8:10] == before[rank][0][:, :, :2]).all()
            assert (memory[rank][1][:, 8:10] == before[rank][1][:, :2]).all()


def test_ranks_join_an_open_request_by_its_id(cache: Any) -> None:
    handle, engine = bind(cache), Engine(FULL)
    with pytest.raises(kvcache.RequestError):
        handle.join("a")
    with handle.request(id="a") as r:
        joined = handle.join("a")
        assert len(joined.signatures) == 0
        r.match(list(range(8)))
        r.extend([8, 9, 10, 11])
        assert list(joined.signatures) == list(r.signatures)
        assert joined.store(engine.described, engine.ids([0, 1, 2])).wait(30)
        assert joined.match().blocks == 3
        for told in (lambda: joined.match([1, 2, 3, 4]), lambda: joined.extend([1])):
            with pytest.raises(kvcache.TokenError):
                told()
        joined.close()
        with bind(cache, model="other").request(id="a"):
            handle.join("a").close()  # another namespace's is another request
        with handle.request(id="a"), pytest.raises(kvcache.RequestError):
            handle.join("a")
        handle.join("a").close()
    with pytest.raises(kvcache.RequestError):
        handle.join("a")


def test_pages_and_ranks_that_are_not_this_process_s_are_refused(cache: Any) -> None:
    first = bind(cache, TWO, shards=HALVES[0])
    _, described = rank_pages(1)
    with first.request() as r:
        r.match(list(range(4)))
        with pytest.raises(kvcache.LayoutError):
            r.store(described, [[0], [0]])
    whole = list(TWO.whole)
    for wrong in ({"shards": HALVES[0][:1]}, {"ranks": [HALVES[0][:1]]}, {"shards": whole, "ranks": HALVES}):
        with pytest.raises(kvcache.LayoutError):
            bind(cache, TWO, **wrong)

"""Another daemon in the place of one that ended: it has what was on the drive, also what an earlier version wrote."""

from __future__ import annotations

import tarfile
from collections.abc import Callable
from pathlib import Path

from tests.contract.caches import Engine
from tests.daemon.house import LAYOUT, House, bound_to, load, reached, store
from tests.daemon.old_store import CAPACITY, PROMPTS, SEGMENT

ARCHIVE = Path(__file__).parents[1] / "vectors" / "nvme-1.tar.xz"


def stored(seed: int, blocks: int = 4) -> list[bytes]:
    """The bytes that `store` makes of a seed."""
    engine = Engine(LAYOUT)
    engine.fill(seed, list(range(blocks)))
    return [engine.block(i) for i in range(blocks)]


def test_a_store_of_an_earlier_version_is_adopted(make_house: Callable[..., House]) -> None:
    house = make_house(nvme=True, NVME__CAPACITY_BYTES=CAPACITY, NVME__SEGMENT_BYTES=SEGMENT)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(house.directory, filter="data")
    house.start()
    with house.open() as cache:
        bound = bound_to(cache)
        for seed, tokens in PROMPTS.items():
            with bound.request() as r:
                hit = r.match(tokens)
                assert (hit.blocks, dict(hit.by_tier)) == (4, {"nvme": 4})
            assert load(bound, tokens) == stored(seed)
        added = store(bound, list(range(16)), 9)  # and it is written on, in the same place
        assert cache.flush(60)
        assert cache.check() == []
    assert house.end()[0] == 0
    house.start()
    with house.open() as cache:
        bound = bound_to(cache)
        assert load(bound, list(range(16))) == added
        assert [load(bound, tokens) for tokens in PROMPTS.values()] == [stored(seed) for seed in PROMPTS]
        assert cache.check() == []


def test_a_client_goes_from_one_daemon_to_the_next(make_house: Callable[..., House]) -> None:
    """It keeps its cache, its namespace, and even an open request; what was in host memory comes from the drive."""
    house = make_house(nvme=True).start()
    with house.open() as cache:
        bound, tokens = bound_to(cache), list(range(32))
        expected = store(bound, tokens, 1)
        r = bound.request(id="open")
        assert r.match(tokens).blocks == 8
        assert house.end()[0] == 0  # which writes what is queued
        assert r.match(tokens).reason == "unreachable"
        house.start()
        reached(cache)
        hit = r.match()
        assert (hit.blocks, dict(hit.by_tier)) == (8, {"nvme": 8})
        assert load(bound, tokens) == expected
        r.close()

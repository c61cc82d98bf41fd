"""Chains that are brought near share bytes: what does not come takes none of them."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from kvcache.cache.cache import Cache
from kvcache.cache.prefetch import ByteBudget, Prefetcher
from kvcache.settings.sources import load
from tests.cache.test_pins import packed, tokens
from tests.daemon.daemon_process import bound_to, store

BLOCKS, PAYLOAD = 6, 8192
RECORD = 12288


def opened(place: Path) -> Cache:
    host = {"capacity_bytes": "768KiB", "slab_bytes": "192KiB"}
    nvme = {"path": place / "nvme", "capacity_bytes": "8MiB", "segment_bytes": "96KiB", "min_free_bytes": 0}
    return Cache(load(None, host=host, nvme=nvme))


def keep(place: Path, seed: int) -> None:
    """On the drive alone."""
    with closing(opened(place)) as cache:
        store(bound_to(cache), tokens(seed, BLOCKS), seed)
        assert cache.flush(30)


def damage(place: Path) -> None:
    """Payloads of all that is there."""
    for segment in (place / "nvme").glob("segment-*"):
        data = bytearray(segment.read_bytes())
        for at in range(RECORD - 4096, len(data), RECORD):
            data[at] ^= 1
        segment.write_bytes(data)


def brought(cache: Cache, seed: int, room: ByteBudget) -> tuple[bool, Prefetcher]:
    handle = bound_to(cache)
    near = Prefetcher(handle, packed(handle, tokens(seed, BLOCKS)), room, lambda: False)
    return near.prefetch("test"), near


def test_a_failed_prefetch_returns_its_byte_budget(tmp_path: Path) -> None:
    keep(tmp_path, 1)
    damage(tmp_path)
    keep(tmp_path, 2)
    with closing(opened(tmp_path)) as cache:
        room = ByteBudget(BLOCKS * PAYLOAD)
        whole, near = brought(cache, 1, room)
        assert (whole, near.blocks, near.bytes, near.full) == (False, 0, 0, False)
        whole, near = brought(cache, 2, room)
        assert (whole, near.blocks, near.bytes, near.full) == (True, BLOCKS, BLOCKS * PAYLOAD, False)
        assert not room.take(1)


@pytest.mark.parametrize("room", [0, BLOCKS * PAYLOAD - 1])
def test_a_window_is_prefetched_wholly_or_not_at_all(tmp_path: Path, room: int) -> None:
    keep(tmp_path, 1)
    with closing(opened(tmp_path)) as cache:
        whole, near = brought(cache, 1, ByteBudget(room))
        assert (whole, near.blocks, near.bytes, near.full) == (False, 0, 0, True)

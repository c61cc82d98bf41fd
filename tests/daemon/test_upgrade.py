"""Another daemon in the place of one that ended: it has what was on the drive, also what an earlier version wrote."""

from __future__ import annotations

import fcntl
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import msgpack
import pytest

import kvcache
from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import WarmRestart
from kvcache.settings.sources import load as load_settings
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, load, reached, store
from tests.daemon.old_version_store import CAPACITY, PROMPTS, SEGMENT
from tests.peer.redis_server import MISSING, empty

VECTORS = Path(__file__).parents[1] / "vectors"
ARCHIVE = VECTORS / "nvme-1.tar.xz"


def stored(seed: int, blocks: int = 4) -> list[bytes]:
    """The bytes that `store` makes of a seed."""
    engine = Engine(LAYOUT)
    engine.fill(seed, list(range(blocks)))
    return [engine.block(i) for i in range(blocks)]


def test_a_store_of_an_earlier_version_is_read(make_daemon: Callable[..., DaemonProcess]) -> None:
    daemon = make_daemon(nvme=True, NVME__CAPACITY_BYTES=CAPACITY, NVME__SEGMENT_BYTES=SEGMENT)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(daemon.directory, filter="data")
    daemon.start()
    with daemon.open() as cache:
        bound = bound_to(cache)
        for seed, tokens in PROMPTS.items():
            with bound.request() as r:
                hit = r.match(tokens)
                assert (hit.blocks, dict(hit.by_tier)) == (4, {"nvme": 4})
            assert load(bound, tokens) == stored(seed)
        added = store(bound, list(range(16)), 9)  # and it is written on, in the same place
        assert cache.flush(60)
        assert cache.check() == []
    assert daemon.terminate()[0] == 0
    daemon.start()
    with daemon.open() as cache:
        bound = bound_to(cache)
        assert load(bound, list(range(16))) == added
        assert [load(bound, tokens) for tokens in PROMPTS.values()] == [stored(seed) for seed in PROMPTS]
        assert cache.check() == []


def test_a_client_reconnects_to_the_next_daemon(make_daemon: Callable[..., DaemonProcess]) -> None:
    """It keeps its cache, its namespace, and even an open request; what was in host memory comes from the drive."""
    daemon = make_daemon(nvme=True).start()
    with daemon.open() as cache:
        bound, tokens = bound_to(cache), list(range(32))
        expected = store(bound, tokens, 1)
        r = bound.request(id="open")
        assert r.match(tokens).blocks == 8
        assert daemon.terminate()[0] == 0  # which writes what is queued
        assert r.match(tokens).reason == "unreachable"
        daemon.start()
        reached(cache)
        hit = r.match()
        assert (hit.blocks, dict(hit.by_tier)) == (8, {"nvme": 8})
        assert load(bound, tokens) == expected
        r.close()


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_a_redis_store_of_commit_5e49391_is_read(tmp_path: Path) -> None:
    """tests/vectors/record_5e49391.py wrote the keys and values."""
    import redis

    server = empty(tmp_path)
    connection = redis.Redis.from_url(server.unix)
    for key, value in msgpack.unpackb((VECTORS / "redis-1.msgpack").read_bytes()).items():
        connection.set(key, value)
    with kvcache.open(
        host={"capacity_bytes": "1MiB"},
        nvme={"enabled": False},
        redis={"enabled": True, "url": server.unix},
        control={"enabled": False},
    ) as cache:
        bound = bound_to(cache)
        for seed, tokens in PROMPTS.items():
            with bound.request() as r:
                r.match(tokens)
                hit = wait_answered(r)
                assert (hit.blocks, dict(hit.by_tier)) == (4, {"redis": 4})
                engine = Engine(LAYOUT)
                engine.poison()
                r.admit()
                assert r.load(4, engine.described, engine.ids(list(range(4)))).wait(60)
                assert [engine.block(i) for i in range(4)] == stored(seed)
        assert cache.check() == []


def wait_answered(request: kvcache.Request) -> kvcache.Hit:
    """The hit once every shared tier has answered."""
    hit = request.match()
    while hit.pending:
        hit = request.match()
    return hit


def test_a_handover_of_commit_5e49391_is_accepted() -> None:
    """tests/vectors/record_5e49391.py wrote the table and the slab."""
    with tarfile.open(VECTORS / "handover-1.tar.xz") as archive:
        parts = {member.name: archive.extractfile(member).read() for member in archive}  # type: ignore[union-attr]
    slabs = [parts[name] for name in sorted(parts) if name.startswith("slab-")]
    descriptors = []
    for slab in slabs:
        descriptors.append(os.memfd_create("handover", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))
        os.fchmod(descriptors[-1], 0o600)
        os.pwrite(descriptors[-1], slab, 0)
        fcntl.fcntl(descriptors[-1], fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    settings = load_settings(
        None, host={"capacity_bytes": "768KiB", "slab_bytes": "192KiB"}, nvme__enabled=False, control__enabled=False
    )
    with Cache(settings, shared=True) as cache:
        assert WarmRestart(parts["table"], descriptors).take_in(cache) == 4 * len(PROMPTS)
        bound = bound_to(cache)
        assert [load(bound, tokens) for tokens in PROMPTS.values()] == [stored(seed) for seed in PROMPTS]
        assert cache.check() == []

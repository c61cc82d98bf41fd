"""Another daemon in the place of one that ended: it has what was on the drive, also what an earlier version wrote."""

from __future__ import annotations

import fcntl
import lzma
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

import kvcache
from kvcache.cache.cache import Cache
from kvcache.cache.warm_restart import WarmRestart
from kvcache.daemon.wire import Wire
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
        handle = bound_to(cache)
        for seed, tokens in PROMPTS.items():
            with handle.request() as r:
                hit = r.match(tokens)
                assert (hit.blocks, dict(hit.by_tier)) == (4, {"nvme": 4})
            assert load(handle, tokens) == stored(seed)
        added = store(handle, list(range(16)), 9)  # and it is written on, in the same place
        assert cache.flush(60)
        assert cache.check() == []
    assert daemon.terminate()[0] == 0
    daemon.start()
    with daemon.open() as cache:
        handle = bound_to(cache)
        assert load(handle, list(range(16))) == added
        assert [load(handle, tokens) for tokens in PROMPTS.values()] == [stored(seed) for seed in PROMPTS]
        assert cache.check() == []


def test_a_client_reconnects_to_the_next_daemon(make_daemon: Callable[..., DaemonProcess]) -> None:
    """It keeps its cache, its namespace, and even an open request; what was in host memory comes from the drive."""
    daemon = make_daemon(nvme=True).start()
    with daemon.open() as cache:
        handle, tokens = bound_to(cache), list(range(32))
        expected = store(handle, tokens, 1)
        r = handle.request(id="open")
        assert r.match(tokens).blocks == 8
        assert daemon.terminate()[0] == 0  # which writes what is queued
        assert r.match(tokens).reason == "unreachable"
        daemon.start()
        reached(cache)
        hit = r.match()
        assert (hit.blocks, dict(hit.by_tier)) == (8, {"nvme": 8})
        assert load(handle, tokens) == expected
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
        handle = bound_to(cache)
        for seed, tokens in PROMPTS.items():
            with handle.request() as r:
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
        handle = bound_to(cache)
        assert [load(handle, tokens) for tokens in PROMPTS.values()] == [stored(seed) for seed in PROMPTS]
        assert cache.check() == []


def test_messages_of_a_client_of_commit_5e49391_are_answered(tmp_path: Path) -> None:
    """tests/vectors/record_5e49391.py wrote them, with the answers of that commit's daemon."""
    steps = msgpack.unpackb(lzma.decompress((VECTORS / "client-1.msgpack.xz").read_bytes()))
    # the plan would decide by this machine's speed
    daemon = DaemonProcess(tmp_path, tcp=True, PLAN__ENABLED="false").start()
    wires: dict[int, Wire] = {}
    fresh: dict[Any, Any] = {}  # this daemon's session and event number, by those of the recording
    try:
        for number, call, content in steps:
            wire = wires.get(number) or wires.setdefault(number, daemon.connect())
            if call == "send":
                wire.send({k: fresh.get(v, v) if k in ("session", "after") else v for k, v in content.items()})
            elif call == "send_bytes":
                wire.send_bytes(content)
            elif call == "receive_bytes":
                views = [memoryview(bytearray(len(part))) for part in content]
                wire.receive_bytes(views, 60)
                assert [bytes(view) for view in views] == content
            else:
                answer = wire.receive(60)[0]
                assert_answered(answer, content)
                for name in {"session", "next"} & content.get("ok", {}).keys():
                    fresh[content["ok"][name]] = answer["ok"][name]
    finally:
        for wire in wires.values():
            wire.close()
        daemon.close()


OWN_VALUES = {"pid", "boot", "session", "server", "next"}
"""Fields of an answer whose values each daemon chooses."""


def assert_answered(answer: dict[str, Any], recorded: dict[str, Any]) -> None:
    """An answer may have more fields than the recorded one, with the same values for those."""
    if "ok" not in recorded:
        assert answer == recorded
        return
    fields, wanted = answer["ok"], recorded["ok"]
    assert wanted.keys() <= fields.keys()
    if "tiers" in wanted and "counters" in wanted:  # of `stats`: rates and times differ
        assert fields["tiers"].keys() == wanted["tiers"].keys()
        assert all(wanted["tiers"][tier].keys() <= fields["tiers"][tier].keys() for tier in wanted["tiers"])
        assert fields["tiers"]["host"]["records"] == wanted["tiers"]["host"]["records"]
        return
    for name in wanted.keys() - OWN_VALUES:
        assert fields[name] == wanted[name], name

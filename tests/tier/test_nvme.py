"""What the NVMe tier promises beyond the contract: owners, bounds, what lasts."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcache.block.layout import KVLayout
from kvcache.block.record import Address
from kvcache.cache.cache import Cache
from kvcache.errors import ConfigError, StoreError
from kvcache.os_env import LocalDisk, OsEnv
from kvcache.settings.sources import load
from kvcache.testing.tier import Clock
from kvcache.tier.nvme.allocator import Allocator
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import GroupPages
from tests.fault.simulated_disk import SimDisk
from tests.tier.blocks import RECORD_BYTES, buffer, chain, holds
from tests.tier.tier_files import DONE, MIB, NOT_FOUND, Open, inline, read, write

# the directory


def test_a_second_owner_is_refused_with_the_firsts_pid(store: Open) -> None:
    tier = store()
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}; end it"):
        store()
    tier.close()
    store()


def test_a_killed_process_leaves_no_lock(store: Open, tmp_path: Path) -> None:
    code = (
        "import os, sys; from kvcache.settings.tiers import NvmeSettings; from kvcache.tier.nvme import NvmeTier;"
        "from tests.tier.blocks import *;"
        f"t = NvmeTier({str(tmp_path / 'store')!r}, NvmeSettings(capacity_bytes={4 * MIB}, min_free_bytes=0));"
        "b = chain(5); print(t.write(b, [record(a) for a in b])); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.count("DONE") == 5, ended.stderr
    tier = store()
    assert [read(tier, address) for address in chain(5)] == [DONE] * 5


def test_a_directory_with_foreign_files_is_refused(store: Open, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"'thesis.tex' but no FORMAT .* choose an empty directory"):
        store()
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"thesis.tex", "LOCK"}


def test_an_unknown_format_is_refused_and_kept(store: Open, tmp_path: Path) -> None:
    store().close()
    (tmp_path / "store" / "FORMAT").write_text("kvcache-nvme 2\n")
    before = {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()}
    with pytest.raises(StoreError, match="open it with the version that wrote it"):
        store()
    assert {path.name: path.read_bytes() for path in (tmp_path / "store").iterdir()} == before


class Refusing(LocalDisk):
    def __init__(self, number: int) -> None:
        self.number = number

    def make_directory(self, path: str) -> None:
        raise OSError(self.number, os.strerror(self.number), path)


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.EACCES, "permission to write there or choose another directory"),
        (errno.EROFS, "remount it or choose another directory"),
        (errno.ENOSPC, "free space or choose another directory"),
        (errno.ENOTDIR, "choose a directory"),
        (errno.EIO, "check the drive"),
    ],
)
def test_an_unusable_directory_is_reported_in_one_line(store: Open, number: int, advice: str) -> None:
    with pytest.raises(StoreError, match=advice) as refused:
        store(os_env=OsEnv(disk=Refusing(number)))
    assert "\n" not in str(refused.value)


def test_a_disk_without_space_is_refused(store: Open) -> None:
    with pytest.raises(StoreError, match="full"):
        store(os_env=OsEnv(disk=SimDisk(0, capacity_bytes=4), executor=inline))


@pytest.mark.parametrize("setting", [{"durability": "most"}, {"threads": 0}, {"segment_bytes": 0}, {"queue_bytes": 0}])
def test_an_invalid_setting_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"nvme.{next(iter(setting))} = "):
        load(None, nvme=setting)


def test_a_capacity_below_the_minimum_is_refused(store: Open) -> None:
    with pytest.raises(ConfigError, match=r"nvme.capacity_bytes = 8192: expected at least"):
        store(capacity_bytes=8192, segment_bytes=4096)


def test_a_full_disk_at_start_leaves_the_store_unchanged(store: Open) -> None:
    disk = SimDisk(0)
    tier = store(os_env=OsEnv(disk=disk, executor=inline))
    write(tier, chain(3))
    tier.close()
    disk.fails = {"write": (1.0, errno.ENOSPC)}
    with pytest.raises(StoreError):
        store(os_env=OsEnv(disk=disk, executor=inline))
    disk.fails = {}
    assert [read(store(os_env=OsEnv(disk=disk, executor=inline)), a) for a in chain(1)] == [DONE]


# bounds


def disk_usage(path: Path) -> int:
    return sum(entry.stat().st_blocks * 512 for entry in [path, *path.rglob("*")])


def test_the_disk_never_holds_more_than_the_capacity(store: Open, tmp_path: Path) -> None:
    """Churn of several sizes and many namespaces, through compactions and a restart, measured as `du` does."""
    tier = store(capacity_bytes=3 * MIB, durability="none")
    sizes = [1, 9_000, 60_000]
    held: list[Address] = []
    for turn in range(1500):
        address = chain(1, of=turn, seed=turn)[0]
        size = sizes[turn % 3]
        while write(tier, [address], size) == (Outcome.NO_CAPACITY,):
            victims = tier.colocated(held[0])
            tier.remove(victims)
            held = [a for a in held if a not in victims]
        held.append(address)
        if turn % 50 == 0:
            assert disk_usage(tmp_path / "store") <= 3 * MIB
        if turn % 400 == 399:
            tier.close()
            tier = store(capacity_bytes=3 * MIB, durability="none")
            assert tier.usage().records == len(held)
    assert disk_usage(tmp_path / "store") <= 3 * MIB
    assert len(tier._store.catalog.index.namespaces) < 1500


def test_compaction_keeps_the_journal_short(store: Open, tmp_path: Path) -> None:
    tier = store(durability="none")
    (address,) = chain(1)
    for _ in range(1200):
        write(tier, [address])
        tier.remove([address])
    assert tier.counters["compactions"] >= 1
    assert (tmp_path / "store" / f"journal-{tier._store.catalog.journal.number}").stat().st_size < 256 * 1024


def test_a_smaller_capacity_shrinks_the_store_at_start(store: Open, tmp_path: Path) -> None:
    tier = store(capacity_bytes=4 * MIB)
    blocks = chain(tier.free_slots(RECORD_BYTES))
    write(tier, blocks)
    tier.close()
    tier = store(capacity_bytes=2 * MIB)
    assert disk_usage(tmp_path / "store") <= 2 * MIB
    assert 0 < tier.usage().records < len(blocks)
    assert tier.usage().records + tier.counters["excess_records"] == len(blocks)


def test_free_space_never_falls_below_min_free_bytes(store: Open) -> None:
    disk = SimDisk(0, capacity_bytes=3 * MIB)
    tier = store(capacity_bytes=64 * MIB, min_free_bytes=MIB, os_env=OsEnv(disk=disk, executor=inline))
    outcomes = write(tier, chain(400))
    assert Outcome.NO_CAPACITY in outcomes
    assert disk.free_bytes("store") >= MIB - 100_000  # the journal is not a segment
    assert tier.free_slots(RECORD_BYTES) == 0


def test_a_full_disk_drops_writes_and_recovers(store: Open) -> None:
    disk, clock = SimDisk(0, capacity_bytes=3 * MIB), Clock()
    tier = store(capacity_bytes=64 * MIB, os_env=OsEnv(disk=disk, clock=clock, executor=inline))
    disk.free_bytes = lambda path: 1 << 40  # type: ignore[method-assign]  # a quota: the disk says nothing of it
    blocks = chain(400)
    outcomes = write(tier, blocks)
    stored = [a for a, outcome in zip(blocks, outcomes, strict=True) if outcome is DONE]
    assert set(outcomes) == {DONE, Outcome.NO_CAPACITY}
    assert tier.counters["disk_full"] >= 1
    assert all(read(tier, address) is DONE for address in stored)
    tier.remove(stored[:2])
    assert write(tier, stored[:2]) == (DONE, DONE)  # free slots need no new segment
    disk.capacity_bytes = 1 << 30
    clock.seconds += 2
    assert write(tier, blocks[-3:]) == (DONE,) * 3


def test_empty_segments_are_released(store: Open, tmp_path: Path) -> None:
    tier = store()
    blocks = chain(100)
    write(tier, blocks)
    assert len(list((tmp_path / "store").glob("segment-*"))) > 3
    tier.remove(blocks)
    assert len(list((tmp_path / "store").glob("segment-*"))) == 1


def test_a_large_store_uses_few_files() -> None:
    space = Allocator(10 << 40, 256 * MIB)
    files = 0
    while (segment := space.plan(364 << 10, 1 << 60)) is not None:
        space.claim(segment)
        space.add(segment)
        files += 1
    assert files <= 1000
    assert space.files_bytes > 9 << 40


def test_a_smaller_record_may_take_a_slightly_larger_slot(store: Open, tmp_path: Path) -> None:
    tier = store(capacity_bytes=8 * MIB, segment_bytes=MIB)
    large, small, smaller = chain(3)
    write(tier, [large], 100_000)
    write(tier, [small], 92_000)
    assert len(list((tmp_path / "store").glob("segment-*"))) == 1
    write(tier, [smaller], 40_000)
    assert len(list((tmp_path / "store").glob("segment-*"))) == 2
    into = buffer(92_000)
    assert tier.read([small], [into]) == (DONE,)
    assert holds(into, small, 92_000)


# durability


@pytest.mark.parametrize(("durability", "left"), [("none", 0), ("batch", 5), ("block", 5)])
def test_idle_records_survive_a_power_cut(store: Open, durability: str, left: int) -> None:
    disk = SimDisk(3)
    os_env = OsEnv(disk=disk, clock=Clock(), executor=inline)
    tier = store(durability=durability, os_env=os_env)
    write(tier, chain(5))
    tier._closed = True  # the machine is off
    disk.chance.seed(0)
    disk.restart(power_cut=True)
    tier = store(durability=durability, os_env=os_env)
    assert [read(tier, address) for address in chain(5)].count(DONE) >= left


def test_a_record_that_cannot_be_synced_is_a_miss(store: Open) -> None:
    disk = SimDisk(0)
    tier = store(durability="block", os_env=OsEnv(disk=disk, clock=Clock(), executor=inline))
    write(tier, chain(2))
    disk.fails = {"sync": (1.0, errno.EIO)}
    (address,) = chain(1, seed=1)
    assert write(tier, [address]) == (Outcome.FAILED,)
    assert tier.contains([address]) == (NOT_FOUND,)
    disk.fails = {}
    assert write(tier, [address]) == (DONE,)


@pytest.mark.parametrize("durability", ["batch", "block"])
def test_close_reports_a_failed_sync(store: Open, durability: str) -> None:
    disk = SimDisk(0)
    os_env = OsEnv(disk=disk, clock=Clock(), executor=inline)
    tier = store(durability=durability, os_env=os_env)
    tier._flush_after = 1e9  # nothing in the background
    write(tier, chain(3))
    disk.fails = {"sync": (1.0, errno.EIO)} if durability == "batch" else {}
    assert tier.close() == tier.close() == (durability == "block")
    disk.fails = {}
    tier = store(durability=durability, os_env=os_env)
    assert [read(tier, address) for address in chain(3)] == [DONE] * 3, "no power was cut"


def test_flush_reports_whether_all_blocks_are_durable(tmp_path: Path) -> None:
    settings = load(
        host={"capacity_bytes": 8 * MIB},
        nvme={"path": tmp_path / "store", "capacity_bytes": 8 * MIB, "min_free_bytes": 0},
    )
    layout = KVLayout.mha(layers=2, kv_heads=2, head_dim=32, dtype="fp32", block_tokens=4)
    tensors = np.zeros((2, 2, 8, 4, 2, 32), np.float32)
    pages = [GroupPages.from_tensors(layout, list(tensors), axes=("kv", "page", "token", "head", "dim"))]
    for fails in (False, True):
        disk = SimDisk(1)
        cache = Cache(settings, OsEnv(disk=disk))
        with cache.namespace(layout, model="m", revision="r").request() as r:
            r.match(range(32))
            assert r.store(pages, [list(range(8))]).wait(30)
        disk.fails = {"sync": (1.0, errno.EIO)} if fails else {}
        assert cache.close() is cache.close() is cache.flush() is not fails

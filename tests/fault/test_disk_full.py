"""A drive that is really full: an ext4 of a few MiB, mounted from a file where this machine lets us."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvcache
from examples.demo.breaking import small_drive
from kvcache.block.record import Address
from kvcache.cache.cache import Cache
from kvcache.os_env import InlineExecutor, OsEnv
from kvcache.settings.tiers import NvmeSettings
from kvcache.testing.tier import Clock
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.tier import Outcome
from tests.tier.blocks import buffer, chain, holds, record
from tests.tier.test_reported_bugs import load, put

DONE, NOT_FOUND, NO_CAPACITY = Outcome.DONE, Outcome.NOT_FOUND, Outcome.NO_CAPACITY
MIB = 1 << 20
FULL = {NO_CAPACITY, Outcome.FAILED}


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Path]:
    with small_drive(tmp_path, 24 * MIB) as (place, how):
        if place is None:
            pytest.skip(f"no file system can be mounted: {how}")
        yield place


def fill(drive: Path) -> Path:
    """Take every byte that is left."""
    ballast = drive / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (MIB, 4096, 1):
            while True:
                try:
                    if file.write(bytes(size)) < size:
                        break
                    os.fsync(file.fileno())
                except OSError:
                    break
    return ballast


def opened(drive: Path, clock: Clock) -> NvmeTier:
    return NvmeTier(
        str(drive / "store"),
        NvmeSettings(capacity_bytes=1 << 30, segment_bytes=2 * MIB, min_free_bytes=0),
        os_env=OsEnv(clock=clock, executor=lambda threads, name: InlineExecutor()),
    )


def intact(tier: NvmeTier, addresses: list[Address]) -> bool:
    into = [buffer() for _ in addresses]
    outcomes = tier.read(addresses, into)
    return set(outcomes) <= {DONE} and all(map(holds, into, addresses))


def test_a_full_file_system_drops_only_new_records(drive: Path) -> None:
    clock = Clock()
    tier = opened(drive, clock)
    blocks = chain(2000)
    outcomes = tier.write(blocks, [record(address) for address in blocks])
    stored = [address for address, outcome in zip(blocks, outcomes, strict=True) if outcome is DONE]
    assert set(outcomes) == {DONE, NO_CAPACITY}
    assert len(stored) > 500
    assert intact(tier, stored)
    assert tier.check() == []
    tier.remove(stored[:40])
    assert set(tier.write(stored[:40], [record(address) for address in stored[:40]])) == {DONE}
    assert tier.close()
    tier = opened(drive, clock)
    assert intact(tier, stored)
    assert tier.close()


def test_writes_resume_after_the_journal_can_grow(drive: Path) -> None:
    """Others took the last byte: slots are there, the journal's next frame is not."""
    clock = Clock()
    tier = opened(drive, clock)
    first = chain(20)
    assert set(tier.write(first, [record(address) for address in first])) == {DONE}
    ballast = fill(drive)
    more = chain(400, seed=1)
    outcomes = [tier.write([address], [record(address)])[0] for address in more]
    refused = [address for address, outcome in zip(more, outcomes, strict=True) if outcome is not DONE]
    assert set(outcomes) - {DONE} <= FULL
    assert refused, "the file system was full"
    assert tier.counters["write_errors"] >= 1
    assert set(tier.contains(refused)) == {NOT_FOUND}
    assert intact(tier, first), "reads go on"
    ballast.unlink()
    clock.seconds += 200  # the breaker's pause
    assert tier.write(refused[:1], [record(refused[0])]) == (DONE,)
    assert set(tier.write(refused[1:60], [record(address) for address in refused[1:60]])) == {DONE}
    assert tier.check() == []
    assert tier.close()
    tier = opened(drive, clock)
    there = first + [address for address, outcome in zip(more, outcomes, strict=True) if outcome is DONE] + refused[:60]
    assert intact(tier, there)
    assert tier.close()


def test_a_cache_over_a_full_drive_serves_from_memory(drive: Path) -> None:
    cache = kvcache.open(
        host={"capacity_bytes": 16 * MIB},
        nvme={"path": drive / "nvme", "capacity_bytes": 64 * MIB, "segment_bytes": 2 * MIB, "min_free_bytes": 0},
        control={"enabled": False},
    )
    assert isinstance(cache, Cache)
    ballast = fill(drive)
    tokens = list(range(240))
    put(cache, tokens)
    cache.flush(30)
    assert load(cache, tokens) == 60
    ballast.unlink()
    assert cache.check() == []
    cache.close()


def test_a_read_only_file_system_is_still_read(drive: Path) -> None:
    """As ext4 does it by itself, where it met an error: everything written from then on fails."""
    with Path("/proc/self/mounts").open() as mounts:
        device = next(line.split()[0] for line in mounts if line.split()[1] == str(drive))
    trigger = Path("/sys/fs/ext4") / Path(device).name / "trigger_fs_error"
    subprocess.run(["mount", "-o", "remount,errors=remount-ro", drive], check=True)
    clock = Clock()
    tier = opened(drive, clock)
    blocks, more = chain(20), chain(6, seed=1)
    assert set(tier.write(blocks, [record(address) for address in blocks])) == {DONE}
    assert tier.sync()
    try:
        trigger.write_text("1")
    except OSError as error:
        tier.close()
        pytest.skip(f"no error can be made in an ext4 here: {error}")
    outcomes = [tier.write([address], [record(address)])[0] for address in more]
    assert set(outcomes) <= {Outcome.FAILED, NO_CAPACITY}
    assert tier.counters["breaker_opened"] == 1
    assert len(tier.health_issues()) == 1
    assert intact(tier, blocks), "reads go on"
    assert set(tier.contains(more)) == {NOT_FOUND}
    tier.close()

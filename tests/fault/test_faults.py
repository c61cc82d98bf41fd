"""Single faults of a drive, each at every place or in every kind: what the tier says then, and what is left."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcache.block.record import Address
from kvcache.os_env import File, InlineExecutor, LocalDisk, OsEnv
from kvcache.settings.tiers import NvmeSettings
from kvcache.testing.tier import Clock
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme import tier as nvme_tier
from kvcache.tier.tier import BACKGROUND, DEMAND, Outcome
from tests.fault.nvme_simulation import ERRORS, NvmeSimulation
from tests.fault.simulated_disk import Crash, SimDisk
from tests.tier.blocks import buffer, chain, holds, record

DONE, NOT_FOUND, FAILED = Outcome.DONE, Outcome.NOT_FOUND, Outcome.FAILED
SIZES = [1, 5_000, 20_000, 150_000]
BLOCKS = [*chain(8), *chain(3, seed=1)]


def size_of(address: Address) -> int:
    return SIZES[address.key[0] % len(SIZES)]


def simulated(disk: SimDisk, durability: str = "block") -> NvmeTier:
    """A tier that does everything where it is asked, on a disk of ours."""
    return NvmeTier(
        "store",
        NvmeSettings(capacity_bytes=3 << 20, segment_bytes=256 << 10, durability=durability, min_free_bytes=0),
        os_env=OsEnv(disk=disk, clock=Clock(), executor=lambda threads, name: InlineExecutor()),
    )


def write(tier: NvmeTier, *addresses: Address) -> tuple[Outcome, ...]:
    return tier.write(addresses, [record(address, size_of(address)) for address in addresses])


def read(tier: NvmeTier, address: Address) -> Outcome:
    into = buffer(size_of(address))
    (outcome,) = tier.read([address], [into])
    assert outcome is not DONE or holds(into, address, size_of(address))
    return outcome


@pytest.mark.parametrize("number", ERRORS)
@pytest.mark.parametrize("kind", ["read", "write", "sync"])
def test_every_errno_is_survived(kind: str, number: int) -> None:
    for seed in range(2):
        NvmeSimulation(seed, fault=f"{kind} errors", errors=[number]).run()


@pytest.mark.parametrize("power_cut", [False, True])
def test_a_crash_at_every_step_is_survived(power_cut: bool) -> None:
    """Of one run that makes, fills, empties and releases segments, and compacts."""
    length = 0
    while True:
        length += 1
        disk = SimDisk(length, capacity_bytes=6 << 20)
        tier = simulated(disk)
        disk.crash_at = disk.steps + length
        safe: set[Address] = set()
        gone: set[Address] = set()
        try:
            for address in BLOCKS[:8]:
                assert write(tier, address) == (DONE,)
                safe.add(address)
            for part in (BLOCKS[2:6], BLOCKS[:8]):
                gone |= set(part)
                tier.remove(part)
                tier._store.barrier.compact(due=False)
                write(tier, part[1])
            tier.close()
            break
        except Crash:
            disk.restart(power_cut=power_cut)
            tier = simulated(disk)
            assert {a for a in BLOCKS if read(tier, a) is DONE} >= safe - gone
            assert write(tier, BLOCKS[10]) == (DONE,)
            assert tier.check() == []
            tier.close()
    assert length > 60


def test_a_failed_compaction_loses_nothing_durable() -> None:
    """The disk is full when the checkpoint is due; the store goes on, is synced, and the power goes."""
    for seed in range(20):
        disk = SimDisk(seed)
        tier = simulated(disk, "batch")
        tier._flush_after = 1e9  # nothing in the background
        create = tier._store.directory.create

        def fail(name: str, parts: Iterable[bytes], create: Callable[..., File] = create) -> File:
            if name.startswith("checkpoint"):
                raise OSError(errno.ENOSPC, "full")
            return create(name, parts)

        write(tier, BLOCKS[0])
        tier._store.directory.create = fail  # type: ignore[method-assign]
        assert not tier._store.barrier.compact(due=False)
        write(tier, BLOCKS[1])
        assert tier._store.barrier.sync()
        disk.restart(power_cut=True)
        tier = simulated(disk)
        assert [read(tier, address) for address in BLOCKS[:2]] == [DONE, DONE]
        assert tier.check() == []
        tier.close()


def test_writes_of_a_failed_sync_are_written_again() -> None:
    """The disk forgets what it could not sync, and says yes the next time."""
    for seed in range(10):
        disk = SimDisk(seed)
        tier = simulated(disk, "batch")
        tier._flush_after = 1e9  # nothing in the background
        write(tier, *BLOCKS[:3])
        disk.fails = {"sync": (1.0, errno.EIO)}
        assert not tier.sync()
        assert tier.contains(BLOCKS[:3]) == (DONE,) * 3
        disk.fails = {}
        assert tier.sync()
        disk.restart(power_cut=True)
        tier = simulated(disk, "batch")
        assert [read(tier, address) for address in BLOCKS[:3]] == [DONE] * 3
        assert tier.check() == []
        tier.close()


def test_a_sync_fails_if_records_cannot_be_read_back() -> None:
    disk = SimDisk(0)
    tier = simulated(disk, "batch")
    tier._flush_after = 1e9
    write(tier, *BLOCKS[:2])
    disk.fails = {"sync": (1.0, errno.EIO)}
    assert not tier.sync()
    disk.fails = {"read": (1.0, errno.EIO)}
    assert not tier.sync()
    segment, slot, _ = tier._store.catalog.find(BLOCKS[0]) or pytest.fail("not there")
    disk.fails = {}
    disk.data(f"store/segment-{segment.number:06d}")[slot * segment.slot_bytes + 4096] ^= 1
    assert tier.sync()
    assert tier.contains(BLOCKS[:2]) == (NOT_FOUND, DONE)
    assert tier.counters["unsafe_records"] == 1
    tier.close()


def test_a_bad_sector_fails_only_its_record() -> None:
    """Neighbours are read by one call; where it fails each is read alone."""
    disk = SimDisk(0)
    tier = simulated(disk)
    blocks = chain(4)
    tier.write(blocks, [record(a, 5_000) for a in blocks])
    segment, slot, _ = tier._store.catalog.find(blocks[2]) or pytest.fail("not there")
    file = segment.open(disk, "")
    bad, plain = slot * segment.slot_bytes, file.read

    def fail(offset: int, buffers: list[memoryview]) -> int:
        if offset <= bad < offset + sum(map(len, buffers)):
            raise OSError(errno.EIO, "a bad sector")
        return plain(offset, buffers)

    file.read = fail  # type: ignore[method-assign,assignment]
    into = [buffer(5_000) for _ in blocks]
    assert tier.read(blocks, into) == (DONE, DONE, FAILED, DONE)
    assert tier.counters["read_errors"] == 1
    file.read = plain  # type: ignore[method-assign]
    tier.close()


# a drive that hangs


class Hanging(LocalDisk):
    """Writes to segments wait while `hangs` is set; reads go on, as on a frozen file system."""

    def __init__(self) -> None:
        self.may_write = threading.Event()
        self.may_write.set()
        self.stuck = threading.Semaphore(0)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        file = super().open(path, create=create, direct=direct)
        plain = file.write

        def wait(offset: int, buffers: list[memoryview]) -> None:
            if not self.may_write.is_set():
                self.stuck.release()
                self.may_write.wait()
            plain(offset, buffers)

        if direct:
            file.write = wait  # type: ignore[method-assign,assignment]
        return file


@contextmanager
def hanging(path: Path, clock: Clock, threads: int = 4) -> Iterator[tuple[NvmeTier, Hanging]]:
    disk = Hanging()
    tier = NvmeTier(
        str(path / "store"),
        NvmeSettings(capacity_bytes=16 << 20, min_free_bytes=0, threads=threads),
        os_env=OsEnv(disk=disk, clock=clock),
    )
    yield tier, disk
    disk.may_write.set()
    tier.close()


def test_a_drive_that_hangs_on_writes_still_reads(tmp_path: Path) -> None:
    clock = Clock()
    with hanging(tmp_path, clock) as (tier, disk):
        here, new, more = chain(3), chain(8, seed=1), chain(2, seed=2)
        tier.write(here, [record(a) for a in here])
        disk.may_write.clear()
        stuck = tier.submit("write", new, [record(a) for a in new], priority=BACKGROUND)
        for _ in range(3):
            disk.stuck.acquire()
        into = buffer()
        assert tier.read(here[:1], [into]) == (DONE,)
        assert holds(into, here[0])
        clock.seconds += 60.0
        refused = tier.submit("write", more, [record(a) for a in more])
        assert (refused.outcomes, refused.checks) == ((FAILED, FAILED), {0: "hung", 1: "hung"})
        disk.may_write.set()
        assert stuck.wait(60)
        assert tier.write(more, [record(a) for a in more]) == (DONE, DONE)


def test_requests_behind_a_hung_drive_time_out(tmp_path: Path) -> None:
    """Nobody calls the tier meanwhile: the ticket itself knows the time."""
    clock = Clock()
    with hanging(tmp_path, clock, threads=1) as (tier, disk):
        disk.may_write.clear()
        tier.submit("write", chain(1), [record(chain(1)[0])])
        disk.stuck.acquire()
        late = clock.now() + 5.0
        ticket = tier.submit("read", chain(2, seed=1), [buffer(), buffer()], priority=DEMAND, deadline=late)
        assert not ticket.done
        clock.seconds += 6.0
        assert ticket.wait(0)
        assert ticket.outcomes == (Outcome.TIMED_OUT, Outcome.TIMED_OUT)


def test_close_has_a_time_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvme_tier, "_CLOSE_S", 0.0)
    with hanging(tmp_path, Clock(), threads=1) as (tier, disk):
        disk.may_write.clear()
        under_way = tier.submit("write", chain(1), [record(chain(1)[0])])
        disk.stuck.acquire()
        waiting = tier.submit("write", chain(1, seed=1), [record(chain(1, seed=1)[0])])
        tier.close()
        assert (waiting.outcomes, waiting.checks) == ((FAILED,), {0: "hung"})
        assert not under_way.done
        disk.may_write.set()
        assert under_way.wait(60)


def test_a_deleted_directory_gives_misses_and_refusals(tmp_path: Path) -> None:
    tier = NvmeTier(str(tmp_path / "store"), NvmeSettings(capacity_bytes=4 << 20, min_free_bytes=0))
    blocks = chain(3)
    tier.write(blocks, [record(a) for a in blocks])
    tier.sync()
    tier._store.catalog.close()
    shutil.rmtree(tmp_path / "store")
    assert set(tier.read(blocks, [buffer() for _ in blocks])) <= {NOT_FOUND, FAILED}
    assert DONE not in tier.write(chain(2, seed=1), [record(a) for a in chain(2, seed=1)])
    assert tier.free_slots(1 << 20) >= 0
    assert not tier.sync()
    tier.close()


def test_a_remounted_directory_is_used_again(tmp_path: Path) -> None:
    """The directory is gone under a running tier, and later there again, as it was."""
    clock = Clock()
    tier = NvmeTier(
        str(tmp_path / "store"),
        NvmeSettings(capacity_bytes=16 << 20, segment_bytes=256 << 10, min_free_bytes=0),
        os_env=OsEnv(clock=clock, executor=lambda threads, name: InlineExecutor()),
    )
    blocks, more = chain(10), chain(12, seed=1)
    for address in blocks:
        assert tier.write([address], [record(address, 100_000)]) == (DONE,)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    outcomes = [tier.write([address], [record(address, 200_000)])[0] for address in more]  # each needs a new segment
    assert set(outcomes) == {FAILED}
    assert tier.counters["breaker_opened"] == 1
    assert tier.health_issues()
    into = buffer(100_000)
    assert tier.read(blocks[-1:], [into]) == (DONE,), "what is open can be read"
    assert holds(into, blocks[-1], 100_000)
    (tmp_path / "elsewhere").rename(tmp_path / "store")
    clock.seconds += 200
    assert tier.write(more[:1], [record(more[0], 200_000)]) == (DONE,)
    assert tier.health_issues() == []
    assert tier.write(more[1:], [record(address, 200_000) for address in more[1:]]) == (DONE,) * 11
    assert tier.check() == []
    assert tier.close()

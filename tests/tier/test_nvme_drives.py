"""Several drives as one tier: each block on one of them, and a drive that fails takes only its own."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.errors import ConfigError, StoreError
from kvcache.os_env import Disk, File, LocalDisk, OsEnv
from kvcache.settings.sources import load
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.nvme import NvmeTier, open_drives
from kvcache.tier.nvme.drives import MultiDriveTier
from kvcache.tier.nvme.store import SUSPECT_AFTER_RECORDS
from kvcache.tier.tier import Outcome
from tests.tier.blocks import RECORD_BYTES, buffer, chain, holds, record
from tests.tier.tier_files import DAMAGED, DONE, MIB, NOT_FOUND, inline

NAMES = ("one", "two", "three")
BLOCKS = chain(90)


class Failing(LocalDisk):
    """One directory's drive does not answer."""

    def __init__(self) -> None:
        self.broken = ""

    def make_directory(self, path: str) -> None:
        self._ask(path)
        super().make_directory(path)

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        self._ask(path)
        return super().open(path, create=create, direct=direct)

    def _ask(self, path: str) -> None:
        if self.broken and f"/{self.broken}" in path:
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)


Open = Callable[..., MultiDriveTier]


@pytest.fixture
def drives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Paths from here on: a block's drive is drawn by its key and the drive's path, which must not be another one in
    each run."""
    monkeypatch.chdir(tmp_path)
    opened: list[MultiDriveTier] = []

    def open_them(*names: str, disk: Disk | None = None, **settings: Any) -> MultiDriveTier:
        given = {"capacity_bytes": 12 * MIB, "segment_bytes": MIB // 4, "min_free_bytes": 0, **settings}
        paths = {"paths": [f"./{name}" for name in names or NAMES]}  # validation would make them absolute
        os_env = OsEnv(disk=disk or LocalDisk(), executor=inline)
        tier = open_drives(NvmeSettings(**given).model_copy(update=paths), os_env=os_env)
        assert isinstance(tier, MultiDriveTier)
        opened.append(tier)
        return tier

    yield open_them
    for tier in opened:
        if not tier._closed:
            assert tier.check() == []
            assert tier.close()


def write(tier: MultiDriveTier) -> tuple[Outcome, ...]:
    return tier.write(BLOCKS, [record(address) for address in BLOCKS])


def found(tier: MultiDriveTier) -> set[int]:
    """Which blocks are there; each of them is what was written."""
    into = [buffer() for _ in BLOCKS]
    outcomes = tier.read(BLOCKS, into)
    there = {i for i, outcome in enumerate(outcomes) if outcome is DONE}
    assert all(holds(into[i], BLOCKS[i]) for i in there)
    return there


def test_blocks_spread_evenly_over_drives(drives: Open) -> None:
    tier = drives()
    assert set(write(tier)) == {DONE}
    parts = [one.usage().records for one in tier.tiers]
    assert sum(parts) == tier.usage().records == len(BLOCKS)
    assert all(15 <= part <= 45 for part in parts)
    assert len(found(tier)) == len(BLOCKS)


def test_scan_joins_a_chain_across_drives(drives: Open) -> None:
    tier = drives()
    write(tier)
    ((head, signatures),) = tier.runs()
    assert head == BLOCKS[0]
    assert signatures == b"".join(address.signature for address in BLOCKS)
    assert list(tier.scan()) == BLOCKS


def test_the_order_of_the_directories_does_not_matter(drives: Open) -> None:
    tier = drives()
    write(tier)
    tier.close()
    assert len(found(drives(*reversed(NAMES)))) == len(BLOCKS)


def test_an_added_drive_takes_new_blocks_without_moves(drives: Open) -> None:
    tier = drives("one", "two")
    write(tier)
    tier.close()
    tier = drives()
    assert len(found(tier)) == len(BLOCKS)
    other = chain(90, seed=1)
    assert set(tier.write(other, [record(address) for address in other])) == {DONE}
    assert 8 <= tier.tiers[2].usage().records <= 55  # a third, give or take what chance does


def test_a_missing_drive_loses_only_its_blocks(drives: Open) -> None:
    disk = Failing()
    tier = drives(disk=disk)
    write(tier)
    own = {i for i in range(len(BLOCKS)) if not tier.tiers[1].has_names([BLOCKS[i]])[0]}
    tier.close()
    disk.broken = "two"
    tier = drives(disk=disk)
    assert found(tier) == own
    (trouble,) = tier.health_issues()
    assert "/two" in trouble
    assert set(write(tier)) == {DONE}, "the others take its blocks meanwhile"
    assert len(found(tier)) == len(BLOCKS)
    tier.close()
    disk.broken = ""
    tier = drives(disk=disk)
    assert len(found(tier)) == tier.usage().records == len(BLOCKS), "no block is on two drives"


def test_a_failing_drive_loses_only_its_blocks(drives: Open, tmp_path: Path) -> None:
    tier = drives()
    write(tier)
    own = {i for i in range(len(BLOCKS)) if not tier.tiers[0].has_names([BLOCKS[i]])[0]}
    tier.close()
    tier = drives()
    for path in (tmp_path / "one").glob("segment-*"):
        path.unlink()
    assert found(tier) == own
    assert set(write(tier)) == {DONE}
    assert len(found(tier)) == len(BLOCKS)


def test_a_suspect_drive_takes_records_after_a_scrub(drives: Open, tmp_path: Path) -> None:
    tier = drives()
    write(tier)
    one = tier.tiers[0]
    mine = [address for address in BLOCKS if one.has_names([address])[0]]
    bad, good = mine[:SUSPECT_AFTER_RECORDS], mine[SUSPECT_AFTER_RECORDS:]
    assert good, "the drive has more than are damaged"
    for address in bad:
        segment, slot, _ = one._store.catalog.find(address) or pytest.fail("it was written")
        with (tmp_path / "one" / f"segment-{segment.number:06d}").open("r+b") as file:
            file.seek(slot * segment.slot_bytes + RECORD_BYTES - 5000)
            file.write(b"damage")
    assert set(one.read(bad, [buffer() for _ in bad])) == {DAMAGED}
    (trouble,) = tier.health_issues()
    assert "16 records were damaged" in trouble
    assert set(one.read(good, [buffer() for _ in good])) == {DONE}, "reads go on"
    (alone,) = chain(1, seed=5)
    assert one.write([alone], [record(alone)]) == (Outcome.FAILED,)
    assert set(tier.write(bad, [record(address) for address in bad])) == {DONE}, "other drives take them"
    assert not any(one.has_names(bad))
    scrubbed = one.scrub()
    assert (scrubbed.records, scrubbed.damaged) == (len(good), 0)
    assert tier.health_issues() == []
    assert one.write([alone], [record(alone)]) == (DONE,)


def test_blocks_of_a_full_drive_go_to_other_drives(drives: Open) -> None:
    tier = drives(capacity_bytes=3 * MIB)
    room = tier.free_slots(RECORD_BYTES)
    many = chain(room, seed=2)
    outcomes = [tier.write([address], [record(address)])[0] for address in many]
    assert outcomes == [DONE] * room
    assert tier.free_slots(RECORD_BYTES) == 0


def test_cancel_reaches_every_drive(drives: Open) -> None:
    tier = drives()
    ticket = tier.submit("write", BLOCKS, [record(address) for address in BLOCKS])
    ticket.cancel()
    assert all(part.cancelled for _, part in ticket.parts)  # type: ignore[attr-defined]


def test_invalid_paths_are_refused(tmp_path: Path) -> None:
    one = str(tmp_path / "one")
    with pytest.raises(ConfigError, match=r"nvme.paths = .*each once"):
        load(None, nvme={"paths": [one, one]})


def test_a_directory_of_another_process_is_refused(tmp_path: Path, drives: Open) -> None:
    drives("one", "two")
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}"):
        drives("one", "three")
    shutil.rmtree(tmp_path / "three", ignore_errors=True)


def test_one_directory_opens_a_plain_tier(tmp_path: Path) -> None:
    tier = open_drives(NvmeSettings(paths=[str(tmp_path / "one")], capacity_bytes=4 * MIB, min_free_bytes=0))
    assert isinstance(tier, NvmeTier)
    tier.close()
    assert NOT_FOUND is Outcome.NOT_FOUND

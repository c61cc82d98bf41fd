"""Records, segments and journals that changed under the NVMe tier, and a drive that fails."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.record import Address, header_area, record_bytes, seal
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import NvmeSettings
from kvcache.testing.tier import Clock
from kvcache.tier.breaker import CircuitBreaker
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme.store import SUSPECT_AFTER_RECORDS
from kvcache.tier.tier import Outcome
from tests.fault.simulated_disk import SimDisk
from tests.tier.blocks import PAYLOAD_BYTES, RECORD_BYTES, buffer, chain, record
from tests.tier.tier_files import DAMAGED, DONE, MIB, NOT_FOUND, Open, change, inline, place, read, write


@given(data=st.data())
def test_a_changed_byte_is_a_miss(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any byte that means something: a miss, counted, the slot not used again, the neighbours whole."""
    path = tmp_path_factory.mktemp("flip")
    tier = NvmeTier(
        str(path / "store"),
        NvmeSettings(capacity_bytes=4 * MIB, segment_bytes=MIB // 4, durability="none", min_free_bytes=0),
        os_env=OsEnv(executor=inline),
    )
    blocks = chain(3)
    write(tier, blocks)
    file, offset = place(path, tier, blocks[1])
    header = 136 + 6 + 32 + 6 + 8  # fixed part, parent, one chunk sum
    at = data.draw(st.integers(0, header - 1) | st.integers(0, PAYLOAD_BYTES - 1).map(lambda i: 4096 + i))
    change(file, offset + at, lambda old: old ^ data.draw(st.integers(1, 255)))
    outcome = read(tier, blocks[1])
    assert outcome in {DAMAGED, Outcome.INCOMPATIBLE}
    if outcome is DAMAGED:
        assert tier.counters["damaged"] == 1
        assert tier.contains([blocks[1]]) == (NOT_FOUND,)
        assert write(tier, [blocks[1]]) == (DONE,)
        assert place(path, tier, blocks[1]) != (file, offset)
    else:
        assert tier.counters["foreign"] == 1
        assert tier.contains([blocks[1]]) == (DONE,)
        assert tier.remove([blocks[1]]) == (DONE,)
    assert [read(tier, address) for address in (blocks[0], blocks[2])] == [DONE, DONE]
    assert tier.check() == []
    tier.close()


def test_quarantine_outlives_a_restart(store: Open, tmp_path: Path) -> None:
    tier = store()
    blocks = chain(3)
    write(tier, blocks)
    room = tier.free_slots(RECORD_BYTES)
    file, offset = place(tmp_path, tier, blocks[1])
    change(file, offset + 5000, lambda old: old ^ 1)
    assert read(tier, blocks[1]) is DAMAGED
    assert tier.free_slots(RECORD_BYTES) == room
    tier.close()
    tier = store()
    assert tier.free_slots(RECORD_BYTES) == room
    write(tier, blocks)
    assert place(tmp_path, tier, blocks[1]) != (file, offset)


def test_another_records_bytes_are_a_miss_and_free_the_slot(store: Open, tmp_path: Path) -> None:
    """As after a power cut that took a removal and kept the next write into the slot."""
    tier = store()
    one, other = chain(2)
    write(tier, [one])
    file, offset = place(tmp_path, tier, one)
    with file.open("r+b") as segment:
        segment.seek(offset)
        segment.write(b"".join(record(other)))
    room = tier.free_slots(RECORD_BYTES)
    assert read(tier, one) is DAMAGED
    assert read(tier, other) is NOT_FOUND
    assert tier.free_slots(RECORD_BYTES) == room + 1


def test_a_truncated_segment_is_a_miss(store: Open, tmp_path: Path) -> None:
    for length in (0, 1, 4095, 4096, RECORD_BYTES - 1):
        tier = store()
        (address,) = chain(1, seed=length)
        write(tier, [address])
        file, offset = place(tmp_path, tier, address)
        tier.close()
        os.truncate(file, offset + length)
        tier = store()
        assert read(tier, address) is DAMAGED
        assert tier.contains([address]) == (NOT_FOUND,)
        tier.close()


@pytest.mark.parametrize("when", ["closed", "open"])
def test_a_missing_segment_loses_only_its_records(store: Open, tmp_path: Path, when: str) -> None:
    tier = store()
    blocks = chain(40)
    write(tier, blocks)
    file, _ = place(tmp_path, tier, blocks[0])
    gone = tier.colocated(blocks[0])
    tier.close()
    if when == "closed":
        file.unlink()
    tier = store()
    if when == "open":
        file.unlink()
    assert read(tier, blocks[0]) is NOT_FOUND
    assert {a for a in blocks if tier.contains([a]) == (NOT_FOUND,)} == set(gone)
    assert tier.usage().records == len(blocks) - len(gone)
    assert tier.counters["lost_records"] == len(gone)
    assert set(write(tier, gone)) == {DONE}


def test_a_damaged_journal_is_reported_and_the_rest_used(
    store: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = store()
    blocks = chain(8)
    for address in blocks:
        write(tier, [address])
    tier.close()
    file = tmp_path / "store" / "journal-1"
    change(file, file.stat().st_size // 2, lambda old: old ^ 1)
    tier = store()
    assert tier.counters["journal_damaged"] == 1
    assert "journal-1 is damaged" in caplog.text
    outcomes = [read(tier, address) for address in blocks]
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome is NOT_FOUND)
    assert 0 < outcomes.count(DONE) < 8
    assert set(write(tier, blocks)) == {DONE}
    tier.close()
    assert [read(store(), blocks[-1])] == [DONE]


# a drive that fails


def test_writes_stop_after_errors_and_resume(store: Open) -> None:
    disk, clock = SimDisk(0), Clock()
    tier = store(os_env=OsEnv(disk=disk, clock=clock, executor=inline))
    here = chain(2)
    write(tier, here)
    disk.fails = {"write": (1.0, errno.EIO)}
    for i in range(10):
        assert write(tier, chain(1, seed=10 + i)) == (Outcome.FAILED,)
    assert tier.counters["write_errors"] == 3
    assert tier.counters["breaker_opened"] == 1
    assert [read(tier, address) for address in here] == [DONE, DONE]
    disk.fails = {}
    assert write(tier, chain(1, seed=30)) == (Outcome.FAILED,)
    clock.seconds += 1.5
    assert write(tier, chain(3, seed=30)) == (DONE,) * 3


def test_a_failed_read_is_a_miss_and_keeps_the_record(store: Open) -> None:
    disk = SimDisk(0)
    tier = store(os_env=OsEnv(disk=disk, executor=inline))
    (address,) = chain(1)
    write(tier, [address])
    disk.fails = {"read": (1.0, errno.EIO)}
    ticket = tier.submit("read", [address], [buffer()])
    assert (ticket.outcomes, ticket.checks) == ((Outcome.FAILED,), {0: "EIO"})
    disk.fails = {}
    assert read(tier, address) is DONE


def test_the_breaker_doubles_and_resets_its_pause() -> None:
    clock = Clock()
    breaker = CircuitBreaker(clock, errors=2, pause_s=1.0, max_pause_s=4.0)
    assert not breaker.record_failure()
    assert breaker.record_failure()
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        clock.seconds += pause_s * 0.9
        assert not breaker.allows()
        clock.seconds += pause_s * 0.2
        assert breaker.allows()
        assert not breaker.allows()  # one probe at a time
        assert not breaker.record_failure()
    clock.seconds += 5.0
    assert breaker.allows()
    breaker.record_success()
    assert breaker.allows()
    assert not breaker.record_failure()


def test_a_race_for_a_slot_is_a_miss_not_a_wrong_byte(store: Open) -> None:
    """A read that is overtaken by removal and reuse of its slot."""
    disk = SimDisk(0)
    tier = store(os_env=OsEnv(disk=disk, executor=inline))
    one, other = chain(2)
    write(tier, [one])
    room = tier.free_slots(RECORD_BYTES)
    ask, done = disk.ask, threading.Event()

    def overtake(kind: str, grows: int = 0) -> None:
        if kind == "read" and not done.is_set():
            done.set()
            tier.remove([one])
            tier.write([other], [record(other)])
        ask(kind, grows)

    disk.ask = overtake  # type: ignore[method-assign]
    assert read(tier, one) is NOT_FOUND
    disk.ask = ask  # type: ignore[method-assign]
    assert read(tier, other) is DONE
    assert tier.free_slots(RECORD_BYTES) == room


def test_a_compressed_record_uses_its_stored_size(store: Open) -> None:
    """The header area is that of the decoded size; the payload is as long as it is stored."""
    tier = store()
    (address,) = chain(1)
    area, stored = header_area(600_000), 50_000
    header, body = memoryview(bytearray(area)), memoryview(bytearray(53_248))
    body[:stored] = bytes(range(250)) * 200
    seal(header, body, address, stored_bytes=stored, decoded_bytes=600_000, codec="zstd")
    assert tier.write([address], [[header, body]]) == (DONE,)
    assert tier.usage().used_bytes == area + 53_248 < record_bytes(600_000)
    into = buffer(600_000)
    assert tier.read([address], [into]) == (DONE,)
    assert into[1][:stored] == body[:stored]


@pytest.mark.parametrize(("durability", "suspect"), [("batch", True), ("none", False)])
def test_only_synced_records_make_a_drive_suspect(store: Open, tmp_path: Path, durability: str, suspect: bool) -> None:
    """A power cut takes much of what was never synced, from the best of drives."""
    tier = store(durability=durability)
    blocks = chain(SUSPECT_AFTER_RECORDS)
    write(tier, blocks)
    tier.close()
    tier = store(durability=durability)
    for address in blocks:
        path, offset = place(tmp_path, tier, address)
        change(path, offset + 5000, lambda byte: byte ^ 1)
        assert read(tier, address) is DAMAGED
    assert bool(tier.health_issues()) == suspect
    (new,) = chain(1, seed=3)
    assert write(tier, [new]) == ((Outcome.FAILED,) if suspect else (DONE,))


def test_records_lost_during_a_sync_are_reported(store: Open, tmp_path: Path) -> None:
    """A sync failed, or a process ended before one: what it should have covered is read again, and need not be well."""
    tier = store(durability="batch")
    tier._flush_after = 1e9
    blocks = chain(5)
    write(tier, blocks)
    tier._closed = True  # ends without a sync
    tier._store.catalog.close()
    tier._store.directory.release()
    tier = store(durability="batch")
    lost: list[Address] = []
    tier.on_loss(lost.append)
    path, offset = place(tmp_path, tier, blocks[2])
    change(path, offset + 5000, lambda byte: byte ^ 1)
    assert tier.sync()
    assert lost == [blocks[2]]
    assert tier.contains(blocks) == (DONE, DONE, NOT_FOUND, DONE, DONE)
    for segment in (tmp_path / "store").glob("segment-*"):
        segment.unlink()
    tier._store.catalog.allocator.segments[1].close()
    assert read(tier, blocks[0]) is NOT_FOUND
    assert set(lost) == set(blocks)

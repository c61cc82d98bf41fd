"""What the NVMe tier promises beyond the contract: owners, damage, bounds, queues, a drive that fails."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.address import Address
from kvcache.block.record import header_area, record_bytes, seal
from kvcache.errors import ConfigError, StoreError
from kvcache.port import InlineExecutor, LocalDisk, Port, SystemClock
from kvcache.tier.breaker import Breaker
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.tier import AHEAD, BACKGROUND, WAITING, Outcome
from tests.fault.disk import SimDisk
from tests.tier.blocks import PAYLOAD_BYTES, RECORD_BYTES, buffer, chain, holds, record

DONE, ABSENT, DAMAGED = Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED
MIB = 1 << 20


class Clock(SystemClock):
    seconds = 0.0

    def now(self) -> float:
        return self.seconds


class Held(InlineExecutor):
    """Runs nothing until `release`: what is submitted waits in the tier's queue."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        self.calls.append(call)
        return Future()

    def release(self) -> None:
        while self.calls:
            self.calls.pop(0)()


def inline(threads: int, name: str) -> InlineExecutor:
    return InlineExecutor()


Open = Callable[..., NvmeTier]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers in one directory; each that is still open at the end is audited and closed."""
    opened: list[NvmeTier] = []

    def open_tier(**settings: Any) -> NvmeTier:
        settings = {"capacity_bytes": 4 * MIB, "segment_bytes": MIB // 4, "free_floor_bytes": 0, **settings}
        settings.setdefault("port", Port(executor=inline))
        opened.append(NvmeTier(str(tmp_path / "store"), **settings))
        return opened[-1]

    yield open_tier
    for tier in opened:
        if not tier._closed:
            assert tier.check() == []
            tier.close()


def write(tier: NvmeTier, addresses: list[Address], size: int = PAYLOAD_BYTES) -> tuple[Outcome, ...]:
    return tier.write(addresses, [record(address, size) for address in addresses])


def read(tier: NvmeTier, address: Address) -> Outcome:
    into = buffer()
    (outcome,) = tier.read([address], [into])
    assert outcome is not DONE or holds(into, address)
    return outcome


def place(tmp_path: Path, tier: NvmeTier, address: Address) -> tuple[Path, int]:
    """The file and offset of a record."""
    found = tier._store.ledger.find(address)
    assert found is not None
    return tmp_path / "store" / f"segment-{found[0].number:06d}", found[1] * found[0].slot_bytes


def change(path: Path, offset: int, to: Callable[[int], int]) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([to(old)]))


# the directory


def test_a_second_owner_is_told_the_first_ones_process(store: Open) -> None:
    tier = store()
    with pytest.raises(StoreError, match=f"in use by process {os.getpid()}; end it"):
        store()
    tier.close()
    store()


def test_a_process_that_was_killed_leaves_no_lock(store: Open, tmp_path: Path) -> None:
    code = (
        "import os, sys; from kvcache.tier.nvme import NvmeTier; from tests.tier.blocks import *;"
        f"t = NvmeTier({str(tmp_path / 'store')!r}, capacity_bytes={4 * MIB}, free_floor_bytes=0);"
        "b = chain(5); print(t.write(b, [record(a) for a in b])); sys.stdout.flush(); os.kill(os.getpid(), 9)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.stdout.count("DONE") == 5, ended.stderr
    tier = store()
    assert [read(tier, address) for address in chain(5)] == [DONE] * 5


def test_a_strangers_directory_is_refused(store: Open, tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "thesis.tex").write_text("years of work")
    with pytest.raises(StoreError, match=r"'thesis.tex' but no FORMAT .* choose an empty directory"):
        store()
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"thesis.tex", "LOCK"}


def test_another_format_is_refused_and_kept(store: Open, tmp_path: Path) -> None:
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
        (errno.ENOSPC, "free some room or choose another directory"),
        (errno.ENOTDIR, "choose a directory"),
        (errno.EIO, "see whether the drive is well"),
    ],
)
def test_a_directory_that_cannot_be_used_is_one_line(store: Open, number: int, advice: str) -> None:
    with pytest.raises(StoreError, match=advice) as refused:
        store(port=Port(disk=Refusing(number)))
    assert "\n" not in str(refused.value)


def test_a_disk_without_room_is_refused(store: Open) -> None:
    with pytest.raises(StoreError, match="full"):
        store(port=Port(disk=SimDisk(0, capacity_bytes=4), executor=inline))


@pytest.mark.parametrize(
    "setting", [{"capacity_bytes": 1000}, {"durability": "most"}, {"threads": 0}, {"segment_bytes": 0}]
)
def test_a_setting_that_makes_no_sense(store: Open, setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"nvme.{next(iter(setting))} = .*: expected"):
        store(**setting)


def test_a_full_disk_at_the_start_leaves_the_store_as_it_was(store: Open) -> None:
    disk = SimDisk(0)
    tier = store(port=Port(disk=disk, executor=inline))
    write(tier, chain(3))
    tier.close()
    disk.fails = {"write": (1.0, errno.ENOSPC)}
    with pytest.raises(StoreError):
        store(port=Port(disk=disk, executor=inline))
    disk.fails = {}
    assert [read(store(port=Port(disk=disk, executor=inline)), a) for a in chain(1)] == [DONE]


# damage


@given(data=st.data())
def test_a_changed_byte_is_a_miss(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Any byte that means something: a miss, counted, the slot not used again, the neighbours whole."""
    path = tmp_path_factory.mktemp("flip")
    tier = NvmeTier(
        str(path / "store"),
        capacity_bytes=4 * MIB,
        segment_bytes=MIB // 4,
        durability="none",
        free_floor_bytes=0,
        port=Port(executor=inline),
    )
    blocks = chain(3)
    write(tier, blocks)
    file, offset = place(path, tier, blocks[1])
    header = 136 + 6 + 32 + 6 + 8  # fixed part, parent, one chunk sum
    at = data.draw(st.integers(0, header - 1) | st.integers(0, PAYLOAD_BYTES - 1).map(lambda i: 4096 + i))
    change(file, offset + at, lambda old: old ^ data.draw(st.integers(1, 255)))
    outcome = read(tier, blocks[1])
    assert outcome in {DAMAGED, Outcome.FOREIGN}
    if outcome is DAMAGED:
        assert tier.counters["damaged"] == 1
        assert tier.contains([blocks[1]]) == (ABSENT,)
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
    room = tier.room(RECORD_BYTES)
    file, offset = place(tmp_path, tier, blocks[1])
    change(file, offset + 5000, lambda old: old ^ 1)
    assert read(tier, blocks[1]) is DAMAGED
    assert tier.room(RECORD_BYTES) == room
    tier.close()
    tier = store()
    assert tier.room(RECORD_BYTES) == room
    write(tier, blocks)
    assert place(tmp_path, tier, blocks[1]) != (file, offset)


def test_another_records_bytes_are_a_miss_and_the_slot_is_well(store: Open, tmp_path: Path) -> None:
    """As after a power cut that took a removal and kept the next write into the slot."""
    tier = store()
    one, other = chain(2)
    write(tier, [one])
    file, offset = place(tmp_path, tier, one)
    with file.open("r+b") as segment:
        segment.seek(offset)
        segment.write(b"".join(record(other)))
    room = tier.room(RECORD_BYTES)
    assert read(tier, one) is DAMAGED
    assert read(tier, other) is ABSENT
    assert tier.room(RECORD_BYTES) == room + 1


def test_a_segment_cut_short_is_a_miss(store: Open, tmp_path: Path) -> None:
    for length in (0, 1, 4095, 4096, RECORD_BYTES - 1):
        tier = store()
        (address,) = chain(1, seed=length)
        write(tier, [address])
        file, offset = place(tmp_path, tier, address)
        tier.close()
        os.truncate(file, offset + length)
        tier = store()
        assert read(tier, address) is DAMAGED
        assert tier.contains([address]) == (ABSENT,)
        tier.close()


@pytest.mark.parametrize("when", ["closed", "open"])
def test_a_missing_segment_takes_its_records(store: Open, tmp_path: Path, when: str) -> None:
    tier = store()
    blocks = chain(40)
    write(tier, blocks)
    file, _ = place(tmp_path, tier, blocks[0])
    gone = tier.siblings(blocks[0])
    tier.close()
    if when == "closed":
        file.unlink()
    tier = store()
    if when == "open":
        file.unlink()
    assert read(tier, blocks[0]) is ABSENT
    assert {a for a in blocks if tier.contains([a]) == (ABSENT,)} == set(gone)
    assert tier.usage().records == len(blocks) - len(gone)
    assert tier.counters["lost_records"] == len(gone)
    assert set(write(tier, gone)) == {DONE}


def test_a_damaged_journal_is_said_and_the_rest_goes_on(
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
    assert outcomes == sorted(outcomes, key=lambda outcome: outcome is ABSENT)
    assert 0 < outcomes.count(DONE) < 8
    assert set(write(tier, blocks)) == {DONE}
    tier.close()
    assert [read(store(), blocks[-1])] == [DONE]


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
        while write(tier, [address], size) == (Outcome.NO_ROOM,):
            victims = tier.siblings(held[0])
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
    assert len(tier._store.ledger.index.namespaces) < 1500


def test_compaction_keeps_the_journal_short(store: Open, tmp_path: Path) -> None:
    tier = store(durability="none")
    (address,) = chain(1)
    for _ in range(1200):
        write(tier, [address])
        tier.remove([address])
    assert tier.counters["compactions"] >= 1
    assert (tmp_path / "store" / f"journal-{tier._store.ledger.journal.number}").stat().st_size < 256 * 1024


def test_a_smaller_capacity_gives_back_at_the_start(store: Open, tmp_path: Path) -> None:
    tier = store(capacity_bytes=4 * MIB)
    blocks = chain(tier.room(RECORD_BYTES))
    write(tier, blocks)
    tier.close()
    tier = store(capacity_bytes=2 * MIB)
    assert disk_usage(tmp_path / "store") <= 2 * MIB
    assert 0 < tier.usage().records < len(blocks)
    assert tier.usage().records + tier.counters["excess_records"] == len(blocks)


def test_free_space_never_goes_under_the_floor(store: Open) -> None:
    disk = SimDisk(0, capacity_bytes=3 * MIB)
    tier = store(capacity_bytes=64 * MIB, free_floor_bytes=MIB, port=Port(disk=disk, executor=inline))
    outcomes = write(tier, chain(400))
    assert Outcome.NO_ROOM in outcomes
    assert disk.free_bytes("store") >= MIB - 100_000  # the journal is not a segment
    assert tier.room(RECORD_BYTES) == 0


def test_a_full_disk_fails_cleanly_and_heals(store: Open) -> None:
    disk, clock = SimDisk(0, capacity_bytes=3 * MIB), Clock()
    tier = store(capacity_bytes=64 * MIB, port=Port(disk=disk, clock=clock, executor=inline))
    disk.free_bytes = lambda path: 1 << 40  # type: ignore[method-assign]  # a quota: the disk says nothing of it
    blocks = chain(400)
    outcomes = write(tier, blocks)
    stored = [a for a, outcome in zip(blocks, outcomes, strict=True) if outcome is DONE]
    assert set(outcomes) == {DONE, Outcome.NO_ROOM}
    assert tier.counters["disk_full"] >= 1
    assert all(read(tier, address) is DONE for address in stored)
    tier.remove(stored[:2])
    assert write(tier, stored[:2]) == (DONE, DONE)  # free slots need no new segment
    disk.capacity_bytes = 1 << 30
    clock.seconds += 2
    assert write(tier, blocks[-3:]) == (DONE,) * 3


def test_empty_segments_are_given_back(store: Open, tmp_path: Path) -> None:
    tier = store()
    blocks = chain(100)
    write(tier, blocks)
    assert len(list((tmp_path / "store").glob("segment-*"))) > 3
    tier.remove(blocks)
    assert len(list((tmp_path / "store").glob("segment-*"))) == 1


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


# the queue


def test_the_most_urgent_goes_first(store: Open) -> None:
    executor = Held()
    tier = store(port=Port(executor=lambda threads, name: executor))
    order: list[str] = []
    here, new = chain(3), chain(3, seed=1)
    seeding = tier.submit("write", here, [record(a) for a in here])
    executor.release()
    assert seeding.done

    def say(name: str) -> Callable[[int, Outcome], None]:
        return lambda i, outcome: order.append(name)

    for i, (priority, name) in enumerate(((BACKGROUND, "background"), (AHEAD, "ahead"), (WAITING, "waiting"))):
        tier.submit("write", [new[i]], [record(new[i])], priority=priority, on_outcome=say(f"write {name}"))
        tier.submit("read", [here[i]], [buffer()], priority=priority, on_outcome=say(f"read {name}"))
    executor.release()
    assert order == [f"{op} {name}" for name in ("waiting", "ahead", "background") for op in ("read", "write")]


def test_a_full_queue_drops_writes_and_takes_reads(store: Open) -> None:
    executor = Held()
    tier = store(queue_bytes=3 * RECORD_BYTES, port=Port(executor=lambda threads, name: executor))
    blocks = chain(5)
    ticket = tier.submit("write", blocks, [record(a) for a in blocks])
    assert ticket.outcomes == (Outcome.PENDING,) * 3 + (Outcome.DROPPED,) * 2
    reading = tier.submit("read", blocks[:1], [buffer()])
    assert reading.outcomes == (Outcome.PENDING,)
    executor.release()
    assert ticket.outcomes == (DONE,) * 3 + (Outcome.DROPPED,) * 2
    assert tier.counters["write_dropped"] == 2
    again = tier.submit("write", blocks[3:], [record(a) for a in blocks[3:]])
    executor.release()
    assert again.outcomes == (DONE, DONE)


def test_a_write_larger_than_the_queue_is_taken_alone(store: Open) -> None:
    tier = store(queue_bytes=1)
    assert write(tier, chain(1)) == (DONE,)


def test_what_waits_past_its_deadline_is_late(store: Open) -> None:
    """Even where no thread comes to it: the next call finds it."""
    executor, clock = Held(), Clock()
    tier = store(port=Port(clock=clock, executor=lambda threads, name: executor))
    blocks = chain(3)
    ticket = tier.submit("write", blocks[:2], [record(a) for a in blocks[:2]], deadline=5.0)
    clock.seconds = 6.0
    tier.submit("write", blocks[2:], [record(blocks[2])], deadline=10.0)
    assert ticket.outcomes == (Outcome.LATE, Outcome.LATE)
    executor.release()
    assert tier.contains(blocks) == (ABSENT, ABSENT, DONE)


def test_what_was_cancelled_before_it_began_does_not_begin(store: Open) -> None:
    executor = Held()
    tier = store(port=Port(executor=lambda threads, name: executor))
    ticket = tier.submit("write", chain(2), [record(a) for a in chain(2)])
    ticket.cancel()
    executor.release()
    assert ticket.outcomes == (Outcome.CANCELLED,) * 2
    assert tier.usage().records == 0


def test_closing_runs_what_was_submitted(store: Open) -> None:
    tier = store(port=Port())
    ticket = tier.submit("write", chain(3), [record(a) for a in chain(3)], priority=BACKGROUND)
    tier.close()
    assert ticket.outcomes == (DONE,) * 3
    assert read(store(), chain(1)[0]) is DONE


# durability


@pytest.mark.parametrize(("durability", "left"), [("none", 0), ("batch", 5), ("block", 5)])
def test_what_a_power_cut_leaves_when_the_tier_was_idle(store: Open, durability: str, left: int) -> None:
    disk = SimDisk(3)
    port = Port(disk=disk, clock=Clock(), executor=inline)
    tier = store(durability=durability, port=port)
    write(tier, chain(5))
    tier._closed = True  # the machine is off
    disk.chance.seed(0)
    disk.restart(power_cut=True)
    tier = store(durability=durability, port=port)
    assert [read(tier, address) for address in chain(5)].count(DONE) >= left


def test_a_record_that_cannot_be_made_durable_is_not_there(store: Open) -> None:
    disk = SimDisk(0)
    tier = store(durability="block", port=Port(disk=disk, clock=Clock(), executor=inline))
    write(tier, chain(2))
    disk.fails = {"sync": (1.0, errno.EIO)}
    (address,) = chain(1, seed=1)
    assert write(tier, [address]) == (Outcome.FAILED,)
    assert tier.contains([address]) == (ABSENT,)
    disk.fails = {}
    assert write(tier, [address]) == (DONE,)


# a drive that fails


def test_writes_stop_after_a_few_errors_and_come_back(store: Open) -> None:
    disk, clock = SimDisk(0), Clock()
    tier = store(port=Port(disk=disk, clock=clock, executor=inline))
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


def test_a_read_that_fails_is_a_miss_and_the_record_stays(store: Open) -> None:
    disk = SimDisk(0)
    tier = store(port=Port(disk=disk, executor=inline))
    (address,) = chain(1)
    write(tier, [address])
    disk.fails = {"read": (1.0, errno.EIO)}
    ticket = tier.submit("read", [address], [buffer()])
    assert (ticket.outcomes, ticket.checks) == ((Outcome.FAILED,), {0: "EIO"})
    disk.fails = {}
    assert read(tier, address) is DONE


def test_the_breaker_doubles_its_pause_and_forgets_it() -> None:
    clock = Clock()
    breaker = Breaker(clock, errors=2, pause_s=1.0, most_s=4.0)
    assert not breaker.failed()
    assert breaker.failed()
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        clock.seconds += pause_s * 0.9
        assert not breaker.allows()
        clock.seconds += pause_s * 0.2
        assert breaker.allows()
        assert not breaker.allows()  # one probe at a time
        assert not breaker.failed()
    clock.seconds += 5.0
    assert breaker.allows()
    breaker.passed()
    assert breaker.allows()
    assert not breaker.failed()


def test_a_race_for_a_slot_is_a_miss_not_a_wrong_byte(store: Open) -> None:
    """A read that is overtaken by removal and reuse of its slot."""
    disk = SimDisk(0)
    tier = store(port=Port(disk=disk, executor=inline))
    one, other = chain(2)
    write(tier, [one])
    room = tier.room(RECORD_BYTES)
    ask, done = disk.ask, threading.Event()

    def overtake(kind: str, grows: int = 0) -> None:
        if kind == "read" and not done.is_set():
            done.set()
            tier.remove([one])
            tier.write([other], [record(other)])
        ask(kind, grows)

    disk.ask = overtake  # type: ignore[method-assign]
    assert read(tier, one) is ABSENT
    disk.ask = ask  # type: ignore[method-assign]
    assert read(tier, other) is DONE
    assert tier.room(RECORD_BYTES) == room


def test_a_compressed_record_needs_only_its_own_room(store: Open) -> None:
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

"""The NVMe tier on a disk that lies, one thread, everything by a seed: `pytest -k "test_any_crash[17]"` plays it again.

Whatever happens: no wrong byte, nothing lost that was promised, and a tier that is sound again after a restart.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import pytest

from kvcache.block.address import Address
from kvcache.port import InlineExecutor, Port, SystemClock
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.tier import Outcome
from tests.fault.disk import Crash, SimDisk
from tests.tier.blocks import buffer, chain, holds, record

CAPACITY = 3 << 20
SIZES = [1, 5_000, 20_000, 150_000]
DONE = Outcome.DONE
BLOCKS = [*chain(10), *chain(6, seed=1), *chain(4, of=1)]


class Clock(SystemClock):
    seconds = 0.0

    def now(self) -> float:
        self.seconds += 0.01
        return self.seconds


def size_of(address: Address) -> int:
    return SIZES[address.key[0] % len(SIZES)]


@dataclass
class Run:
    """A tier under a seed, and what it has said so far."""

    seed: int
    durability: str
    there: set[Address] = field(default_factory=set)  # said to be there, and not said to be gone
    safe: set[Address] = field(default_factory=set)  # of these, what a sync has covered
    doubt: set[Address] = field(default_factory=set)  # nothing was said: either may be

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self.disk = SimDisk(self.seed, capacity_bytes=6 << 20)
        self.clock = Clock()
        self.open()

    def open(self) -> None:
        self.tier = NvmeTier(
            "store",
            capacity_bytes=CAPACITY,
            segment_bytes=256 << 10,
            durability=self.durability,  # type: ignore[arg-type]
            free_floor_bytes=0,
            port=Port(disk=self.disk, clock=self.clock, executor=lambda threads, name: InlineExecutor()),
        )

    def step(self) -> None:
        address = self.chance.choice(BLOCKS)
        action = self.chance.choices(
            ["write", "read", "remove", "siblings", "sync", "compact", "reopen"], [10, 6, 4, 0.5, 1, 0.5, 0.3]
        )[0]
        if action == "write":
            self.write(address)
        elif action == "read":
            self.read(address)
        elif action == "remove":
            self.remove([address])
        elif action == "siblings":
            self.remove(self.tier.siblings(address))
        elif action == "sync":
            self.sync()
        elif action == "compact":
            self.tier._store.ledger._write_checkpoint()
        else:
            self.tier.close()
            self.open()

    def forever(self) -> None:
        while True:
            self.step()

    def write(self, address: Address) -> None:
        self.doubt.add(address)
        (outcome,) = self.tier.write([address], [record(address, size_of(address))])
        if address in self.there:
            assert outcome is DONE or self.disk.fails
        if outcome is DONE:
            self.there.add(address)
            if self.durability == "block":
                self.safe.add(address)
        if outcome is DONE or not self.disk.fails:
            self.doubt.discard(address)

    def read(self, address: Address, *, after_power_cut: bool = False) -> bool:
        into = buffer(size_of(address))
        (outcome,) = self.tier.read([address], [into])
        if outcome is DONE:
            assert holds(into, address, size_of(address)), f"seed {self.seed}: a wrong byte"
            assert address in self.there | self.doubt
        elif not self.disk.fails and not after_power_cut:
            assert outcome is Outcome.ABSENT
            assert address not in self.there
        return outcome is DONE

    def remove(self, addresses: list[Address]) -> None:
        self.doubt |= set(addresses)
        self.there -= set(addresses)
        self.safe -= set(addresses)
        for address, outcome in zip(addresses, self.tier.remove(addresses), strict=True):
            if outcome is Outcome.FAILED:
                assert self.disk.fails
            else:
                self.doubt.discard(address) if self.durability == "none" else None

    def sync(self) -> None:
        errors = self.tier.counters.get("sync_errors", 0)
        covered = set(self.there)
        self.tier.sync()
        if self.tier.counters.get("sync_errors", 0) == errors and self.durability != "none" and not self.disk.lies:
            self.safe |= covered

    def crash(self, *, power_cut: bool) -> None:
        """What is left is what was promised, and nothing that is not whole."""
        self.disk.restart(power_cut=power_cut)
        self.open()
        if self.disk.lies and power_cut:
            self.safe = set()
        before = set(self.there)
        self.doubt |= set(BLOCKS) if power_cut else set()
        found = {address for address in BLOCKS if self.read(address, after_power_cut=power_cut)}
        promised = self.safe if power_cut else before
        assert promised <= found, f"seed {self.seed}: {len(promised - found)} blocks lost"
        assert self.tier.check() == [], f"seed {self.seed}"
        self.there, self.safe, self.doubt = found, set(found) if not power_cut else self.safe & found, set()


def play(seed: int, durability: str, steps: int) -> None:
    run = Run(seed, durability)
    power_cut = run.chance.random() < 0.5
    run.disk.lies = run.chance.random() < 0.1
    run.disk.crash_at = run.disk.steps + run.chance.randint(1, 4 * steps)
    with pytest.raises(Crash):
        run.forever()
    run.crash(power_cut=power_cut)
    for _ in range(steps // 2):
        run.step()
    assert run.tier.check() == []
    assert run.disk.used_bytes() <= CAPACITY
    run.tier.close()


@pytest.mark.parametrize("durability", ["batch", "block", "none"])
@pytest.mark.parametrize("part", range(10))
def test_any_crash(part: int, durability: str, request: pytest.FixtureRequest) -> None:
    for seed in range(part, 1000 if request.config.getoption("--long") else 60, 10):
        play(seed, durability, 100)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
@pytest.mark.parametrize("kind", ["read", "write", "sync"])
def test_any_errno(kind: str, number: int) -> None:
    """Calls that fail now and then: outcomes, never an exception, never a wrong byte; sound once they pass again."""
    for seed in range(6):
        run = Run(seed, "batch")
        for _ in range(60):
            run.step()
        run.disk.fails = {kind: (0.3, number)}
        for _ in range(120):
            address = run.chance.choice(BLOCKS)
            action = run.chance.choice(["write", "read", "remove", "sync"])
            if action == "sync":
                run.sync()
            elif action == "remove":
                run.remove([address])
            else:
                getattr(run, action)(address)
        run.disk.fails = {}
        run.clock.seconds += 1000
        assert run.tier.check() == []
        run.doubt |= set(BLOCKS)
        for address in BLOCKS:
            run.read(address, after_power_cut=True)
        (address,) = chain(1, seed=9)
        run.tier.remove(run.tier.siblings(BLOCKS[0]))
        assert run.tier.write([address], [record(address, 1)]) in {(DONE,), (Outcome.NO_ROOM,)}
        run.tier.close()


def test_a_compaction_that_failed_costs_nothing_durable() -> None:
    """The disk is full when the checkpoint is due; the store goes on, is synced, and the power goes."""
    for seed in range(20):
        run = Run(seed, "batch")
        directory = run.tier._store.directory
        write, run.tier._flush_after = directory.write, 1e9

        def fail(name: str, parts: Iterable[bytes], write: Callable[..., None] = write) -> None:
            if name.startswith("checkpoint"):
                raise OSError(errno.ENOSPC, "full")
            write(name, parts)

        run.write(BLOCKS[0])
        directory.write = fail  # type: ignore[method-assign]
        with pytest.raises(OSError, match="full"):
            run.tier._store.ledger._write_checkpoint()
        run.write(BLOCKS[1])
        run.sync()
        assert run.safe == set(BLOCKS[:2])
        run.crash(power_cut=True)
        run.tier.close()


@pytest.mark.parametrize("power_cut", [False, True])
def test_every_step_of_a_short_run(power_cut: bool) -> None:
    """A crash at each single call of one run that makes, fills, empties and gives back segments and compacts."""
    length = 0
    while True:
        length += 1
        run = Run(length, "block")
        run.chance = random.Random(1)
        run.disk.crash_at = run.disk.steps + length
        try:
            for address in BLOCKS[:8]:
                run.write(address)
            run.remove(BLOCKS[2:6])
            run.tier._store.ledger._write_checkpoint()
            run.write(BLOCKS[3])
            run.remove(BLOCKS[:8])
            run.write(BLOCKS[9])
            run.tier.close()
            break
        except Crash:
            run.crash(power_cut=power_cut)
            run.write(BLOCKS[10])
            assert run.tier.check() == []
            run.tier.close()
    assert length > 60

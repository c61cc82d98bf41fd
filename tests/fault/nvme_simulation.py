"""One life of an NVMe tier under a seed, held against a plain dict: stores, loads, evictions, restarts, a crash.

    NvmeSimulation(17).run()

Every choice comes from the seed, so a failure is replayed by the same line. Many calls are under way at a time. What
the model knows of a block: it is there, it is not, or either (a call is under way, or a fault may have taken it).
"""

from __future__ import annotations

import errno
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvcache.block.record import Address, seal
from kvcache.errors import StoreError
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.tier import BACKGROUND, DEMAND, PREFETCH, Op, Outcome, Ticket
from tests.fault.scheduler import Scheduler
from tests.fault.simulated_disk import Crash, SimDisk
from tests.tier.blocks import buffer, chain, holds, payload, record

KIB = 1 << 10
CAPACITY = 768 * KIB
SEGMENT = 64 * KIB
SIZES = [1, 5_000, 12_000, 40_000]
DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
BLOCKS = [*chain(14), *chain(8, seed=1), *chain(6, of=1), *chain(4, group=1)]
TWINS = {a: replace(a, signature=a.key + bytes(16)) for a in BLOCKS[:3]}
"""Other blocks under the same key, as an attacker may make them: the first to arrive has the key."""
BLOCKS += TWINS.values()
TWINS |= {twin: address for address, twin in TWINS.items()}
NOISE = b"\xee" * (64 * KIB)
ERRORS = [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT]
FAULTS = ["none", "none", "read errors", "write errors", "sync errors", "flips", "short reads", "lies", "full"]
DURABILITIES = ["batch", "block", "none"]


def size_of(address: Address) -> int:
    return SIZES[address.key[0] % len(SIZES)]


@dataclass(eq=False)
class Call:
    """What was asked for, and what was known of each block then."""

    op: Op
    addresses: Sequence[Address]
    segments: list[list[memoryview]]
    before: list[tuple[bool | None, int]]  # there or not, and how often that may have changed


class NvmeSimulation:
    def __init__(
        self,
        seed: int,
        *,
        durability: str | None = None,
        fault: str | None = None,
        errors: Sequence[int] = ERRORS,
        ops: int = 200,
    ) -> None:
        self.seed, self.ops, self.errors = seed, ops, errors
        self.chance = random.Random(seed)
        self.durability = durability or self.chance.choice(DURABILITIES)
        self.fault = fault or self.chance.choice(FAULTS)
        self.power_cut = self.chance.random() < 0.6
        self.capacity_bytes = 700 * KIB if self.fault == "full" else 4 * CAPACITY
        self.disk = SimDisk(seed, capacity_bytes=self.capacity_bytes)
        self.disk.lies = self.fault == "lies"
        self.there: dict[Address, bool | None] = dict.fromkeys(BLOCKS, False)
        self.turns: Counter[Address] = Counter()  # how often a block may have come or gone
        self.safe: set[Address] = set()  # promised to be there after a power cut
        self.calls: dict[Ticket, Call] = {}
        self.pool: dict[int, list[list[memoryview]]] = {size: [] for size in SIZES}
        self.scrambled = False  # a journal is damaged: a removal may be forgotten, and what was removed be there again
        self.troubled = False  # a fault was injected since the last restart: blocks may be gone
        self.open()

    # the tier

    def open(self) -> None:
        self.scheduler = Scheduler(self.chance.randrange(1 << 30), pauses=self.chance.choice([0.0, 0.3, 0.8]))
        self.disk.pause = self.scheduler.pause
        os_env: OsEnv = self.scheduler.os_env(self.disk)
        for last in (False, True):
            try:
                self.tier = NvmeTier(
                    "store",
                    NvmeSettings(
                        capacity_bytes=CAPACITY,
                        segment_bytes=SEGMENT,
                        durability=self.durability,
                        threads=self.chance.choice([1, 2, 4]),
                        queue_bytes=self.chance.choice([60_000, 1 << 20]),
                        min_free_bytes=0,
                    ),
                    os_env=os_env,
                )
                return
            except StoreError as error:
                if self.fault in {"lies", "flips"} and self.troubled:  # refused, never misread: begin with nothing
                    self.disk.wipe()
                    self.safe.clear()
                    self.there = dict.fromkeys(BLOCKS)
                    continue
                assert not last, f"{self}: {error}"
                assert self.troubled or self.fault == "full", f"{self}: {error}"
                self.heal()

    def heal(self) -> None:
        self.disk.fails, self.disk.short, self.disk.capacity_bytes = {}, 0.0, 4 * CAPACITY

    def run(self) -> None:
        """All of it: half of the calls, a crash, the other half, an end in order, and a look at what is left. Between
        them, for some, a sync that the power fails after."""
        self.disk.crash_at = self.disk.steps + self.chance.randint(1, 3 * self.ops)
        done = self.some(self.ops // 2)
        self.crash()
        if self.chance.random() < 0.5:
            self.power_fails()
        self.some(self.ops - done)
        if self.chance.random() < 0.3:
            self.power_fails()
        self.settle()
        self.end()

    def power_fails(self) -> None:
        self.heal()
        self.sync()
        self.power_cut = True
        self.crash()

    def some(self, ops: int) -> int:
        """Call the tier so often, or until it dies; how often it was called."""
        for i in range(ops):
            try:
                self.call()
                for _ in range(self.chance.choice([0, 1, 5, 30])):
                    if self.scheduler.busy:
                        self.scheduler.step()
                self.collect()
            except Crash:
                return i + 1
        return ops

    def call(self) -> None:
        chance = self.chance
        what = chance.choices(
            ["write", "read", "remove", "evict", "sync", "compact", "restart", "fault", "contains"],
            [10, 8, 2, 1, 1, 0.4, 0.2, 0.6, 1],
        )[0]
        first = chance.randrange(len(BLOCKS))
        some = BLOCKS[first : first + chance.choice([1, 1, 2, 5, 9])]
        if what == "evict":
            self.submit("remove", self.tier.colocated(some[0]))
        elif what == "sync":
            self.sync()
        elif what == "compact":
            self.scheduler.spawn(lambda: self.tier._store.barrier.compact(due=False))
        elif what == "restart":
            self.settle()
            self.sync()
            self.tier.close()
            self.open()
        elif what == "fault":
            self.toggle_fault()
        else:
            self.submit(what, some)

    def toggle_fault(self) -> None:
        """Let the fault of this life begin or end."""
        kind, _, rest = self.fault.partition(" ")
        if rest == "errors":
            self.troubled = True
            self.disk.fails = (
                {}
                if self.disk.fails
                else {kind: (self.chance.choice([0.1, 0.5, 1.0]), self.chance.choice(self.errors))}
            )
        elif self.fault == "short reads":
            self.troubled = True
            self.disk.short = 0.0 if self.disk.short else 0.2
        elif self.fault == "flips":
            self.troubled = True
            for _ in range(self.chance.choice([1, 10])):
                self.disk.flip("segment")
            if self.chance.random() < 0.5:
                self.scrambled = True
                self.disk.flip(self.chance.choice(["journal", "checkpoint"]))
        elif self.fault == "full":
            self.disk.capacity_bytes = self.chance.choice([500 * KIB, 700 * KIB, CAPACITY])

    # calls

    def submit(self, op: Op, addresses: Sequence[Address]) -> None:
        changes = op in {"write", "remove"}
        addresses = [a for a in addresses if not changes or not any(a in call.addresses for call in self.changing())]
        before = [(self.there[a], self.turns[a]) for a in addresses]
        segments = []
        if op == "write":
            segments = [self.record(a) for a in addresses]
        elif op == "read":
            segments = [self.buffer(size_of(a)) for a in addresses]
        call = Call(op, addresses, segments, before)
        for address in addresses if changes else ():
            self.turns[address] += 1
            self.there[address] = None if op == "remove" or not self.there[address] else True
            if op == "remove":
                self.safe.discard(address)
        late = self.chance.random() < 0.1
        ticket = self.tier.submit(
            op,
            addresses,
            segments,
            priority=self.chance.choice([DEMAND, PREFETCH, BACKGROUND]),
            deadline=self.scheduler.seconds + self.chance.random() * 0.2 if late else None,
        )
        self.calls[ticket] = call
        if self.chance.random() < 0.05:
            ticket.cancel()

    def buffer(self, size_bytes: int) -> list[memoryview]:
        """Memory to read into, full of what must not survive."""
        pool = self.pool[size_bytes]
        if not pool:
            return buffer(size_bytes)
        segments = pool.pop()
        segments[1][:] = NOISE[: len(segments[1])]
        return segments

    def record(self, address: Address) -> list[memoryview]:
        size = size_of(address)
        pool = self.pool[size]
        segments = pool.pop() if pool else buffer(size)
        segments[1][:size] = payload(address, size)
        seal(segments[0], segments[1], address, stored_bytes=size)
        return segments

    def changing(self) -> list[Call]:
        return [call for call in self.calls.values() if call.op in {"write", "remove"}]

    def collect(self) -> None:
        """Hold what has ended against the model."""
        for ticket in [ticket for ticket in self.calls if ticket.done]:
            call = self.calls.pop(ticket)
            for i, (address, outcome) in enumerate(zip(call.addresses, ticket.outcomes, strict=True)):
                getattr(self, f"check_{call.op}")(address, outcome, call, i)
                if call.segments:
                    self.pool[size_of(address)].append(call.segments[i])

    def check_read(self, address: Address, outcome: Outcome, call: Call, i: int) -> None:
        there, turn = call.before[i]
        unchanged = turn == self.turns[address]
        if outcome is DONE:
            assert holds(call.segments[i], address, size_of(address)), f"{self}: a wrong byte"
            assert there is not False or not unchanged or self.scrambled, f"{self}: read what is not there"
        elif outcome in {NOT_FOUND, Outcome.DAMAGED}:
            assert outcome is NOT_FOUND or self.troubled or self.durability == "none", f"{self}: damaged"
            if there and unchanged:
                self.gone(address)
        else:
            assert outcome in {Outcome.TIMED_OUT, Outcome.CANCELLED} or self.troubled, f"{self}: {outcome}"

    def check_contains(self, address: Address, outcome: Outcome, call: Call, i: int) -> None:
        there, turn = call.before[i]
        if turn == self.turns[address] and there is not None and outcome is not Outcome.TIMED_OUT:
            assert there or self.scrambled or outcome is NOT_FOUND, f"{self}: knows what is not there"
            if there and outcome is NOT_FOUND:
                self.gone(address)

    def check_write(self, address: Address, outcome: Outcome, call: Call, i: int) -> None:
        there = call.before[i][0]
        self.turns[address] += 1
        if outcome is DONE:
            self.there[address] = True
            if self.durability == "block" and not self.disk.lies:
                self.safe.add(address)
        elif there is not True:  # what was not DONE is not there; with a failing journal it may be after a restart
            self.there[address] = None if outcome is Outcome.FAILED and self.troubled else there
        allowed = {DONE, Outcome.NO_CAPACITY, Outcome.DROPPED, Outcome.TIMED_OUT, Outcome.CANCELLED}
        fails = self.troubled or self.fault == "full" or address in TWINS
        assert outcome in allowed or fails, f"{self}: {outcome}"

    def check_remove(self, address: Address, outcome: Outcome, call: Call, i: int) -> None:
        there = call.before[i][0]
        self.turns[address] += 1
        if outcome in {DONE, NOT_FOUND}:
            self.there[address] = False
            assert outcome is DONE or not there or self.troubled, f"{self}: removed what is there, found nothing"
            assert outcome is NOT_FOUND or there is not False or self.scrambled, f"{self}: removed what is not there"
        else:
            self.there[address] = there

    def gone(self, address: Address) -> None:
        """A block is not there any more, and no caller removed it."""
        assert self.troubled, f"{self}: a block is gone"
        assert address not in self.safe or self.fault in {"flips", "short reads"}, f"{self}: a promised block is gone"
        self.there[address] = None
        self.safe.discard(address)

    def sync(self) -> None:
        turns = {address: self.turns[address] for address, there in self.there.items() if there}
        said: list[bool] = []
        self.scheduler.spawn(lambda: said.append(self.tier.sync()))
        self.scheduler.wait(lambda: bool(said))
        if not said[0]:
            assert self.troubled, f"{self}: a sync fails"
        elif self.durability != "none" and not self.disk.lies:
            self.safe |= {address for address, turn in turns.items() if turn == self.turns[address]}

    def settle(self) -> None:
        """Let everything that is under way end."""
        self.scheduler.wait(lambda: all(ticket.done for ticket in self.calls))
        self.collect()
        self.scheduler.run()

    # ends

    def crash(self) -> None:
        """The process ends here, or the machine does. Whatever was promised is there, and nothing that is not whole."""
        self.disk.dead = True
        self.scheduler.kill()
        for call in self.calls.values():
            if call.op in {"write", "remove"}:
                self.there.update(dict.fromkeys(call.addresses))
        self.calls.clear()
        self.disk.restart(power_cut=self.power_cut)
        self.heal()
        self.troubled = self.troubled or self.power_cut
        if self.disk.lies and self.power_cut:
            self.safe.clear()
        self.open()
        expected = self.safe if self.power_cut else {a for a, there in self.there.items() if there}
        if self.fault in {"flips", "short reads"} or (self.troubled and not self.power_cut):
            expected = self.safe if self.fault.endswith("errors") else set()
        found = self.look()
        assert expected <= found, f"{self}: {len(expected - found)} promised blocks are lost"
        never = {a for a, there in self.there.items() if there is False} & found
        assert not never or self.power_cut or self.scrambled, f"{self}: {len(never)} blocks came back"
        self.there = {address: address in found for address in BLOCKS}
        self.safe &= found
        self.sound()
        self.troubled = False
        if self.fault == "full":
            self.disk.capacity_bytes = self.capacity_bytes

    def look(self) -> set[Address]:
        """Read everything: what is there, and right."""
        found = set()
        for address in BLOCKS:
            into = self.buffer(size_of(address))
            (outcome,) = self.tier.read([address], [into])
            if outcome is DONE:
                assert holds(into, address, size_of(address)), f"{self}: a wrong byte"
                found.add(address)
            else:
                assert outcome is NOT_FOUND or self.troubled, f"{self}: {outcome}"
            self.pool[size_of(address)].append(into)
        if self.tier.health_issues() and self.fault in {"flips", "lies"}:  # too many damaged records: no new ones
            self.tier.scrub()
            assert not self.tier.health_issues(), f"{self}: nothing brings it back"
        return found

    def sound(self) -> None:
        """Nothing leaked, nothing is unsound."""
        self.scheduler.run()
        if self.fault == "flips":  # what it says is right; what stands in its files need not be
            self.tier._store.barrier.compact(due=False)
        assert self.tier.check() == [], f"{self}"
        queue, space = self.tier._queue, self.tier._store.catalog.allocator
        assert (len(queue), queue.write_bytes, queue._writers, self.tier._running) == (0, 0, 0, 0), f"{self}: a leak"
        assert not [s for s in space.segments.values() if s.users], f"{self}: a segment stays in use"
        taken = sum(s.slots - len(s.free) - s.live - s.quarantined for s in space.segments.values())
        assert not taken, f"{self}: {taken} slots leaked"
        assert self.disk.used_bytes() <= CAPACITY, f"{self}: more bytes than the capacity"

    def end(self) -> None:
        """Close in order, open again: the same blocks, and room for more once some have left."""
        self.heal()
        self.scheduler.seconds += 100.0
        found = self.look()
        if not self.troubled:
            there = {address for address, there in self.there.items() if there}
            assert found == there | {a for a in found if self.there[a] is None}, f"{self}: the model knows better"
        self.sound()
        self.tier.close()
        self.open()
        assert self.look() == found, f"{self}: an orderly end lost blocks"
        self.tier.remove(BLOCKS)
        (new,) = chain(1, seed=9)
        assert self.tier.write([new], [record(new, 1)]) == (DONE,), f"{self}: no room in an empty tier"
        self.sound()
        self.tier.close()

    def __str__(self) -> str:
        power = "power cut" if self.power_cut else "kill"
        return f"NvmeSimulation({self.seed}, ops={self.ops}).run() [{self.durability}, {self.fault}, {power}]"

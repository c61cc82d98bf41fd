"""The contract of a tier (`kvcache/tier/tier.py`), as a suite for authors of another one.

    class TestMine(TierContract):
        def make(self, path, capacity_bytes, os_env):
            return MyTier(path, capacity_bytes, clock=os_env.clock)

Every test ends with the tier's own audit.
"""

from __future__ import annotations

import hashlib
import mmap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.layout import Shard
from kvcache.block.record import Address, header_area, record_bytes, seal
from kvcache.errors import ClosedError
from kvcache.os_env import OsEnv, SystemClock
from kvcache.tier.tier import BACKGROUND, Outcome, SupportsColocation, Tier, call

# Blocks for tests of tiers: addresses in chains, sealed records, buffers to read into.

PAYLOAD_BYTES = 12_000
RECORD_BYTES = record_bytes(PAYLOAD_BYTES)
SHARD = Shard(0, 2, 0, 4)


def namespace(n: int = 0) -> bytes:
    return hashlib.sha256(b"namespace %d" % n).digest()


def chain(length: int, *, of: int = 0, seed: int = 0, group: int = 0, shard: Shard = SHARD) -> list[Address]:
    """Return the addresses of a prefix, head first; chains of other seeds share no block."""
    parent, addresses = namespace(of), []
    for i in range(length):
        signature = hashlib.sha256(parent + b"%d %d" % (seed, i)).digest()
        addresses.append(Address(namespace(of), signature, parent, group, shard))
        parent = signature
    return addresses


def payload(address: Address, size_bytes: int = PAYLOAD_BYTES) -> bytes:
    """Return the one payload that belongs to an address."""
    seed = hashlib.sha256(address.namespace + address.name + address.signature).digest()
    return (seed * (size_bytes // 32 + 1))[:size_bytes]


def buffer(payload_bytes: int = PAYLOAD_BYTES, *, offset: int = 0) -> list[memoryview]:
    """Return segments to read into, page-aligned except for `offset` bytes, full of bytes that a read must replace."""
    total, area = record_bytes(payload_bytes), header_area(payload_bytes)
    memory = memoryview(mmap.mmap(-1, total + offset))[offset:]
    memory[:] = b"\xee" * total
    return [memory[:area], memory[area:]]


def record(
    address: Address, size_bytes: int = PAYLOAD_BYTES, *, offset: int = 0, data: bytes | None = None
) -> list[memoryview]:
    """Return a sealed record, as a tier takes it."""
    segments = buffer(size_bytes, offset=offset)
    segments[1][:size_bytes] = payload(address, size_bytes) if data is None else data
    segments[1][size_bytes:] = bytes(len(segments[1]) - size_bytes)
    seal(segments[0], segments[1], address, stored_bytes=size_bytes)
    return segments


def holds(segments: list[memoryview], address: Address, size_bytes: int = PAYLOAD_BYTES) -> bool:
    return b"".join(segments[1:])[:size_bytes] == payload(address, size_bytes)


DONE, NOT_FOUND, TIMED_OUT = Outcome.DONE, Outcome.NOT_FOUND, Outcome.TIMED_OUT
CAPACITY = 4 << 20

Factory = Callable[[Path, int, OsEnv], Tier]


class Clock(SystemClock):
    """Time that only a test advances."""

    seconds = 100.0

    def now(self) -> float:
        return self.seconds


@dataclass
class TierFixture:
    """A tier, and the means to open it again."""

    factory: Factory
    path: Path
    clock: Clock
    tier: Tier

    def reopen(self, capacity_bytes: int = CAPACITY) -> Tier:
        self.tier.close()
        self.tier = self.factory(self.path, capacity_bytes, OsEnv(clock=self.clock))
        return self.tier


def tier_fixture(factory: Factory, path: Path) -> TierFixture:
    clock = Clock()
    return TierFixture(factory, path, clock, factory(path, CAPACITY, OsEnv(clock=clock)))


def write(tier: Tier, addresses: list[Address], size_bytes: int = PAYLOAD_BYTES) -> tuple[Outcome, ...]:
    return call(tier, "write", addresses, [record(address, size_bytes) for address in addresses])


def intact(tier: Tier, addresses: list[Address], size_bytes: int = PAYLOAD_BYTES) -> bool:
    """Return whether every record is present with the bytes that were written."""
    into = [buffer(size_bytes) for _ in addresses]
    outcomes = call(tier, "read", addresses, into)
    return set(outcomes) <= {DONE} and all(
        holds(segments, address, size_bytes) for segments, address in zip(into, addresses, strict=True)
    )


def _near_duplicates(address: Address) -> dict[str, Address]:
    """Return addresses that differ from this one in one field. The one with the same key differs in the tail of its
    signature."""
    return {
        "signature": replace(address, signature=address.key + bytes(16)),
        "namespace": replace(address, namespace=namespace(7)),
        "parent": replace(address, parent=bytes([1]) * 32),
        "group": replace(address, group=1),
        "shard": replace(address, shard=replace(address.shard, end_layer=1)),
    }


class TierContract:
    """Implement `make`: return a tier of `capacity_bytes` in its own folder, on this `os_env`. Called again for the
    same folder, it finds what a durable tier left there."""

    def make(self, path: Path, capacity_bytes: int, os_env: OsEnv) -> Tier:
        raise NotImplementedError("give your tier: see kvcache.testing.TierContract")

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[TierFixture]:
        bench = tier_fixture(self.make, tmp_path)
        yield bench
        assert bench.tier.check() == []
        bench.tier.close()

    @pytest.fixture
    def tier(self, bench: TierFixture) -> Tier:
        return bench.tier

    @pytest.fixture
    def own(self, tier: Tier) -> Tier:
        if tier.shared:
            pytest.skip("shared: how much fits is not its own to say")
        return tier

    # Reading and writing

    def test_reads_what_was_written(self, tier: Tier) -> None:
        blocks = chain(20)
        assert set(write(tier, blocks)) == {DONE}
        assert intact(tier, blocks)
        assert call(tier, "contains", blocks) == (DONE,) * 20

    def test_what_was_not_written_is_absent(self, tier: Tier) -> None:
        blocks, other = chain(3), chain(3, seed=1)
        write(tier, blocks)
        assert call(tier, "read", other, [buffer() for _ in other]) == (NOT_FOUND,) * 3
        assert call(tier, "contains", other) == (NOT_FOUND,) * 3
        assert call(tier, "remove", other) == (NOT_FOUND,) * 3

    def test_nothing_to_do_is_done(self, tier: Tier) -> None:
        for op in ("read", "write", "contains", "remove"):
            assert tier.submit(op, []).done

    @pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 300_000])
    def test_any_size(self, tier: Tier, size: int) -> None:
        blocks = chain(2)
        assert write(tier, blocks, size) == (DONE, DONE)
        assert intact(tier, blocks, size)

    @pytest.mark.parametrize("offset", [8, 512, 4096])
    def test_segments_need_not_lie_on_pages(self, tier: Tier, offset: int) -> None:
        (address,) = chain(1)
        into = buffer(offset=offset)
        assert call(tier, "write", [address], [record(address, offset=offset)]) == (DONE,)
        assert call(tier, "read", [address], [into]) == (DONE,)
        assert holds(into, address)

    def test_payload_in_several_pieces(self, tier: Tier) -> None:
        (address,) = chain(1)
        header, body = record(address)
        assert call(tier, "write", [address], [[header, body[:4096], body[4096:]]]) == (DONE,)
        header, body = buffer()
        assert call(tier, "read", [address], [[header, body[:8192], body[8192:]]]) == (DONE,)
        assert holds([header, body], address)

    def test_segments_larger_than_the_record(self, tier: Tier) -> None:
        """A reader that knows the decoded size may give more memory than a compressed record fills."""
        (address,) = chain(1)
        header, body = record(address)
        room = memoryview(bytearray(len(body) + 8192))
        call(tier, "write", [address], [[header, body]])
        assert call(tier, "read", [address], [[buffer()[0], room]]) == (DONE,)
        assert holds([header, room], address)

    def test_segments_smaller_than_the_record_fail_and_harm_nothing(self, tier: Tier) -> None:
        (address,) = chain(1)
        call(tier, "write", [address], [record(address)])
        header, body = buffer()
        assert call(tier, "read", [address], [[header, body[:4096]]]) == (Outcome.FAILED,)
        assert intact(tier, [address])

    def test_a_second_write_changes_nothing(self, tier: Tier) -> None:
        (address,) = chain(1)
        other = record(address, data=bytes(PAYLOAD_BYTES))
        used = [write(tier, [address]), tier.usage().records][1]
        assert call(tier, "write", [address], [other]) == (DONE,)
        assert intact(tier, [address])
        assert tier.usage().records == used

    def test_removed_is_absent_and_may_come_back(self, tier: Tier) -> None:
        blocks = chain(4)
        write(tier, blocks)
        assert call(tier, "remove", blocks[1:3]) == (DONE, DONE)
        assert call(tier, "contains", blocks) == (DONE, NOT_FOUND, NOT_FOUND, DONE)
        assert call(tier, "remove", blocks[1:3]) == (NOT_FOUND, NOT_FOUND)
        assert write(tier, blocks) == (DONE,) * 4
        assert intact(tier, blocks)

    # Identity

    @pytest.mark.parametrize("what", ["signature", "namespace", "parent", "group", "shard"])
    def test_another_identity_is_a_miss_and_harms_nothing(self, tier: Tier, what: str) -> None:
        address = chain(2)[1]
        twin = _near_duplicates(address)[what]
        write(tier, [address])
        into = buffer()
        assert call(tier, "read", [twin], [into])[0] in {NOT_FOUND, Outcome.DAMAGED, Outcome.INCOMPATIBLE}
        assert call(tier, "contains", [twin]) == (NOT_FOUND,)
        assert call(tier, "remove", [twin]) == (NOT_FOUND,)
        assert intact(tier, [address])

    def test_an_unknown_parent_is_not_compared(self, tier: Tier) -> None:
        address = chain(2)[1]
        write(tier, [address])
        assert intact(tier, [replace(address, parent=b"")])
        orphan = replace(chain(2, seed=1)[1], parent=b"")
        write(tier, [orphan])
        assert intact(tier, [orphan])

    def test_the_same_key_in_another_namespace_does_not_overwrite(self, tier: Tier) -> None:
        (address,) = chain(1)
        twin = replace(address, namespace=namespace(7))
        write(tier, [address])
        (outcome,) = call(tier, "write", [twin], [record(twin)])
        assert outcome is not DONE or intact(tier, [twin])
        assert intact(tier, [address])

    def test_a_record_under_a_wrong_address_is_not_taken(self, tier: Tier) -> None:
        one, other = chain(2)
        assert call(tier, "write", [one], [record(other)]) == (Outcome.FAILED,)
        assert call(tier, "contains", [one, other]) == (NOT_FOUND, NOT_FOUND)

    def test_an_unsealed_record_is_not_taken(self, tier: Tier) -> None:
        (address,) = chain(1)
        assert call(tier, "write", [address], [buffer()]) == (Outcome.FAILED,)
        assert call(tier, "contains", [address]) == (NOT_FOUND,)

    def test_groups_and_shards_stand_apart(self, tier: Tier) -> None:
        blocks = [a for group in (0, 1) for a in chain(3, group=group)]
        blocks += chain(3, shard=replace(blocks[0].shard, first_head=2))
        write(tier, blocks)
        assert intact(tier, blocks)
        call(tier, "remove", blocks[:3])
        assert intact(tier, blocks[3:])

    # Capacity

    def test_room_is_what_can_be_written(self, own: Tier) -> None:
        fit = own.free_slots(RECORD_BYTES)
        assert 0 < fit * RECORD_BYTES <= CAPACITY
        blocks = chain(fit + 3)
        outcomes = write(own, blocks)
        assert outcomes.count(DONE) == fit
        assert outcomes.count(Outcome.NO_CAPACITY) == 3
        assert own.free_slots(RECORD_BYTES) == 0
        assert own.usage().records == fit
        assert own.usage().used_bytes <= own.usage().capacity_bytes
        kept = [address for address, outcome in zip(blocks, outcomes, strict=True) if outcome is DONE]
        assert intact(own, kept)
        call(own, "remove", kept[:2])
        assert own.free_slots(RECORD_BYTES) == 2
        assert write(own, chain(3, seed=1)).count(DONE) == 2

    def test_all_siblings_gone_makes_room_for_another_size(self, own: Tier) -> None:
        blocks = chain(own.free_slots(RECORD_BYTES))
        write(own, blocks)
        large = 200_000
        (newcomer,) = chain(1, seed=1)
        assert write(own, [newcomer], large) == (Outcome.NO_CAPACITY,)
        remaining = list(blocks)
        while not own.free_slots(large + RECORD_BYTES) and remaining:
            colocated = own.colocated(remaining[0]) if isinstance(own, SupportsColocation) else [remaining[0]]
            assert remaining[0] in colocated
            assert set(call(own, "remove", colocated)) == {DONE}
            remaining = [address for address in remaining if address not in colocated]
        assert remaining
        assert write(own, [newcomer], large) == (DONE,)
        assert intact(own, [newcomer], large)
        assert intact(own, remaining)

    def test_an_absent_record_shares_no_unit(self, tier: Tier) -> None:
        if not isinstance(tier, SupportsColocation):
            pytest.skip("it frees its space record by record")
        assert tier.colocated(chain(1)[0]) == []

    def test_a_record_larger_than_the_tier(self, own: Tier) -> None:
        (address,) = chain(1)
        assert own.free_slots(2 * CAPACITY) == 0
        assert write(own, [address], 2 * CAPACITY) == (Outcome.NO_CAPACITY,)
        assert write(own, [address]) == (DONE,)

    def test_usage_returns_to_nothing(self, own: Tier) -> None:
        blocks = chain(30)
        before = own.usage(), own.free_slots(RECORD_BYTES)
        write(own, blocks)
        assert own.usage().records == 30
        assert own.usage().used_bytes >= 30 * PAYLOAD_BYTES
        call(own, "remove", blocks)
        assert (own.usage(), own.free_slots(RECORD_BYTES)) == before

    # Tickets

    def test_outcomes_come_one_a_block(self, tier: Tier) -> None:
        blocks = chain(6)
        seen: list[tuple[int, Outcome]] = []
        write(tier, blocks[:3])
        ticket = tier.submit(
            "contains", blocks, priority=BACKGROUND, on_outcome=lambda i, outcome: seen.append((i, outcome))
        )
        assert ticket.wait(60)
        assert sorted(seen, key=lambda pair: pair[0]) == list(enumerate([DONE] * 3 + [NOT_FOUND] * 3))
        assert ticket.outcomes == (DONE,) * 3 + (NOT_FOUND,) * 3
        assert ticket.done

    @pytest.mark.parametrize("op", ["read", "write", "contains", "remove"])
    def test_a_deadline_that_passed_is_late(self, bench: TierFixture, op: Any) -> None:
        blocks, new = chain(1), chain(1, seed=1)
        write(bench.tier, blocks)
        target = new if op == "write" else blocks
        segments = [record(target[0])] if op == "write" else [buffer()] if op == "read" else []
        ticket = bench.tier.submit(op, target, segments, deadline=bench.clock.now() - 1)
        assert ticket.wait(60)
        assert ticket.outcomes == (TIMED_OUT,)
        assert call(bench.tier, "contains", [*blocks, *new]) == (DONE, NOT_FOUND)
        ticket = bench.tier.submit(op, target, segments, deadline=bench.clock.now() + 60)
        assert ticket.wait(60)
        assert ticket.outcomes == (DONE,)

    def test_misuse_raises(self, tier: Tier) -> None:
        (address,) = chain(1)
        header, body = record(address)
        for op, segments in (
            ("write", []),
            ("read", [buffer(), buffer()]),
            ("write", [[header]]),
            ("read", [[body[:7], body]]),
        ):
            with pytest.raises(ValueError, match="segments"):
                tier.submit(op, [address], segments)  # type: ignore[arg-type]  # misuse
        assert call(tier, "contains", [address]) == (NOT_FOUND,)

    def test_closed_is_closed(self, tier: Tier) -> None:
        tier.close()
        tier.close()
        with pytest.raises(ClosedError):
            tier.submit("contains", chain(1))

    # Threads

    def test_threads_never_see_a_wrong_byte(self, tier: Tier) -> None:
        """Several threads write, read and remove the same few blocks, more than fit."""
        blocks = chain(24) + chain(8, seed=1, of=1)
        wrong: list[str] = []
        sizes = [1, 5_000, 40_000]

        def work(seed: int) -> None:
            for step in range(120):
                address = blocks[(seed * 7 + step * 5) % len(blocks)]
                size = sizes[int(address.key[0]) % 3]
                if (seed + step) % 5 < 2:
                    call(tier, "write", [address], [record(address, size)])
                elif (seed + step) % 5 == 2:
                    call(tier, "remove", [address])
                else:
                    into = buffer(size)
                    (outcome,) = call(tier, "read", [address], [into])
                    if outcome is DONE and not holds(into, address, size):
                        wrong.append(f"block {blocks.index(address)}")
                    elif outcome not in {DONE, NOT_FOUND}:
                        wrong.append(str(outcome))

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_the_same_block_from_many_threads_is_there_once(self, tier: Tier) -> None:
        (address,) = chain(1)
        tickets = [tier.submit("write", [address], [record(address)]) for _ in range(16)]
        assert all(ticket.wait(60) for ticket in tickets)
        assert {ticket.outcomes for ticket in tickets} == {(DONE,)}
        assert tier.usage().records == 1

    # After a restart

    def test_a_durable_tier_has_everything_after_a_restart(self, bench: TierFixture) -> None:
        blocks = chain(30) + chain(10, seed=1, of=1)
        write(bench.tier, blocks)
        call(bench.tier, "remove", blocks[5:9])
        bench.tier.sync()
        usage, room = bench.tier.usage(), bench.tier.free_slots(RECORD_BYTES)
        tier = bench.reopen()
        remaining = blocks[:5] + blocks[9:]
        if not tier.durable:
            assert tier.usage().records == 0
            return
        assert call(tier, "contains", blocks[5:9]) == (NOT_FOUND,) * 4
        assert intact(tier, remaining)
        assert tier.usage().records == usage.records
        assert tier.shared or (tier.usage(), tier.free_slots(RECORD_BYTES)) == (usage, room)
        assert set(tier.scan()) == set(remaining)

    def test_scan_gives_heads_before_tails(self, bench: TierFixture) -> None:
        blocks = chain(12)
        for address in reversed(blocks):
            write(bench.tier, [address])
        tier = bench.reopen()
        if tier.durable:
            assert list(tier.scan()) == blocks

    def test_scan_gives_everything(self, tier: Tier) -> None:
        blocks = chain(3, group=2) + chain(5, of=1)
        assert list(tier.scan()) == []
        write(tier, blocks)
        assert set(tier.scan()) == set(blocks)

"""Stores far beyond what can be kept: they never block and never err, and heads stay before tails."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.block.record import Address
from kvcache.cache.cache import Cache
from kvcache.testing.memory_tier import MemoryTier
from kvcache.tier.tier import Op, Outcome, Segments, Ticket
from kvcache.transfer.pages import GroupPages

KiB = 1 << 10
LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=256, dtype="fp32", block_tokens=4)  # 8 KiB: 12 KiB a record
SMALL = KVLayout.mha(layers=1, kv_heads=1, head_dim=64, dtype="fp32", block_tokens=4)


def pages(layout: KVLayout, count: int = 256) -> list[GroupPages]:
    tensor = np.zeros((2, count, 4, 1, layout.groups[0].head_dim), np.float32)
    tensor += np.arange(count, dtype=np.float32)[None, :, None, None, None]
    return [GroupPages.from_tensors(layout, [tensor], axes=("kv", "page", "token", "head", "dim"))]


def open_host(records: int, **more: Any) -> Cache:
    size = records * 12 * KiB
    made = kvcache.open(host={"capacity_bytes": size, "slab_bytes": 4 * 12 * KiB}, nvme={"enabled": False}, **more)
    assert isinstance(made, Cache)
    return made


def put(cache: Any, tokens: Sequence[int], layout: KVLayout = LAYOUT, model: str = "m") -> Any:
    with cache.namespace(layout, model=model, revision="r").request() as r:
        r.match(tokens)
        transfer = r.store(pages(layout), [list(range(len(r.signatures)))])
        assert transfer.wait(30)
    return transfer


def found(cache: Any, tokens: Sequence[int], layout: KVLayout = LAYOUT, model: str = "m") -> int:
    with cache.namespace(layout, model=model, revision="r").request() as r:
        return int(r.match(tokens).blocks)


def test_a_chain_longer_than_the_tier_keeps_its_head() -> None:
    cache = open_host(16)
    tokens = list(range(4 * 40))
    transfer = put(cache, tokens)
    assert transfer.blocks == 16
    assert set(transfer.outcomes[16:]) == {Outcome.DROPPED}
    assert found(cache, tokens) == 16
    assert cache.counters.get("drops", reason="no room") == 24
    assert cache.check() == []
    cache.close()


def test_old_chains_are_evicted_tails_first() -> None:
    cache = open_host(16)
    chains = [[1000 * i + t for t in range(4 * 8)] for i in range(3)]
    for tokens in chains:
        assert put(cache, tokens).blocks == 8
    assert [found(cache, tokens) for tokens in chains] == [0, 8, 8]
    put(cache, [5000 + t for t in range(4 * 3)])
    assert [found(cache, tokens) for tokens in chains] == [0, 5, 8]
    assert cache.counters.get("evicted_blocks", tier="host", kept="no") == 11
    assert cache.check() == []
    cache.close()


def test_held_blocks_are_not_evicted() -> None:
    cache = open_host(16)
    kept = list(range(4 * 4))
    put(cache, kept)
    with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
        assert r.match(kept).blocks == 4
        r.admit()
        for i in range(1, 8):
            put(cache, [1000 * i + t for t in range(4 * 8)])
        assert found(cache, kept) == 4
        assert cache.stats()["tiers"]["host"]["held_bytes"] == 4 * 12 * KiB
    for i in range(8, 12):
        put(cache, [1000 * i + t for t in range(4 * 8)])
    assert found(cache, kept) == 0
    cache.close()


def test_holds_take_at_most_a_quarter_of_host_memory() -> None:
    cache = open_host(16)
    chains = [[1000 * i + t for t in range(4 * 4)] for i in range(4)]
    requests = []
    for tokens in chains:
        put(cache, tokens)
        r = cache.namespace(LAYOUT, model="m", revision="r").request()
        r.match(tokens)
        r.admit()
        requests.append(r)
    assert cache.stats()["tiers"]["host"]["held_bytes"] == 4 * 12 * KiB
    assert put(cache, [9000 + t for t in range(4 * 12)]).blocks == 12, "holds must not wedge the tier"
    for r in requests:
        r.close()
    assert cache.stats()["tiers"]["host"]["held_bytes"] == 0
    assert cache.check() == []
    cache.close()


def test_a_garbage_collected_request_releases_its_holds() -> None:
    cache = open_host(16)
    put(cache, list(range(4 * 4)))
    r = cache.namespace(LAYOUT, model="m", revision="r").request()
    r.match(list(range(4 * 4)))
    r.admit()
    assert cache.stats()["tiers"]["host"]["held_bytes"] == 4 * 12 * KiB
    del r
    gc.collect()
    assert cache.stats()["tiers"]["host"]["held_bytes"] == 0
    assert cache.index.held() == 0
    assert cache.check() == []
    cache.close()


@pytest.mark.parametrize("turns", [40])
def test_models_of_different_block_sizes_share_host_memory(turns: int) -> None:
    cache = open_host(16)
    for turn in range(turns):
        layout = (LAYOUT, SMALL)[turn % 2]
        tokens = [1000 * turn + t for t in range(4 * 12)]
        transfer = put(cache, tokens, layout, model=str(turn % 2))
        assert transfer.blocks == 12, f"turn {turn}: no room for {transfer.outcomes}"
        assert found(cache, tokens, layout, model=str(turn % 2)) == 12
        assert cache.check() == []
    cache.close()


class Stuck(MemoryTier):
    """A device that does not answer until it is let go."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self.name = "nvme"
        self.go = threading.Event()

    def submit(
        self,
        op: Op,
        addresses: Sequence[Address],
        segments: Sequence[Segments] = (),
        *,
        priority: int = 0,
        deadline: float | None = None,
        on_outcome: Callable[[int, Outcome], None] | None = None,
    ) -> Ticket:
        if op == "write":
            assert self.go.wait(60)
        return super().submit(op, addresses, segments, priority=priority, deadline=deadline, on_outcome=on_outcome)


class Full(MemoryTier):
    """A drive that is full for its journal too: it can write nothing, so it can forget nothing."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self.name = "nvme"
        self.full = False

    def free_slots(self, record_bytes: int) -> int:
        return 0 if self.full else super().free_slots(record_bytes)

    def submit(
        self,
        op: Op,
        addresses: Sequence[Address],
        segments: Sequence[Segments] = (),
        *,
        priority: int = 0,
        deadline: float | None = None,
        on_outcome: Callable[[int, Outcome], None] | None = None,
    ) -> Ticket:
        if self.full and op in {"write", "remove"}:
            ticket = Ticket(len(addresses), on_outcome)
            for i in range(len(addresses)):
                ticket.settle(i, Outcome.FAILED)
            return ticket
        return super().submit(op, addresses, segments, priority=priority, deadline=deadline, on_outcome=on_outcome)


def test_a_drive_that_refuses_writes_keeps_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    drive = Full()
    monkeypatch.setattr("kvcache.cache.factory.open_lower_tiers", lambda settings, os_env, serves: [drive])
    cache = open_host(16)
    kept = list(range(4 * 8))
    put(cache, kept)
    assert cache.flush(30)
    drive.full = True
    for i in range(1, 6):
        put(cache, [1000 * i + t for t in range(4 * 8)])
        assert not cache.flush(30)
    assert found(cache, kept) == 8
    assert cache.counters.get("evicted_blocks", tier="nvme") == 0
    assert cache.counters.get("drops", reason="nvme full") == 40
    assert cache.check() == []
    drive.full = False
    new = [9000 + t for t in range(4 * 8)]
    put(cache, new)
    report = cache.flush(30).tiers["nvme"]
    assert (report.reached, report.refused, report.lost) == (16, 8, 8), "what host memory still had reached it"
    assert cache.flush(30)
    assert cache.index.resident("nvme") == 24, "it comes back by itself"
    cache.close()


def test_a_burst_over_a_hung_drive_neither_blocks_nor_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck = Stuck()
    monkeypatch.setattr("kvcache.cache.factory.open_lower_tiers", lambda settings, os_env, serves: [stuck])
    cache = open_host(16, flow={"queue_blocks": 6})
    chains = [[1000 * i + t for t in range(4 * 8)] for i in range(8)]
    transfers = [put(cache, tokens) for tokens in chains]  # each waits for its own store only, never for the drive
    assert all(set(t.outcomes) <= {Outcome.DONE, Outcome.DROPPED} for t in transfers)
    assert cache.counters.get("drops", reason="nvme queue") > 0
    assert cache.stats()["queued_blocks"] <= 6
    stored = sum(transfer.outcomes.count(Outcome.DONE) for transfer in transfers)
    resident = cache.index.resident("host")
    hung = cache.flush(0).tiers["nvme"]
    assert (hung.reached, hung.waiting, hung.refused, hung.lost) == (0, resident, stored - resident, stored - resident)
    stuck.go.set()
    report = cache.flush(60)
    assert report, "what host memory still had is there; what it had not was reported"
    assert report.tiers["nvme"].reached == resident
    assert cache.stats()["queued_blocks"] == 0
    assert cache.index.held() == 0
    assert cache.check() == []
    put(cache, chains[0])
    assert found(cache, chains[0]) == 8, "it comes back by itself"
    cache.close()


class Restless(MemoryTier):
    """Something else is stored before a write is over, so that the queue is never empty."""

    def __init__(self, put_one: Callable[[int], object]) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self.name = "nvme"
        self.put_one, self.writes, self.rests = put_one, 0, False

    def submit(self, op: Op, *arguments: Any, **more: Any) -> Ticket:
        if op == "write" and not self.rests:
            self.writes += 1
            self.put_one(self.writes)
        return super().submit(op, *arguments, **more)


def test_a_flush_waits_only_for_earlier_stores(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drive = Restless(lambda number: put(cache, [1000 * number + t for t in range(4)]))
    monkeypatch.setattr("kvcache.cache.factory.open_lower_tiers", lambda settings, os_env, serves: [drive])
    cache = open_host(32)
    put(cache, list(range(4)))
    assert cache.flush(60), "whatever is stored meanwhile"
    drive.rests = True
    assert cache.flush(60)
    assert cache.check() == []
    cache.close()


def test_a_refused_thread_leaves_no_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(_: Callable[[], None]) -> None:
        raise RuntimeError("no more threads")

    cache = open_host(8)
    put(cache, list(range(16)))
    with cache.namespace(LAYOUT, model="m", revision="r").request() as r:
        assert r.match(range(16)).blocks == 4
        with monkeypatch.context() as patch:
            patch.setattr(cache.tier_manager.executor, "submit", refused)
            for move in (
                lambda: r.load(4, pages(LAYOUT), [list(range(4))]),
                lambda: r.store(pages(LAYOUT), [list(range(4))]),
            ):
                with pytest.raises(RuntimeError, match="no more threads"):
                    move()
        assert cache.index.held() == 0
        assert cache.flush(30)
    cache.close()


def test_each_flush_step_gets_the_remaining_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    cache, given, time = open_host(8), list[float | None](), [0.0]

    def waits(timeout_s: float | None) -> bool:
        given.append(timeout_s)
        time[0] += 7.0
        return True

    class Leaving(Ticket):
        wait = staticmethod(waits)  # type: ignore[assignment]

    cache.on_flush += [waits, waits]
    cache.expiry.pending_removals([Leaving(1), Leaving(1)])
    with monkeypatch.context() as patch:
        patch.setattr(cache.os_env.clock, "now", lambda: time[0])
        assert cache.flush(20.0)
        assert cache.flush()
    assert given == [20.0, 13.0, 6.0, 0.0, None, None, None, None]
    cache.on_flush.append(lambda _: False)
    assert not cache.flush(30)
    cache.close()


def test_a_flush_waits_for_stores_already_begun() -> None:
    cache = open_host(8)
    last, answers = cache.tier_manager.stores.begin(), list[bool]()
    flushes = threading.Thread(target=lambda: answers.append(bool(cache.flush(120))))
    flushes.start()
    while flushes.is_alive():  # one is under way at every moment
        last, before = cache.tier_manager.stores.begin(), last
        cache.tier_manager.stores.end(before)
    assert answers == [True]
    assert not cache.flush(0)
    cache.tier_manager.stores.end(last)
    assert cache.flush(0)
    cache.close()

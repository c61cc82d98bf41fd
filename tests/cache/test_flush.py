"""A flush and a close are a success only where every block stored before is in each tier that its mode intends."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.block.record import Address
from kvcache.cache.api import TierFlush
from kvcache.cache.cache import Cache
from kvcache.testing.memory_tier import MemoryTier
from kvcache.tier.tier import Op, Outcome, Segments, Ticket
from tests.cache.test_bursts import open_host, put

FIRST, SECOND = list(range(32)), [1000 + t for t in range(32)]  # eight blocks each


class Drive(MemoryTier):
    """A device whose writes wait for `go`, and are refused while `refuses` names an outcome."""

    def __init__(self) -> None:
        super().__init__(capacity_bytes=1 << 30)
        self.name = "nvme"
        self.refuses: Outcome | None = None
        self.syncs = True
        self.go, self.came = threading.Event(), threading.Event()
        self.go.set()

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
            self.came.set()
            assert self.go.wait(60)
        if op == "write" and self.refuses is not None:
            ticket = Ticket(len(addresses), on_outcome)
            ticket.settle_many(0, [self.refuses] * len(addresses))
            return ticket
        return super().submit(op, addresses, segments, priority=priority, deadline=deadline, on_outcome=on_outcome)

    def sync(self) -> bool:
        return self.syncs


@pytest.fixture
def drive(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drive]:
    made = Drive()
    monkeypatch.setattr("kvcache.cache.factory.open_lower_tiers", lambda settings, os_env, serves: [made])
    yield made
    made.go.set()


def nvme(cache: Cache, timeout_s: float = 30) -> TierFlush:
    report = cache.flush(timeout_s)
    tier = report.tiers["nvme"]
    assert bool(report) is (tier.synced and not tier.refused and not tier.waiting)
    return tier


def test_a_flush_counts_blocks_written_since_the_last_flush(drive: Drive) -> None:
    with open_host(32) as cache:
        put(cache, FIRST)
        assert nvme(cache) == TierFlush(reached=8)
        assert nvme(cache) == TierFlush()
        put(cache, SECOND)
        assert nvme(cache) == TierFlush(reached=8)


def test_blocks_on_a_slow_drive_are_waiting(drive: Drive) -> None:
    drive.go.clear()
    with open_host(32) as cache:
        put(cache, FIRST)
        assert drive.came.wait(30)
        assert nvme(cache, 0) == TierFlush(waiting=8)
        drive.go.set()
        assert nvme(cache) == TierFlush(reached=8)


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.NO_CAPACITY, Outcome.TIMED_OUT])
def test_a_drive_that_refuses_makes_flush_and_close_fail(drive: Drive, outcome: Outcome) -> None:
    drive.refuses = outcome
    cache = open_host(32)
    put(cache, FIRST)
    for _ in range(3):
        assert nvme(cache) == TierFlush(refused=8)
    failures = cache.counters.get("write_failures", tier="nvme", outcome=outcome.value)
    assert failures + cache.counters.get("drops", reason="orphan") == 8, "each block is counted once"
    report = cache.close()
    assert report.tiers == {"nvme": TierFlush(refused=8)}
    assert not report
    assert cache.close() == cache.flush() == report


def test_a_flush_retries_blocks_that_a_drive_refused(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    with open_host(32) as cache:
        put(cache, FIRST)
        assert nvme(cache) == TierFlush(refused=8)
        drive.refuses = None
        assert nvme(cache) == TierFlush(reached=8)
        assert cache.check() == []


def test_a_close_retries_blocks_that_a_drive_refused(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    cache = open_host(32)
    put(cache, FIRST)
    assert not cache.flush(30)
    drive.refuses = None
    assert cache.close().tiers == {"nvme": TierFlush(reached=8)}


def test_a_flush_writes_a_chain_longer_than_the_queue(drive: Drive) -> None:
    drive.go.clear()
    with open_host(32, flow={"queue_blocks": 3}) as cache:
        put(cache, list(range(4 * 32)))
        assert cache.counters.get("drops", reason="nvme queue") == 29
        drive.go.set()
        assert nvme(cache) == TierFlush(reached=32)


def test_a_block_that_left_host_memory_is_reported_once(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    with open_host(8) as cache:
        put(cache, FIRST)
        assert nvme(cache) == TierFlush(refused=8)
        other = cache.tier_manager.watch()
        put(cache, SECOND)
        drive.refuses = None
        assert nvme(cache) == TierFlush(reached=8, refused=8, lost=8)
        assert nvme(cache) == TierFlush()
        assert cache.tier_manager.flush(30, watch=other).tiers["nvme"].lost == 8, (
            "each caller that was there hears of it"
        )
        assert cache.tier_manager.flush(30, watch=cache.tier_manager.watch()), "a later one does not"


def test_an_unreported_loss_is_in_the_next_flush(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    with open_host(8) as cache:
        put(cache, FIRST)
        assert cache.tier_manager.settle(30)
        put(cache, SECOND)
        assert cache.tier_manager.flush(30, watch=cache.tier_manager.watch()).tiers["nvme"].lost == 8


def test_a_flush_does_not_count_erased_blocks_as_lost(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    with open_host(32) as cache:
        put(cache, FIRST)
        assert not cache.flush(30)
        assert cache.handles[0].clear() == 8
        assert nvme(cache) == TierFlush()


def test_check_leaves_flush_reports_unchanged(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    with open_host(8) as cache:
        put(cache, FIRST)
        assert cache.tier_manager.settle(30)
        put(cache, SECOND)
        assert cache.check() == []
        assert cache.erasure.erase(tenant="default", dry_run=True).incomplete == {}
        assert nvme(cache).lost == 8


def test_a_failed_sync_fails_the_flush(drive: Drive) -> None:
    with open_host(32) as cache:
        put(cache, FIRST)
        drive.syncs = False
        assert nvme(cache) == TierFlush(reached=8, synced=False)
        drive.syncs = True
        assert nvme(cache) == TierFlush()


def test_a_flush_reports_only_the_caller_s_namespaces(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    with open_host(32) as cache:
        put(cache, FIRST, model="mine")
        put(cache, SECOND, model="another")
        mine = next(handle.id for handle in cache.handles if handle.namespace.model == "mine")
        report = cache.tier_manager.flush(30, watch=cache.tier_manager.watch(), scope={mine}.__contains__)
        assert report.tiers == {"nvme": TierFlush(refused=8)}


def test_a_fleet_s_flush_passes_over_earlier_refusals(drive: Drive) -> None:
    drive.refuses = Outcome.FAILED
    with open_host(32) as cache:
        put(cache, FIRST)
        assert cache.tier_manager.settle(30)
        drive.shared, drive.refuses = True, None  # as a server's
        watch = cache.tier_manager.watch(anew=True)
        put(cache, SECOND)
        assert cache.tier_manager.settle(30)
        drive.refuses = Outcome.FAILED
        assert cache.tier_manager.flush(30, watch=watch, fleet=True), "its own blocks arrived"
        assert not cache.flush(30)
        assert nvme(cache) == TierFlush(refused=8)
        drive.shared = False
        assert cache.tier_manager.flush(30, watch=watch, fleet=True).tiers == {}


def test_an_unreachable_redis_fails_the_flush() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{probe.getsockname()[1]}/0"
        cache: Any = kvcache.open(
            host={"capacity_bytes": "1MiB"},
            nvme={"enabled": False},
            redis={"enabled": True, "url": url},
            control={"enabled": False},
        )
        put(cache, FIRST)
        report = cache.flush(30)
        assert (report.tiers["redis"].refused, bool(report), bool(cache.close())) == (8, False, False)


def test_a_tier_with_write_mode_off_does_not_fail_a_flush(tmp_path: Path) -> None:
    settings = {"path": tmp_path, "capacity_bytes": "16MiB", "min_free_bytes": 0, "write": "off"}
    with kvcache.open(host={"capacity_bytes": "1MiB"}, nvme=settings, control={"enabled": False}) as cache:
        put(cache, FIRST)
        assert cache.flush(30).tiers == {}
        assert cache.flush(30)

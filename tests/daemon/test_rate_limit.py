"""What a tenant may ask for in a second, on a clock that is turned; and that what is beyond is a miss and no error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.daemon.server.admission import RateLimit, TokenBucket
from kvcache.daemon.server.auth import Tenant
from kvcache.tier.tier import Outcome
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon
from tests.daemon.test_tenant import ACME, BETA, came_in, everybody


class Turned:
    """A clock that tests turn."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def wall(self) -> float:
        return self.time


class TestBucket:
    @given(
        rate=st.floats(0.5, 1000),
        steps=st.lists(st.tuples(st.floats(0, 5), st.floats(0.01, 3000)), max_size=60),
    )
    def test_a_window_exceeds_its_rate_by_one_burst_at_most(
        self, rate: float, steps: list[tuple[float, float]]
    ) -> None:
        clock = Turned()
        bucket = TokenBucket(rate, clock)
        taken: list[tuple[float, float]] = []
        for wait, amount in steps:
            clock.time += wait
            if bucket.level() > 0:
                bucket.consume(amount)
                taken.append((clock.time, amount))
        for i, (began, _) in enumerate(taken):
            got = 0.0
            for then, amount in taken[i:]:
                assert got <= rate * (then - began + 1) + 1e-6  # the last one may owe
                got += amount

    def test_an_overdrawn_bucket_refills_to_its_rate(self) -> None:
        clock = Turned()
        bucket = TokenBucket(10, clock)
        bucket.consume(35)  # 10 were there
        assert bucket.level() == -25
        clock.time += 2.5
        assert bucket.level() == 0
        clock.time += 100
        assert bucket.level() == 10, "no more than a second is saved up"

    def test_a_rate_of_none_is_no_limit(self) -> None:
        bucket = TokenBucket(None, Turned())
        bucket.consume(1e30)
        assert bucket.level() == float("inf")

    def test_a_new_rate_keeps_the_debt(self) -> None:
        clock = Turned()
        bucket = TokenBucket(10, clock)
        bucket.consume(50)
        bucket.change(20)
        assert bucket.level() == -20
        clock.time += 1.5
        assert bucket.level() == 10
        bucket.change(None)
        assert bucket.level() == float("inf")


class TestMeter:
    def test_operations_and_bytes_have_separate_limits(self) -> None:
        clock = Turned()
        rate_limit = RateLimit(Tenant(name="t", operations=2, bandwidth=100), clock)
        assert [rate_limit.count_operation(), rate_limit.count_operation(), rate_limit.count_operation()] == [
            True,
            True,
            False,
        ]
        clock.time += 2
        rate_limit.count_bytes(150)
        assert rate_limit.count_operation()
        assert not rate_limit.count_operation(moves=True)
        clock.time += 2
        assert rate_limit.count_operation(moves=True)
        assert (rate_limit.refused, rate_limit.moved_bytes) == (2, 150)

    def test_an_irrefusable_operation_is_charged(self) -> None:
        rate_limit = RateLimit(Tenant(name="t", operations=1), Turned())
        assert [rate_limit.count_operation(refusable=False), rate_limit.count_operation(refusable=False)] == [
            True,
            False,
        ]
        assert not rate_limit.count_operation()
        assert rate_limit.refused == 1

    def test_a_flood_is_distinguished_from_a_burst(self) -> None:
        rate_limit = RateLimit(Tenant(name="t", operations=10), Turned())
        for _ in range(110):
            rate_limit.count_operation()
            assert not rate_limit.overdrawn
        rate_limit.count_operation()
        assert rate_limit.overdrawn


@pytest.fixture
def limited(make_in_process: Callable[..., InProcessDaemon], tmp_path: Path) -> Callable[..., InProcessDaemon]:
    def make(**limits: Any) -> InProcessDaemon:
        path = everybody(tmp_path / "tenants", acme=limits)
        in_process = make_in_process(daemon__tenants_file=str(path))
        in_process.daemon.admission._clock = in_process.clock = Turned()  # type: ignore[attr-defined]  # of a stand-in
        return in_process

    return make


def test_a_tenant_beyond_its_op_rate_gets_misses(limited: Callable[..., InProcessDaemon], tmp_path: Path) -> None:
    in_process = limited(operations=40)
    acme, beta = (bound_to(came_in(in_process, token, tmp_path)) for token in (ACME, BETA))
    tokens = list(range(16))
    mine = store(acme, tokens, 1)
    theirs = store(beta, tokens, 2)
    reasons = set()
    for _ in range(40):
        with acme.request() as r:
            hit = r.match(tokens)
            assert hit.blocks in (0, 4)
            reasons.add(hit.reason)
    assert reasons == {"", "quota"}
    engine = Engine(LAYOUT)
    with acme.request() as r:
        assert r.match(tokens).reason == "quota"
        transfer = r.load(4, engine.described, engine.ids([0, 1, 2, 3]))
        assert transfer.wait(60)
        assert transfer.outcomes == (Outcome.NOT_FOUND,) * 4
        transfer = r.store(engine.described, engine.ids([0, 1, 2, 3]))
        assert transfer.wait(60)
        assert transfer.outcomes == (Outcome.DROPPED,) * 4
    assert load(beta, tokens) == theirs
    counted = in_process.cache.counters
    assert counted.get("load_failures", outcome="quota") == counted.get("drops", reason="quota") == 4
    assert in_process.daemon.admission.rate_limits["acme"].refused > 0
    in_process.daemon.admission.rate_limits["acme"]._operations._clock.time += 60  # type: ignore[attr-defined]  # of a stand-in
    assert load(acme, tokens) == mine, "it is let through again"


def test_a_flooding_client_is_closed_and_reconnects(limited: Callable[..., InProcessDaemon], tmp_path: Path) -> None:
    in_process = limited(operations=4)
    cache = came_in(in_process, ACME, tmp_path)
    acme = bound_to(cache)
    reasons = set()
    for _ in range(60):
        with acme.request() as r:
            reasons.add(r.match([1, 2, 3, 4]).reason)
    assert reasons == {"cold", "quota", "unreachable"}
    assert bound_to(came_in(in_process, BETA, tmp_path)).request().match([1, 2, 3, 4]).reason == "cold"


def test_store_notices_do_not_count_as_operations(limited: Callable[..., InProcessDaemon], tmp_path: Path) -> None:
    in_process = limited(operations=4)
    cache = came_in(in_process, ACME, tmp_path)
    acme = bound_to(cache)
    for number in range(100):
        cache.connection.post("storing", store=number)
        cache.connection.post("stored", store=number)
    with acme.request() as r:
        assert r.match([1, 2, 3, 4]).reason == "cold"
        assert r.match([1, 2, 3, 4]).reason == "cold"
        assert r.match([1, 2, 3, 4]).reason == "quota"
    assert in_process.daemon.admission.rate_limits["acme"].refused == 1


def test_only_a_refused_operation_counts_as_refused(limited: Callable[..., InProcessDaemon], tmp_path: Path) -> None:
    cache = came_in(limited(operations=4), ACME, tmp_path)
    with bound_to(cache).request() as r:
        reasons = [r.match([1, 2, 3, 4]).reason for _ in range(3)]
    assert reasons == ["cold", "cold", "quota"]
    told = cache.stats()  # behind the end of the request, on one connection; both are beyond the limit
    assert told["refused"] == 1


def test_a_tenant_beyond_its_bandwidth_moves_no_bytes(limited: Callable[..., InProcessDaemon], tmp_path: Path) -> None:
    in_process = limited(bandwidth="64KiB")  # a record takes 12 KiB of the arena
    acme = bound_to(came_in(in_process, ACME, tmp_path))
    tokens = list(range(32))
    mine = store(acme, tokens, 1)
    assert in_process.daemon.admission.rate_limits["acme"].moved_bytes == 8 * (12 << 10)
    assert load(acme, tokens) == [], "it owes for what it stored"
    clock = in_process.daemon.admission._clock
    clock.time += 1  # type: ignore[attr-defined]  # of a stand-in
    assert load(acme, tokens) == mine
    assert load(acme, tokens) == []
    told = in_process.cache.control_handlers["rates"]({})["rates"]["acme"]
    assert (told["bandwidth"], told["operations"]) == (64 << 10, None)
    assert told["moved_bytes"] == 2 * 8 * (12 << 10)
    assert told["refused"] == 2

"""An object store that is slow, hung, refuses, cuts or lies: a miss, a counter, a line in the log, and it comes back by
itself."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import ObjectSettings
from kvcache.testing.tier import Clock, chain, intact, record, write
from kvcache.tier.object import ObjectTier
from kvcache.tier.tier import Outcome
from tests.peer.s3_server import MISSING, HttpFaultProxy, shared

pytestmark = pytest.mark.skipif(bool(MISSING["seaweedfs"]), reason=MISSING["seaweedfs"])

DONE, NOT_FOUND, FAILED, TIMED_OUT = Outcome.DONE, Outcome.NOT_FOUND, Outcome.FAILED, Outcome.TIMED_OUT
_numbers = itertools.count()


@pytest.fixture
def gate() -> Iterator[HttpFaultProxy]:
    made = HttpFaultProxy(shared("seaweedfs").port)
    yield made
    made.end()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(gate: HttpFaultProxy, clock: Clock) -> Iterator[ObjectTier]:
    made = through(gate, clock, f"faults-{next(_numbers)}")
    yield made
    gate.clear_faults()
    made.close()


def through(gate: HttpFaultProxy, clock: Clock, prefix: str, **settings: Any) -> ObjectTier:
    given = {**shared("seaweedfs").settings, "endpoint": gate.endpoint, "timeout_s": 60, **settings}
    return ObjectTier(ObjectSettings(**given, prefix=prefix), os_env=OsEnv(clock=clock))


def read(tier: ObjectTier, blocks: Any) -> tuple[Outcome, ...]:
    return tier.read(blocks, [record(address) for address in blocks])


def test_a_server_error_is_retried_within_the_call(tier: ObjectTier, gate: HttpFaultProxy) -> None:
    blocks = chain(3)
    assert set(write(tier, blocks)) == {DONE}
    gate.status, gate.times = 500, 2
    assert intact(tier, blocks)
    assert "faults" not in tier.counters


@pytest.mark.parametrize(("status", "reason"), [(403, "denied"), (401, "denied"), (500, "failed"), (503, "failed")])
def test_refused_requests_open_the_breaker(
    tier: ObjectTier, gate: HttpFaultProxy, clock: Clock, caplog: pytest.LogCaptureFixture, status: int, reason: str
) -> None:
    """Each call is a miss; after three nothing waits for the store, until a probe finds it well."""
    blocks, new = chain(3), chain(2, seed=1)
    assert set(write(tier, blocks)) == {DONE}
    gate.status = status
    for _ in range(3):
        assert set(read(tier, blocks)) == {FAILED}
    assert tier.breaker == "open"
    asked = gate.requests
    assert set(read(tier, blocks)) == {FAILED}
    assert set(write(tier, new)) == {FAILED}
    assert tier.match_prefix(chain(3, seed=2)).result(30) == 0
    assert gate.requests == asked
    assert tier.health_issues() != []
    assert tier.counters[f"faults_{reason}"] == 3
    assert [r.levelno for r in caplog.records] == [logging.WARNING]
    assert "test" not in caplog.text.replace("test_", "").split("object s3")[1]
    gate.clear_faults()
    clock.seconds += 1
    assert intact(tier, blocks)
    assert (tier.breaker, tier.health_issues()) == ("closed", [])
    clock.seconds += 1
    assert set(write(tier, new)) == {DONE}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_refusals_text_never_looks_like_a_short_range(gate: HttpFaultProxy, clock: Clock, status: int) -> None:
    """The text of the error holds the path, and with it the status of a range behind the end."""
    tier = through(gate, clock, f"port-41600-{next(_numbers)}")
    try:
        blocks = chain(3)
        assert set(write(tier, blocks)) == {DONE}
        gate.status = status
        for _ in range(4):
            assert set(read(tier, blocks)) == {FAILED}
        assert tier.breaker == "open"
        gate.clear_faults()
        clock.seconds += 1
        assert intact(tier, blocks)
    finally:
        gate.clear_faults()
        tier.close()


def test_a_refused_lookup_is_not_remembered(tier: ObjectTier, gate: HttpFaultProxy) -> None:
    """For a moment it is remembered that there is no pack of a name: not where the store did not say so."""
    assert tier.contains(chain(1)) == (NOT_FOUND,)
    gate.status = 503
    for _ in range(2):
        assert tier.contains(chain(1, seed=1)) == (FAILED,)


def test_a_409_for_a_read_is_a_refusal(tier: ObjectTier, gate: HttpFaultProxy) -> None:
    """Only a call that takes a name may find it taken."""
    blocks = chain(3)
    assert set(write(tier, blocks)) == {DONE}
    gate.status = 409
    assert set(read(tier, blocks)) == {FAILED}
    assert tier.counters["faults_taken"] == 1
    assert "defects" not in tier.counters


def test_the_breaker_of_reads_does_not_stop_writes(tier: ObjectTier, gate: HttpFaultProxy, clock: Clock) -> None:
    """A write that the breaker refused was not refused by the store."""
    blocks = chain(3)
    assert set(write(tier, blocks)) == {DONE}
    gate.status = 503
    for _ in range(3):
        assert set(read(tier, blocks)) == {FAILED}
    for seed in range(1, 5):
        assert write(tier, chain(1, seed=seed)) == (FAILED,)
    assert "writes_stopped" not in tier.counters
    gate.clear_faults()
    clock.seconds += 1
    assert write(tier, chain(1, seed=9)) == (DONE,)


def test_a_store_that_refuses_only_writes_is_read(tier: ObjectTier, gate: HttpFaultProxy, clock: Clock) -> None:
    blocks = chain(3)
    assert set(write(tier, blocks)) == {DONE}
    gate.status = 403
    for seed in range(1, 4):
        assert set(write(tier, chain(1, seed=seed))) == {FAILED}
        gate.status = 0
        assert intact(tier, blocks)
        gate.status = 403
    assert tier.counters["writes_stopped"] == 1
    asked = gate.requests
    assert set(write(tier, chain(1, seed=9))) == {FAILED}
    assert gate.requests == asked
    gate.clear_faults()
    clock.seconds += 60
    assert set(write(tier, chain(1, seed=9))) == {DONE}


def test_a_hung_store_times_out(gate: HttpFaultProxy) -> None:
    """Each call ends by its deadline, touches nothing afterwards, and holds no thread."""
    tier = through(gate, Clock(), f"faults-{next(_numbers)}", timeout_s=60, connections=2)
    try:
        blocks = chain(4)
        assert set(write(tier, blocks)) == {DONE}
        gate.hang = True
        into = [record(address, data=bytes(12_000)) for address in blocks]
        before = [bytes(segment) for segments in into for segment in segments]
        tickets = [tier.submit("read", blocks, into, deadline=tier._os_env.clock.now() + 0.05) for _ in range(3)]
        assert all(ticket.wait(60) for ticket in tickets)
        assert {outcome for ticket in tickets for outcome in ticket.outcomes} == {TIMED_OUT}
        assert tier.breaker == "open"
        gate.clear_faults()
        assert [bytes(segment) for segments in into for segment in segments] == before
        tier._os_env.clock.seconds += 1  # type: ignore[attr-defined]
        assert intact(tier, blocks)
    finally:
        gate.clear_faults()
        tier.close()


@pytest.mark.parametrize("trickle", [False, True], ids=["late", "trickling"])
def test_a_slow_store_times_out_by_deadline(gate: HttpFaultProxy, trickle: bool) -> None:
    """It answers, but not in time: who has the time gets its answer; who has not ends by the deadline, and after three
    of them nothing waits for it. What comes late touches nothing."""
    clock = Clock()
    tier = through(gate, clock, f"faults-{next(_numbers)}")
    try:
        blocks, new = chain(4), chain(2, seed=1)
        assert set(write(tier, blocks)) == {DONE}
        gate.slow_s, gate.trickle = 0.5, trickle
        assert intact(tier, blocks)
        assert set(write(tier, new)) == {DONE}
        into = [record(address, data=bytes(12_000)) for address in blocks]
        before = [bytes(segment) for segments in into for segment in segments]
        for _ in range(3):
            ticket = tier.submit("read", blocks, into, deadline=clock.now() + 0.05)
            assert ticket.wait(60)
            assert set(ticket.outcomes) == {TIMED_OUT}
        assert (tier.breaker, tier.counters["faults_timeout"]) == ("open", 3)
        asked = gate.requests
        assert set(read(tier, blocks)) == {FAILED}
        assert tier.match_prefix(chain(3, seed=2), deadline=clock.now() + 30).result(60) == 0
        assert gate.requests == asked
        clock.seconds += 1
        assert intact(tier, blocks)  # the probe has the time
        assert tier.breaker == "closed"
        assert [bytes(segment) for segments in into for segment in segments] == before
    finally:
        gate.clear_faults()
        tier.close()


def test_close_does_not_wait_for_a_hung_store(gate: HttpFaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.tier.object.tier._CLOSE_S", 0.05)
    tier = through(gate, Clock(), f"faults-{next(_numbers)}", connections=1, timeout_s=1000)
    gate.hang = True
    tickets = [tier.submit("contains", chain(2, seed=seed)) for seed in range(4)]
    assert tier.close()
    assert all(ticket.wait(60) for ticket in tickets)
    assert {outcome for ticket in tickets for outcome in ticket.outcomes} == {FAILED}


@pytest.mark.parametrize("fault", ["cut", "body"])
def test_a_cut_or_replaced_body_is_never_a_hit(
    tier: ObjectTier, gate: HttpFaultProxy, clock: Clock, fault: str
) -> None:
    blocks = chain(6)
    assert set(write(tier, blocks)) == {DONE}
    setattr(gate, fault, True if fault == "cut" else b"somebody else's")
    first = tier.submit("read", blocks, [record(a) for a in blocks], deadline=clock.now() + 30)
    assert first.wait(60)
    assert DONE not in first.outcomes
    gate.clear_faults()
    clock.seconds += 100
    cold = through(gate, clock, tier._names.root.split("/")[0])
    try:
        lost = [a for a, outcome in zip(blocks, cold.contains(blocks), strict=True) if outcome is NOT_FOUND]
        assert intact(cold, [a for a in blocks if a not in lost])
        assert set(write(cold, lost)) <= {DONE}
        assert intact(cold, blocks)
    finally:
        cold.close()


def test_an_unreachable_store_is_a_miss(clock: Clock) -> None:
    settings = {**shared("seaweedfs").settings, "endpoint": "http://127.0.0.1:9", "timeout_s": 60}
    tier = ObjectTier(ObjectSettings(**settings), os_env=OsEnv(clock=clock))
    try:
        blocks = chain(2)
        for _ in range(3):
            assert read(tier, blocks) == (FAILED, FAILED)
        assert (tier.breaker, tier.usage().records, list(tier.scan())) == ("open", 0, [])
        assert len(tier.check()) == 1
    finally:
        tier.close()


def test_a_missing_bucket_is_a_miss(clock: Clock) -> None:
    tier = ObjectTier(
        ObjectSettings(**{**shared("seaweedfs").settings, "url": "s3://nowhere", "timeout_s": 60}),
        os_env=OsEnv(clock=clock),
    )
    try:
        assert set(read(tier, chain(2))) <= {NOT_FOUND, FAILED}
        assert set(write(tier, chain(2))) == {FAILED}
        assert tier.match_prefix(chain(2)).result(60) == 0
    finally:
        tier.close()

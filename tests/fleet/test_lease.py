"""Leases in a real server: one holder at a time, none for ever, and no holder speaks for the next one."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvcache.fleet.coordination import Coordination, LeaseResult, PromptLease
from kvcache.settings.tiers import RedisSettings
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.redis_topology import Cluster, until

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def test_a_lease_has_one_holder(make_coordination: Callable[[], Coordination]) -> None:
    one, two = (PromptLease(make_coordination(), "d") for _ in range(2))
    assert one.acquire() is LeaseResult.ACQUIRED
    assert two.acquire() is LeaseResult.HELD_ELSEWHERE
    assert one.renew()
    assert one.mark_stored()
    assert two.acquire() is LeaseResult.STORED
    assert PromptLease(make_coordination(), "another").acquire() is LeaseResult.ACQUIRED


def test_a_released_lease_can_be_acquired(make_coordination: Callable[[], Coordination]) -> None:
    one, two = (PromptLease(make_coordination(), "d") for _ in range(2))
    assert one.acquire() is LeaseResult.ACQUIRED
    assert one.release()
    assert two.acquire() is LeaseResult.ACQUIRED
    assert two.number > one.number
    assert not one.release()
    assert two.renew()


def test_an_expired_holder_cannot_renew_or_mark_stored(
    server: RedisServer, make_coordination: Callable[[], Coordination]
) -> None:
    one, two = PromptLease(make_coordination(), "d", lease_s=0.02), PromptLease(make_coordination(), "d")
    assert one.acquire() is LeaseResult.ACQUIRED
    until(lambda: two.acquire() is LeaseResult.ACQUIRED, "the lease is over")
    assert not one.renew()
    assert not one.mark_stored()
    assert two.acquire() is LeaseResult.HELD_ELSEWHERE
    assert two.mark_stored()
    assert {int(server.client.pttl(key)) > 0 for key in server.client.scan_iter()} == {True}, "nothing is left for ever"


def test_a_lease_is_renewed_during_long_work(
    server: RedisServer, make_coordination: Callable[[], Coordination]
) -> None:
    one, two = PromptLease(make_coordination(), "d", lease_s=60, renew_s=0.01), PromptLease(make_coordination(), "d")
    assert one.acquire() is LeaseResult.ACQUIRED
    (held,) = server.client.keys("*:lease")
    with one.keep_renewed():
        for _ in range(3):
            server.client.pexpire(held, 30_000)  # as if half its time had gone
            until(lambda: server.client.pttl(held) > 30_000, "it was renewed")
        assert two.acquire() is LeaseResult.HELD_ELSEWHERE
    assert one.mark_stored()
    assert two.acquire() is LeaseResult.STORED


def test_failed_work_releases_the_lease(make_coordination: Callable[[], Coordination]) -> None:
    one, two = (PromptLease(make_coordination(), "d") for _ in range(2))
    assert one.acquire() is LeaseResult.ACQUIRED
    with pytest.raises(ZeroDivisionError), one.keep_renewed():
        _ = 1 / 0
    assert two.acquire() is LeaseResult.ACQUIRED


def test_concurrent_acquires_have_one_winner(make_coordination: Callable[[], Coordination]) -> None:
    leases = [PromptLease(make_coordination(), "d") for _ in range(8)]
    gate, turns = threading.Barrier(8), []

    def ask(lease: PromptLease) -> None:
        gate.wait(30)
        turns.append(lease.acquire())

    threads = [threading.Thread(target=ask, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turn.value for turn in turns) == ["another's"] * 7 + ["mine"]


def test_an_unreachable_server_is_an_error() -> None:
    coordination = Coordination(RedisSettings(enabled=True, url="redis://127.0.0.1:1/0", timeout_s=20))
    with pytest.raises(OSError, match="ConnectionRefusedError"):
        PromptLease(coordination, "d").acquire()
    coordination.close()


def test_all_keys_of_a_prompt_share_a_cluster_slot() -> None:
    cluster = Cluster()
    coordination = Coordination(RedisSettings(enabled=True, url=cluster.url, mode="cluster"))
    try:
        for i in range(20):
            lease, other = (PromptLease(coordination, f"digest-{i}") for _ in range(2))
            assert lease.acquire() is LeaseResult.ACQUIRED
            assert other.acquire() is LeaseResult.HELD_ELSEWHERE
            assert lease.mark_stored()
            assert other.acquire() is LeaseResult.STORED
    finally:
        coordination.close()
        cluster.end()

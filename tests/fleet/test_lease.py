"""Leases in a real server: one holder at a time, none for ever, and nobody speaks for the one after him."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvcache.fleet.coordination import Board, Lease, Turn
from kvcache.settings.tiers import Redis
from tests.peer.fleet import Cluster, until
from tests.peer.server import MISSING, Server

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def test_one_has_it_and_the_others_do_not(boards: Callable[[], Board]) -> None:
    one, two = (Lease(boards(), "d") for _ in range(2))
    assert one.take() is Turn.MINE
    assert two.take() is Turn.ANOTHERS
    assert one.renew()
    assert one.stored()
    assert two.take() is Turn.STORED
    assert Lease(boards(), "another").take() is Turn.MINE


def test_given_up_it_is_the_next_ones(boards: Callable[[], Board]) -> None:
    one, two = (Lease(boards(), "d") for _ in range(2))
    assert one.take() is Turn.MINE
    assert one.give_up()
    assert two.take() is Turn.MINE
    assert two.number > one.number
    assert not one.give_up()
    assert two.renew()


def test_a_node_that_sleeps_through_its_lease_cannot_speak_for_the_next(
    server: Server, boards: Callable[[], Board]
) -> None:
    one, two = Lease(boards(), "d", lease_s=0.02), Lease(boards(), "d")
    assert one.take() is Turn.MINE
    until(lambda: two.take() is Turn.MINE, "the lease is over")
    assert not one.renew()
    assert not one.stored()
    assert two.take() is Turn.ANOTHERS
    assert two.stored()
    assert {int(server.client.pttl(key)) > 0 for key in server.client.scan_iter()} == {True}, "nothing is left for ever"


def test_it_is_kept_while_the_work_takes_its_time(server: Server, boards: Callable[[], Board]) -> None:
    one, two = Lease(boards(), "d", lease_s=60, renew_s=0.01), Lease(boards(), "d")
    assert one.take() is Turn.MINE
    (held,) = server.client.keys("*:lease")
    with one.kept():
        for _ in range(3):
            server.client.pexpire(held, 30_000)  # as if half its time had gone
            until(lambda: server.client.pttl(held) > 30_000, "it was renewed")
        assert two.take() is Turn.ANOTHERS
    assert one.stored()
    assert two.take() is Turn.STORED


def test_work_that_fails_gives_it_up(boards: Callable[[], Board]) -> None:
    one, two = (Lease(boards(), "d") for _ in range(2))
    assert one.take() is Turn.MINE
    with pytest.raises(ZeroDivisionError), one.kept():
        _ = 1 / 0
    assert two.take() is Turn.MINE


def test_many_at_once_one_gets_it(boards: Callable[[], Board]) -> None:
    leases = [Lease(boards(), "d") for _ in range(8)]
    gate, turns = threading.Barrier(8), []

    def ask(lease: Lease) -> None:
        gate.wait(30)
        turns.append(lease.take())

    threads = [threading.Thread(target=ask, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(turn.value for turn in turns) == ["another's"] * 7 + ["mine"]


def test_no_server_is_an_error_and_not_a_lease() -> None:
    board = Board(Redis(enabled=True, url="redis://127.0.0.1:1/0", timeout_s=20))
    with pytest.raises(OSError, match="ConnectionRefusedError"):
        Lease(board, "d").take()
    board.close()


def test_in_a_cluster_all_notes_of_a_prompt_are_on_one_server() -> None:
    cluster = Cluster()
    board = Board(Redis(enabled=True, url=cluster.url, mode="cluster"))
    try:
        for i in range(20):
            lease, other = (Lease(board, f"digest-{i}") for _ in range(2))
            assert lease.take() is Turn.MINE
            assert other.take() is Turn.ANOTHERS
            assert lease.stored()
            assert other.take() is Turn.STORED
    finally:
        board.close()
        cluster.end()

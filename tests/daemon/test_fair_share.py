"""What tenants may have of something that there is only so much of, and connections that have not authenticated."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.daemon.client.connection import UnixEndpoint
from kvcache.daemon.protocol import PROTOCOL_VERSION, parse_reply
from kvcache.daemon.server.admission import FairShare
from kvcache.daemon.server.connection import MAX_PENDING_CONNECTIONS, Connection, PendingConnections
from kvcache.daemon.server.tcp import client_network
from kvcache.errors import KVCacheError, UnreachableError
from tests.daemon.daemon_process import bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon, until
from tests.daemon.test_tenant import ACME, BETA, ROOT, came_in, everybody

Make = Callable[..., InProcessDaemon]


@given(
    capacity=st.integers(0, 40),
    tenants=st.integers(1, 5),
    steps=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=120),
)
def test_shares_hold_within_the_capacity(capacity: int, tenants: int, steps: list[tuple[int, bool]]) -> None:
    fair_share, used = FairShare(capacity, lambda: tenants), Counter[str]()
    for number, takes in steps:
        name = str(number % tenants)
        if takes:
            had = used[name]
            got = fair_share.acquire(name)
            used[name] += got
            assert got or had >= fair_share.share, "it was refused what is its own"
        elif used[name]:
            fair_share.release(name)
            used[name] -= 1
        assert used.total() <= capacity
        assert fair_share.used(name) == used[name]


@given(capacity=st.integers(0, 60), tenants=st.integers(1, 5))
def test_one_tenant_may_use_all_but_the_others_shares(capacity: int, tenants: int) -> None:
    fair_share = FairShare(capacity, lambda: tenants)
    got = 0
    while fair_share.acquire("greedy"):
        got += 1
    assert got == capacity - fair_share.share * (tenants - 1)
    for other in range(tenants - 1):
        assert sum(fair_share.acquire(str(other)) for _ in range(fair_share.share)) == fair_share.share


class Origin(Connection):
    """One that says where it comes from."""

    def __init__(self, loop: asyncio.AbstractEventLoop, where: str, ended: Callable[[Connection], None]) -> None:
        ours, self.theirs = socket.socketpair()
        self._from = where
        super().__init__(loop, ours, lambda _, __: None, ended)

    @property
    def origin(self) -> str:
        return self._from


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.close()


def test_a_connection_flood_evicts_its_own_connections(loop: asyncio.AbstractEventLoop) -> None:
    pending, gone = PendingConnections(loop), list[Connection]()

    def left(peer: Connection) -> None:
        pending.remove(peer)
        gone.append(peer)

    def come(where: str) -> Origin:
        peer = Origin(loop, where, left)
        pending.add(peer)
        return peer

    honest = [come("10.0.0.1"), come("10.0.0.2")]
    flood = [come("10.6.6.6") for _ in range(4 * MAX_PENDING_CONNECTIONS)]
    assert len(pending) == MAX_PENDING_CONNECTIONS
    assert all(peer.open for peer in honest)
    assert gone == flood[: len(gone)], "the first of the crowd goes first"
    for peer in (*honest, *flood):
        peer.close()
        peer.theirs.close()
    assert len(pending) == 0


def test_an_ipv6_peer_is_grouped_by_its_network() -> None:
    assert client_network("10.0.0.1") == "10.0.0.1"
    assert client_network("2001:db8::1") == client_network("2001:db8:0:0:ffff::9") != client_network("2001:db8:0:1::1")
    assert client_network("fe80::1%eth0") == client_network("fe80::2%eth1")


def test_unauthenticated_peers_shut_out_no_known_client(make_in_process: Make) -> None:
    in_process = make_in_process(daemon__connections=8)
    known = in_process.open()
    expected = store(bound_to(known), list(range(8)), 1)
    strangers = []
    for _ in range(3 * MAX_PENDING_CONNECTIONS):
        stranger = socket.socket(socket.AF_UNIX)
        stranger.connect(str(in_process.path))
        strangers.append(stranger)
    assert load(bound_to(in_process.open()), list(range(8))) == expected
    for stranger in strangers:
        stranger.close()


def test_a_tenant_cannot_take_anothers_connection_share(make_in_process: Make, tmp_path: Path) -> None:
    in_process = make_in_process(daemon__connections=12, daemon__tenants_file=str(everybody(tmp_path / "t")))
    share = 12 // 6
    greedy = [came_in(in_process, ACME, tmp_path) for _ in range(12 - 2 * share)]
    with pytest.raises(UnreachableError, match=r"acme.*daemon\.connections"):
        came_in(in_process, ACME, tmp_path)
    tokens = list(range(8))
    for token in (BETA, ROOT):  # a control connection each, and one that moves
        handle = bound_to(came_in(in_process, token, tmp_path, threads=1))
        expected = store(handle, tokens, 1)
        assert load(handle, tokens) == expected
    with pytest.raises(UnreachableError, match=r"daemon\.connections"):
        came_in(in_process, BETA, tmp_path)
    greedy[0].close()

    def again() -> bool:
        try:
            greedy[0] = came_in(in_process, ACME, tmp_path)
        except UnreachableError:
            return False
        return True

    until(again)


def test_a_data_connection_counts_for_its_tenant(make_in_process: Make) -> None:
    in_process = make_in_process(daemon__connections=2)
    control = UnixEndpoint(str(in_process.path)).connect(30)
    control.send({"op": "hello", "version": PROTOCOL_VERSION, "role": "control"}, timeout_s=30)
    session = parse_reply(control.receive(30)[0])["session"]

    def move() -> Any:
        wire = UnixEndpoint(str(in_process.path)).connect(30)
        wire.send({"op": "hello", "version": PROTOCOL_VERSION, "role": "mover", "session": session}, timeout_s=30)
        try:
            parse_reply(wire.receive(30)[0])
        except KVCacheError:
            wire.close()
            raise
        return wire

    one = move()
    with pytest.raises(UnreachableError, match=r"daemon\.connections"):
        move()
    one.close()

    def again() -> bool:
        try:
            move().close()
        except UnreachableError:
            return False
        return True

    until(again)
    control.close()

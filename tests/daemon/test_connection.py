"""A connection as the loop sees it: what it keeps of a client that says more than it is answered."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.daemon.protocol import HEADER_BYTES, MAX_FRAME_BYTES, pack
from kvcache.daemon.server.connection import MAX_CATCH_UP_TURNS, MAX_MESSAGES_PER_TURN, Connection
from kvcache.daemon.server.tcp import TcpConnection
from kvcache.daemon.tls import server_context
from kvcache.daemon.wire import SOCKET_BUFFER_BYTES
from tests.daemon.certificate_authority import Authority

Make = Callable[[str], tuple[Connection, socket.socket]]


class Floor:
    """A loop, what was said on it, and how much was kept unread at most."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.said: dict[Connection, list[Any]] = {}
        self.most_kept = 0
        self.gone: list[Connection] = []

    def heard(self, peer: Connection, message: dict[str, Any]) -> None:
        self.said.setdefault(peer, []).append(message.get("n"))
        self.most_kept = max(self.most_kept, len(peer._read))

    def until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + 120
        while not condition():
            assert time.monotonic() < end, "it never came to that"
            self.loop.run_until_complete(asyncio.sleep(0))


@pytest.fixture
def floor() -> Iterator[Floor]:
    made = Floor()
    yield made
    made.loop.close()


@pytest.fixture
def join(floor: Floor, tmp_path: Path) -> Iterator[Make]:
    ends: list[Connection | socket.socket] = []

    def unix() -> tuple[Connection, socket.socket]:
        ours, theirs = socket.socketpair()
        return Connection(floor.loop, ours, floor.heard, floor.gone.append), theirs

    def tls() -> tuple[Connection, socket.socket]:
        authority = Authority(tmp_path)
        context = server_context(str(authority.sign("daemon", "127.0.0.1")), "", "", required=False)
        trusts = ssl.create_default_context(cafile=str(authority.file))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            raw = socket.create_connection(listener.getsockname(), 60)
            ours, _ = listener.accept()
        peer = TcpConnection(floor.loop, ours, context, floor.heard, floor.gone.append)
        found: list[socket.socket] = []
        thread = threading.Thread(target=lambda: found.append(trusts.wrap_socket(raw, server_hostname="127.0.0.1")))
        thread.start()
        floor.until(lambda: not thread.is_alive())
        thread.join()
        return peer, found[0]

    def make(kind: str) -> tuple[Connection, socket.socket]:
        peer, theirs = {"unix": unix, "tls": tls}[kind]()
        peer.max_bytes = MAX_FRAME_BYTES
        ends.extend((peer, theirs))
        return peer, theirs

    yield make
    for end in ends:
        end.close()


@pytest.mark.parametrize("kind", ["unix", "tls"])
def test_a_flood_is_bounded_and_starves_no_other_client(floor: Floor, join: Make, kind: str) -> None:
    (flooding, flood), (quiet, other) = join(kind), join("unix")
    one = pack({"op": "close", "request": 1, "n": 1})
    count = 6 * SOCKET_BUFFER_BYTES // len(one)
    thread = threading.Thread(target=flood.sendall, args=(one * count,))
    thread.start()
    floor.until(lambda: len(floor.said.get(flooding, ())) > 10 * MAX_MESSAGES_PER_TURN)
    other.sendall(pack({"n": 2}))
    floor.until(lambda: quiet in floor.said)
    assert len(floor.said[flooding]) < count, "others waited for all of it"
    floor.until(lambda: len(floor.said[flooding]) == count)
    thread.join()
    assert floor.most_kept < SOCKET_BUFFER_BYTES + len(one)
    flood.sendall(pack({"n": 3}))
    floor.until(lambda: floor.said[flooding][-1] == 3)


@pytest.mark.parametrize("kind", ["unix", "tls"])
def test_a_flooding_clients_disconnect_is_noticed(floor: Floor, join: Make, kind: str) -> None:
    flooding, flood = join(kind)
    thread = threading.Thread(target=flood.sendall, args=(pack({"n": 1}) * 10_000,))
    thread.start()
    floor.until(lambda: not thread.is_alive())
    thread.join()
    socket.socket.shutdown(flood, socket.SHUT_WR)
    floor.until(lambda: floor.gone == [flooding])
    assert len(floor.said[flooding]) == 10_000


@pytest.mark.parametrize("kind", ["unix", "tls"])
def test_a_long_message_behind_short_ones_is_received(floor: Floor, join: Make, kind: str) -> None:
    peer, theirs = join(kind)
    long = bytes(range(256)) * (MAX_FRAME_BYTES // 256 - 1)
    said = pack({"n": 0}) * 100 + pack({"n": long}) + pack({"n": 1}) * 100
    thread = threading.Thread(target=theirs.sendall, args=(said,))
    thread.start()
    floor.until(lambda: len(floor.said.get(peer, ())) == 201)
    thread.join()
    assert floor.said[peer] == [0] * 100 + [long] + [1] * 100
    assert floor.most_kept < HEADER_BYTES + MAX_FRAME_BYTES + SOCKET_BUFFER_BYTES


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 300), max_size=40), count=st.integers(1, 4 * MAX_MESSAGES_PER_TURN))
def test_fragmented_messages_are_received_in_order(cuts: list[int], count: int) -> None:
    floor = Floor()
    ours, theirs = socket.socketpair()
    peer = Connection(floor.loop, ours, floor.heard, floor.gone.append)
    said = b"".join(pack({"n": n}) for n in range(count))
    for cut in cuts:
        theirs.sendall(said[:cut])
        said = said[cut:]
        floor.loop.run_until_complete(asyncio.sleep(0))
    theirs.sendall(said)
    floor.until(lambda: len(floor.said.get(peer, ())) == count)
    assert floor.said[peer] == list(range(count))
    peer.close()
    theirs.close()
    floor.loop.close()


def test_a_malformed_message_closes_after_earlier_answers(floor: Floor, join: Make) -> None:
    peer, theirs = join("unix")
    with suppress(OSError):
        theirs.sendall(pack({"n": 1}) * (2 * MAX_MESSAGES_PER_TURN) + b"\xff\xff\xff\xff" + pack({"n": 2}))
    floor.until(lambda: floor.gone == [peer])
    assert floor.said[peer] == [1] * (2 * MAX_MESSAGES_PER_TURN)


@pytest.mark.parametrize(
    "count",
    [0, 1, MAX_MESSAGES_PER_TURN, 5 * MAX_MESSAGES_PER_TURN + 1, (MAX_CATCH_UP_TURNS - 4) * MAX_MESSAGES_PER_TURN],
)
def test_received_bytes_are_read_before_another_request(floor: Floor, join: Make, count: int) -> None:
    """Also where a part of it had its turn already, and what comes afterwards has its own."""
    peer, theirs = join("unix")
    theirs.sendall(pack({"n": 0}) * count + pack({"n": 1})[:-1])
    peer.catch_up()
    assert floor.said.get(peer, []) == [0] * count
    theirs.sendall(pack({"n": 1})[-1:] + pack({"n": 2}) * (2 * MAX_MESSAGES_PER_TURN))
    floor.loop.run_until_complete(asyncio.sleep(0))
    peer.catch_up()
    assert floor.said[peer] == [0] * count + [1] + [2] * (2 * MAX_MESSAGES_PER_TURN)
    theirs.sendall(pack({"n": 3}))
    floor.until(lambda: floor.said[peer][-1] == 3)
    theirs.close()
    peer.catch_up()
    assert floor.gone == [peer]
    peer.catch_up()


@pytest.mark.parametrize("kind", ["unix", "tls"])
@pytest.mark.parametrize("asked", [1, 4])
def test_a_drained_client_gets_one_turn(floor: Floor, join: Make, kind: str, asked: int) -> None:
    peer, theirs = join(kind)
    part = MAX_CATCH_UP_TURNS * MAX_MESSAGES_PER_TURN
    theirs.sendall(pack({"n": 1}) * ((asked + 1) * part))
    floor.loop.run_until_complete(asyncio.sleep(0))
    for _ in range(asked):
        before = len(floor.said.get(peer, ()))
        peer.catch_up()
        if kind == "unix":  # all that is sent has come
            assert len(floor.said[peer]) - before == part
    counts: list[int] = []

    def look() -> None:
        counts.append(len(floor.said.get(peer, ())))
        if len(counts) < 20:
            floor.loop.call_soon(look)

    look()
    floor.until(lambda: len(counts) == 20)
    assert all(after - before <= MAX_MESSAGES_PER_TURN for before, after in pairwise(counts))
    theirs.sendall(pack({"n": 2}))
    floor.until(lambda: floor.said[peer][-1] == 2)
    assert floor.said[peer] == [1] * ((asked + 1) * part) + [2]


def test_an_endless_sender_is_read_in_bounded_pieces(floor: Floor, join: Make) -> None:
    peer, theirs = join("unix")
    over = threading.Event()

    def talk() -> None:
        with suppress(OSError):
            while not over.is_set():
                theirs.sendall(pack({"n": 1}) * MAX_MESSAGES_PER_TURN)

    thread = threading.Thread(target=talk)
    thread.start()
    floor.until(lambda: peer in floor.said)
    peer.catch_up()
    over.set()
    peer.close()
    thread.join()

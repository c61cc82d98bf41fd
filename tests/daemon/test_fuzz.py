"""Messages of every kind of nonsense: the daemon neither dies, nor grows, nor says what is another tenant's.

Each connection says a correct hello and then frames that are wrong a little or wrong altogether. In the long run a
million of them are answered; each time as many as take less than twenty seconds.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from kvcache.daemon.protocol import MAX_FRAME_BYTES, OPS, PROTOCOL_VERSION, pack, parse_reply
from kvcache.daemon.wire import Wire
from kvcache.errors import KVCacheError
from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, load, store

SECRET = b"what no other may see"
A_CONNECTION, A_BURST = 2000, 50
"""Frames."""
GROWTH_BYTES = 160 << 20
"""What the daemon may grow by: what all bounds together allow, and what an allocator keeps."""

NUMBERS = [0, 1, 2, -1, 7, 255, 1 << 16, 1 << 31, (1 << 63) - 1, (1 << 64) - 1, 1.5, float("inf"), float("nan")]
BYTES = [b"", b"\0" * 31, b"\1" * 32, b"\2" * 320, SECRET[:4] * 8]
TEXTS = ["", "a", "default", "victim", "../../etc", "\0", "x" * 3000]


def anything(rng: random.Random, depth: int = 0) -> Any:
    kinds: list[Callable[[], Any]] = [
        lambda: rng.choice(NUMBERS),
        lambda: rng.choice(BYTES),
        lambda: rng.choice(TEXTS),
        lambda: rng.choice([None, True, False]),
    ]
    if depth < 3:
        kinds += [
            lambda: [anything(rng, depth + 1) for _ in range(rng.randrange(4))],
            lambda: {str(anything(rng, 3)): anything(rng, depth + 1) for _ in range(rng.randrange(4))},
        ]
    return rng.choice(kinds)()


def plausible(rng: random.Random, name: str, kind: Any) -> Any:
    """Of the right type, and often of a value that means something."""
    if name == "layout":
        return LAYOUT.describe() if rng.random() < 0.7 else {"groups": anything(rng), "block_tokens": anything(rng)}
    if kind is int:
        return rng.choice([0, 0, 1, 1, 2, 3, rng.randrange(1 << 16)])
    if kind is str:
        return rng.choice(["m", "r", "default", "a"])
    if kind is bytes:
        return rng.choice(BYTES)
    if kind is dict:
        return {}
    if kind is list:
        return rng.choice([[[0, 2, 0, 2]], [anything(rng)], [[[0, 2, 0, 2]]]])
    return rng.choice([0, 0.01, 1])


def frame(rng: random.Random, role: str) -> bytes:
    """One that is nearly right, most of the time."""
    ops = [name for name, op in OPS.items() if op.role == role]
    name = rng.choice(ops)
    op = OPS[name]
    message: dict[str, Any] = {"op": name}
    for field, kind in (*op.required.items(), *((f, k) for f, k in op.optional.items() if rng.random() < 0.5)):
        message[field] = plausible(rng, field, kind)
    if rng.random() < 0.003:  # ends the connection, so not too often
        field = rng.choice(list(message))
        message[field] = anything(rng)
    if rng.random() < 0.001:
        del message[rng.choice(list(message))]
    try:
        packed = pack(message)
    except (KVCacheError, ValueError, TypeError, OverflowError):
        packed = msgpack.packb({"op": name})
    if rng.random() < 0.002:
        at = rng.randrange(len(packed))
        packed = packed[:at] + rng.randbytes(rng.randrange(1, 9)) + packed[at + 1 :]
    if rng.random() < 0.001:
        packed = rng.choice(
            [rng.randbytes(40), (MAX_FRAME_BYTES + 1).to_bytes(4, "little"), b"\xff\xff\xff\xff", b"\0" * 9]
        )
    return packed


class Stranger:
    """A client that says nonsense, reads what comes, and looks at all memory that it is given."""

    def __init__(self, daemon: DaemonProcess, rng: random.Random) -> None:
        self.rng, self.answers, self._said = rng, 0, bytearray()
        self.control = daemon.connect()
        self.control.send({"op": "hello", "version": PROTOCOL_VERSION, "role": "control"}, timeout_s=30)
        self.session = parse_reply(self.control.receive(30)[0])["session"]
        self.daemon = daemon
        fields = {"layout": LAYOUT.describe(), "model": "m", "revision": "r", "cache_salt": "", "facts": {}}
        self.control.send({"op": "namespace", "tenant": "default", **fields}, timeout_s=30)
        self.control.receive(30)
        for number in (0, 1, 2):
            self.control.send({"op": "open", "request": number, "namespace": 0, "id": "a"}, timeout_s=30)

    def talk(self) -> None:
        self._talk(self.control, "control", A_CONNECTION)
        with suppress(KVCacheError):
            mover = self.daemon.connect()
            mover.send(
                {"op": "hello", "version": PROTOCOL_VERSION, "role": "mover", "session": self.session}, timeout_s=30
            )
            mover.receive(30)
            self._talk(mover, "mover", A_CONNECTION // 8)
            mover.close()
        self.control.close()

    def _talk(self, wire: Wire, role: str, count: int) -> None:
        self._said.clear()
        with suppress(KVCacheError, OSError):
            for _ in range(count // A_BURST):
                frames = [frame(self.rng, role) for _ in range(A_BURST)]
                wire.connection.settimeout(30)
                wire.connection.sendall(b"".join(frames))
                silent = sum(b"open" in each or b"close" in each for each in frames)
                self._read(wire, self.answers + A_BURST - silent)

    def _read(self, wire: Wire, answers: int) -> None:
        """Until so many answers came; or for a moment, since a frame cut short has none and takes the next with it."""
        wire.connection.settimeout(0.01)
        while self.answers < answers:
            try:
                said, rights, _, _ = wire.connection.recvmsg(1 << 16, socket.CMSG_SPACE(256))
            except TimeoutError:
                return
            if not said:
                raise ConnectionError
            assert SECRET not in said
            self._count(said)
            for _, _, data in rights:
                for i in range(0, len(data) - 3, 4):
                    self._look(int.from_bytes(data[i : i + 4], "little"))

    def _count(self, said: bytes) -> None:
        """Messages that the daemon answered: those behind the end of a connection it never saw."""
        self._said += said
        while len(self._said) >= 4 and len(self._said) >= 4 + int.from_bytes(self._said[:4], "little"):
            del self._said[: 4 + int.from_bytes(self._said[:4], "little")]
            self.answers += 1

    def _look(self, descriptor: int) -> None:
        with mmap.mmap(descriptor, 0, prot=mmap.PROT_READ) as memory:
            assert memory.find(SECRET) < 0, "another tenant's memory was handed out"
        os.close(descriptor)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("tcp", [False, True], ids=["unix", "tcp"])
def test_random_messages_neither_crash_nor_leak(
    make_daemon: Callable[..., DaemonProcess], request: pytest.FixtureRequest, tcp: bool
) -> None:
    frames = (1_000_000 if request.config.getoption("--long") else 100_000) // (5 if tcp else 1)
    rng = random.Random(3)
    daemon = make_daemon(tcp=tcp).start()
    assert daemon.process is not None
    with daemon.open() as cache:
        victim = bound_to(cache, tenant="victim", cache_salt="secret")
        expected = keep_secret(victim)
        answers, before = 0, 0
        while answers < frames:
            stranger = Stranger(daemon, rng)
            stranger.talk()
            answers += stranger.answers
            assert daemon.process.poll() is None, "the daemon died"
            if not before and answers > frames // 10:
                before = resident_bytes(daemon.process.pid)
        assert resident_bytes(daemon.process.pid) < before + GROWTH_BYTES
        assert load(victim, list(range(8))) == expected
        assert store(bound_to(cache), list(range(4)), 1)
        assert cache.check() == []


def keep_secret(handle: Any) -> list[bytes]:
    """Two blocks full of the secret."""
    from tests.contract.fake_engine import Engine

    engine = Engine(LAYOUT)
    for layer in engine.memory[0]:
        flat = layer.view("u1").reshape(-1)
        flat[:] = 0
        for at in range(0, len(flat) - len(SECRET), 512):
            flat[at : at + len(SECRET)] = list(SECRET)
    with handle.request() as r:
        r.match(list(range(8)))
        assert r.store(engine.described, engine.ids([0, 1])).wait(60)
    return [engine.block(0), engine.block(1)]

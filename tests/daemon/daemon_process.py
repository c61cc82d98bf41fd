"""A daemon in a process of its own, that tests may kill, and a pretended engine's part of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Any

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.daemon.client.cache import parse_endpoint
from kvcache.daemon.wire import Wire
from tests.contract.caches import Engine, bind
from tests.daemon.within import PATIENT
from tests.peer.port import free_port

LAYOUT = KVLayout.mha(layers=2, kv_heads=2, head_dim=64, dtype="fp32", block_tokens=4)  # 8 KiB a block


class House:
    """`kvcache daemon` over a directory: its socket, its drive where it has one."""

    def __init__(self, directory: Path, *, nvme: bool = False, tcp: bool = False, **variables: object) -> None:
        """`tcp`: tests come in by a port of loopback, and all bytes go over it."""
        self.directory, self.socket = directory, directory / "s"
        self.where, self._words = f"unix:{self.socket}", tuple[str, ...]()
        if tcp:
            variables["DAEMON__LISTEN"] = f"127.0.0.1:{free_port()}"
            self.where, self._words = f"tcp://{variables['DAEMON__LISTEN']}", ("--insecure-loopback",)
        settings = {
            "HOST__CAPACITY_BYTES": "32MiB",
            "HOST__SLAB_BYTES": "4MiB",
            "NVME__ENABLED": str(nvme).lower(),
            "NVME__PATH": directory / "nvme",
            "NVME__CAPACITY_BYTES": "64MiB",
            "NVME__MIN_FREE_BYTES": 0,
            "CONTROL__ENABLED": "false",
            **variables,
        }
        self.environ = {**os.environ, **{f"KVCACHE_{name}": str(value) for name, value in settings.items()}}
        self.process: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None  # while it serves
        self.before: list[str] = []  # a program that runs it
        self.heirs: list[House] = []
        self.descriptors: list[int] = []  # that it has from us

    def command(self, *words: str) -> list[str]:
        return [
            *self.before,
            sys.executable,
            "-m",
            "kvcache.cli.main",
            "daemon",
            "--socket",
            str(self.socket),
            *self._words,
            *words,
        ]

    def begin(self, *words: str) -> House:
        """Running; it will listen, or end."""
        self.said = []
        self.process = subprocess.Popen(
            self.command(*words),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=self.descriptors,
        )
        assert self.process.stdout is not None
        self._serves = threading.Event()
        self._listener = threading.Thread(target=self._listen, args=(self.process.stdout,))
        self._listener.start()
        return self

    def start(self, *words: str) -> House:
        """Running, and listening."""
        self.begin(*words).serves()
        return self

    def serves(self) -> None:
        """Wait until it listens."""
        assert self._serves.wait(120), "it neither serves nor ends"
        assert any("serving" in line for line in self.said), "".join(self.said)

    def _listen(self, said: IO[str]) -> None:
        """Take what it says, so that it never waits for somebody to."""
        with said:
            for line in said:
                self.said.append(line)
                if "serving" in line:
                    self._serves.set()
        self._serves.set()

    def successor(self, **variables: object) -> House:
        """Another one, for the same place and with the same settings but these; not started."""
        other = House(self.directory)
        other.environ = {**self.environ, **{f"KVCACHE_{name}": str(value) for name, value in variables.items()}}
        other.where, other._words = self.where, self._words
        self.heirs.append(other)
        return other

    def run(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._gone()

    def end(self) -> tuple[int, str]:
        """By SIGTERM: what it left with, and what it said."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self._gone(), "".join(self.said)

    def gone(self) -> tuple[int, str]:
        """As `end`, of one that another took the place of."""
        return self._gone(), "".join(self.said)

    def _gone(self) -> int:
        assert self.process is not None
        code = self.process.wait(120)
        if self._listener is not None:
            self._listener.join()
        self._listener = None
        assert self.process.stdout is not None
        self.process.stdout.close()  # where it never came to serve
        return code

    def close(self) -> None:
        for successor in self.heirs:
            successor.close()
        if self.process is not None:
            self.kill()

    def open(self, **more: Any) -> Any:
        return kvcache.open(self.where, **{**PATIENT, **more})

    def wire(self) -> Wire:
        """A connection on which nothing was said."""
        return parse_endpoint(self.where).connect(30)


def bound_to(cache: Any, **fields: Any) -> Any:
    return bind(cache, LAYOUT, **fields)


def store(bound: Any, tokens: list[int], seed: int, engine: Engine | None = None) -> list[bytes]:
    """Store what `seed` makes under these tokens; the blocks' bytes."""
    engine = engine or Engine(LAYOUT)
    ids = list(range(len(tokens) // LAYOUT.block_tokens))
    engine.fill(seed, ids)
    with bound.request() as r:
        r.match(tokens)
        assert r.store(engine.described, engine.ids(ids)).wait(60)
    return [engine.block(i) for i in ids]


def load(bound: Any, tokens: list[int], engine: Engine | None = None) -> list[bytes]:
    """The bytes of the blocks that come."""
    engine = engine or Engine(LAYOUT)
    engine.poison()
    with bound.request() as r:
        hit = r.match(tokens)
        r.admit()
        transfer = r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks))))
        assert transfer.wait(60)
        return [engine.block(i) for i in range(transfer.blocks)]


def reached(cache: Any, timeout_s: float = 60) -> None:
    """Wait until the client has reached a daemon again."""
    assert cache.wait_reachable(timeout_s), "the daemon was not reached again"

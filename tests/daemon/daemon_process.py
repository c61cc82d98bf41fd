"""`kvcache daemon` as a process that tests may kill, and the helpers by which a fake engine stores and loads."""

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
from tests.contract.fake_engine import Engine, bind
from tests.daemon.in_process_daemon import PATIENT
from tests.peer.ports import free_port

LAYOUT = KVLayout.mha(layers=2, kv_heads=2, head_dim=64, dtype="fp32", block_tokens=4)  # 8 KiB a block


class DaemonProcess:
    """`kvcache daemon` over a directory: its socket, its drive where it has one."""

    def __init__(self, directory: Path, *, nvme: bool = False, tcp: bool = False, **variables: object) -> None:
        """`tcp`: clients connect by TCP on loopback, and all bytes go over that connection."""
        self.directory, self.socket = directory, directory / "s"
        self.endpoint, self._arguments = f"unix:{self.socket}", tuple[str, ...]()
        if tcp:
            variables["DAEMON__LISTEN"] = f"127.0.0.1:{free_port()}"
            self.endpoint, self._arguments = f"tcp://{variables['DAEMON__LISTEN']}", ("--insecure-loopback",)
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
        self.wrapper: list[str] = []  # command that runs the daemon, such as a tracer
        self.successors: list[DaemonProcess] = []
        self.descriptors: list[int] = []  # inherited by the process

    def command(self, *words: str) -> list[str]:
        return [
            *self.wrapper,
            sys.executable,
            "-m",
            "kvcache.cli.main",
            "daemon",
            "--socket",
            str(self.socket),
            *self._arguments,
            *words,
        ]

    def launch(self, *words: str) -> DaemonProcess:
        """Start the process without waiting until it listens."""
        self.output = []
        self.process = subprocess.Popen(
            self.command(*words),
            env=self.environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=self.descriptors,
        )
        assert self.process.stdout is not None
        self._serving = threading.Event()
        self._listener = threading.Thread(target=self._listen, args=(self.process.stdout,))
        self._listener.start()
        return self

    def start(self, *words: str) -> DaemonProcess:
        """Start the process and wait until it listens."""
        self.launch(*words).wait_serving()
        return self

    def wait_serving(self) -> None:
        """Wait until it listens."""
        assert self._serving.wait(120), "it neither serves nor ends"
        assert any("serving" in line for line in self.output), "".join(self.output)

    def _listen(self, said: IO[str]) -> None:
        """Read its output, so that a full pipe never blocks it."""
        with said:
            for line in said:
                self.output.append(line)
                if "serving" in line:
                    self._serving.set()
        self._serving.set()

    def successor(self, **variables: object) -> DaemonProcess:
        """A daemon for the same directory with these settings changed; not started."""
        other = DaemonProcess(self.directory)
        other.environ = {**self.environ, **{f"KVCACHE_{name}": str(value) for name, value in variables.items()}}
        other.endpoint, other._arguments = self.endpoint, self._arguments
        self.successors.append(other)
        return other

    def run(self, *words: str, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self._wait_exit()

    def terminate(self) -> tuple[int, str]:
        """Send SIGTERM. Returns the exit status and the output."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self._wait_exit(), "".join(self.output)

    def wait_exit(self) -> tuple[int, str]:
        """Wait until the process ends by itself. Returns as `terminate`."""
        return self._wait_exit(), "".join(self.output)

    def _wait_exit(self) -> int:
        assert self.process is not None
        code = self.process.wait(120)
        if self._listener is not None:
            self._listener.join()
        self._listener = None
        assert self.process.stdout is not None
        self.process.stdout.close()  # where it ended before it served
        return code

    def close(self) -> None:
        for successor in self.successors:
            successor.close()
        if self.process is not None:
            self.kill()

    def open(self, **more: Any) -> Any:
        return kvcache.open(self.endpoint, **{**PATIENT, **more})

    def connect(self) -> Wire:
        """A new connection without any message."""
        return parse_endpoint(self.endpoint).connect(30)


def bound_to(cache: Any, **fields: Any) -> Any:
    return bind(cache, LAYOUT, **fields)


def store(handle: Any, tokens: list[int], seed: int, engine: Engine | None = None) -> list[bytes]:
    """Store what `seed` makes under these tokens; the blocks' bytes."""
    engine = engine or Engine(LAYOUT)
    ids = list(range(len(tokens) // LAYOUT.block_tokens))
    engine.fill(seed, ids)
    with handle.request() as r:
        r.match(tokens)
        assert r.store(engine.described, engine.ids(ids)).wait(60)
    return [engine.block(i) for i in ids]


def load(handle: Any, tokens: list[int], engine: Engine | None = None) -> list[bytes]:
    """The bytes of the blocks that were loaded."""
    engine = engine or Engine(LAYOUT)
    engine.poison()
    with handle.request() as r:
        hit = r.match(tokens)
        r.admit()
        transfer = r.load(hit.blocks, engine.described, engine.ids(list(range(hit.blocks))))
        assert transfer.wait(60)
        return [engine.block(i) for i in range(transfer.blocks)]


def reached(cache: Any, timeout_s: float = 60) -> None:
    """Wait until the client has reached a daemon again."""
    assert cache.wait_reachable(timeout_s), "the daemon was not reached again"

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcache.cache.cache import Cache
from kvcache.daemon.discovery import SocketClaim
from kvcache.daemon.server.admission import Admission
from kvcache.daemon.server.server import Daemon
from kvcache.daemon.server.tcp import TcpListener
from kvcache.os_env import SystemClock
from kvcache.settings.sources import load as load_settings
from tests.daemon.daemon_process import DaemonProcess
from tests.daemon.in_process_daemon import InProcessDaemon, start, until


@pytest.fixture
def make_daemon() -> Iterator[Callable[..., DaemonProcess]]:
    """Starts daemons as processes, which end with the test. Paths are short: a socket's has at most 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        made: list[DaemonProcess] = []

        def make(**more: Any) -> DaemonProcess:
            place = Path(directory, str(len(made)))
            place.mkdir()
            made.append(DaemonProcess(place, **more))
            return made[-1]

        yield make
        for daemon in made:
            daemon.close()


@pytest.fixture
def daemon(make_daemon: Callable[..., DaemonProcess]) -> DaemonProcess:
    return make_daemon().start()


@pytest.fixture
def make_in_process() -> Iterator[Callable[..., InProcessDaemon]]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory, ExitStack() as undo:
        daemons: list[InProcessDaemon] = []

        def make(*, insecure: bool = False, **more: Any) -> InProcessDaemon:
            settings = load_settings(
                None,
                host={"capacity_bytes": "768KiB", "slab_bytes": "192KiB"},  # 64 records, in extents of 16
                **{"nvme__enabled": False, "daemon__lease_s": 30, **more},
            )
            cache = Cache(settings, shared=True)
            undo.callback(cache.close)
            path = Path(directory, str(len(daemons)))
            admission = Admission(settings.daemon.tenants_file, SystemClock())
            port = TcpListener(settings.daemon, admission, insecure=insecure) if settings.daemon.listen else None
            claim = SocketClaim(path, 0o600)
            undo.callback(claim.release)
            daemon = Daemon(cache, claim, admission=admission, port=port)
            undo.callback(start(daemon))
            daemons.append(InProcessDaemon(cache, daemon, path, undo, port))
            return daemons[-1]

        yield make
        for made in daemons:
            until(lambda made=made: made.leaked_slots == 0)
            assert made.cache.check() == []


@pytest.fixture
def in_process(make_in_process: Callable[..., InProcessDaemon]) -> InProcessDaemon:
    return make_in_process()


@pytest.fixture
def tcp_daemon(make_in_process: Callable[..., InProcessDaemon]) -> InProcessDaemon:
    """A daemon that listens on TCP at loopback, without TLS."""
    return make_in_process(insecure=True, daemon__listen="127.0.0.1:0")

"""It listens where it was told, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.daemon_process import DaemonProcess
from tests.peer.ports import free_port

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="Linux tells who listens where")
_LISTENS = "0A"


def listening(daemon: DaemonProcess) -> set[str]:
    """Addresses of all sockets of internet families on which its process listens, as `HOST:PORT` in hexadecimal."""
    assert daemon.process is not None
    own, proc = set(), Path("/proc") / str(daemon.process.pid)
    for entry in (proc / "fd").iterdir():
        try:
            own.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except FileNotFoundError:
            continue  # closed meanwhile
    found = set()
    for family in ("tcp", "tcp6", "udp", "udp6"):
        path = proc / "net" / family
        for line in path.read_text().splitlines()[1:] if path.exists() else ():
            words = line.split()
            if words[9] in own and (words[3] == _LISTENS or family.startswith("udp")):
                found.add(words[1])
    return found


def loopback(port: int) -> str:
    return f"0100007F:{port:04X}"


def test_by_default_only_the_unix_socket_listens(make_daemon: Callable[..., DaemonProcess]) -> None:
    assert listening(make_daemon().start()) == set()


def test_ports_listen_on_loopback_by_default(make_daemon: Callable[..., DaemonProcess]) -> None:
    pytest.importorskip("uvicorn", reason="HTTP needs the extra daemon")
    http, port = free_port(), free_port()
    daemon = make_daemon(HTTP__ENABLED="true", HTTP__PORT=http, DAEMON__LISTEN=f"127.0.0.1:{port}")
    assert listening(daemon.start("--insecure-loopback")) == {loopback(http), loopback(port)}


def test_a_port_listens_on_its_configured_host(make_daemon: Callable[..., DaemonProcess]) -> None:
    pytest.importorskip("uvicorn", reason="HTTP needs the extra daemon")
    http = free_port()
    daemon = make_daemon(HTTP__ENABLED="true", HTTP__PORT=http, HTTP__HOST="127.0.0.2")
    assert listening(daemon.start()) == {f"0200007F:{http:04X}"}

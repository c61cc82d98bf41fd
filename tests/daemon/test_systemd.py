"""What a daemon tells systemd, played by a socket: that it serves and ends, and the memory kept for the next one."""

from __future__ import annotations

import array
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvcache.daemon.server.systemd import DESCRIPTOR_NAME_PREFIX, notify, take_descriptors
from tests.daemon.daemon_process import DaemonProcess, bound_to, load, store

PROMPT = list(range(32))
ROOT = Path(__file__).parents[2]
PASS = """
import os, sys
given = [int(number) for number in sys.argv[1].split(",") if number]
for at, descriptor in enumerate(given):
    os.dup2(descriptor, 100 + at)
for at in range(len(given)):
    os.dup2(100 + at, 3 + at)
os.environ["LISTEN_PID"], os.environ["LISTEN_FDS"] = str(os.getpid()), str(len(given))
os.execv(sys.argv[2], sys.argv[2:])
"""
"""Begins a program with descriptors from 3 on, as systemd does."""


class Systemd:
    """As much of it as keeps descriptors, by name."""

    def __init__(self, directory: Path) -> None:
        self.path, self.kept, self.said = directory / "notify", dict[str, list[int]](), list[str]()
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(str(self.path))
        self.socket.settimeout(30)

    def hear(self, *, until: str = "") -> None:
        """All that was sent, and wait for a line."""
        while True:
            with suppress(BlockingIOError):
                self.socket.setblocking(bool(until) and until not in self.said)
                if until and until not in self.said:
                    self.socket.settimeout(60)
                data, rights, _, _ = self.socket.recvmsg(4096, socket.CMSG_SPACE(4 * 8))
                lines = data.decode().splitlines()
                self.said += lines
                told = dict(line.split("=", 1) for line in lines)
                for _, _, packed in rights:
                    self.kept.setdefault(told["FDNAME"], []).extend(array.array("i", packed))
                if told.get("FDSTOREREMOVE") == "1":
                    self.close(told["FDNAME"])
                continue
            return

    def close(self, name: str) -> None:
        for descriptor in self.kept.pop(name, []):
            os.close(descriptor)

    def start(self, daemon: DaemonProcess) -> DaemonProcess:
        """With what is kept, in an order of its own."""
        names = sorted(self.kept, reverse=True)
        given = [str(self.kept[name][0]) for name in names]
        daemon.environ["LISTEN_FDNAMES"] = ":".join(names)
        daemon.wrapper = [sys.executable, "-c", PASS, ",".join(given)]
        daemon.descriptors = [descriptor for name in names for descriptor in self.kept[name]]
        daemon.start()
        self.hear(until="READY=1")
        return daemon


@pytest.fixture
def systemd(tmp_path: Path) -> Iterator[Systemd]:
    made = Systemd(tmp_path)
    yield made
    for name in list(made.kept):
        made.close(name)
    made.socket.close()


@pytest.fixture
def unit(make_daemon: Callable[..., DaemonProcess], systemd: Systemd) -> DaemonProcess:
    daemon = make_daemon(nvme=False)
    daemon.environ |= {"NOTIFY_SOCKET": str(systemd.path), "FDSTORE": "64"}
    return daemon


def again(daemon: DaemonProcess) -> DaemonProcess:
    """The same unit's next process."""
    return daemon.successor()


def tiers(cache: Any) -> dict[str, int]:
    with bound_to(cache).request() as r:
        return dict(r.match(PROMPT).by_tier)


def test_a_restart_keeps_host_memory(unit: DaemonProcess, systemd: Systemd) -> None:
    systemd.start(unit)
    with unit.open() as cache:
        expected = store(bound_to(cache), PROMPT, 1)
    for _ in range(2):
        assert unit.terminate()[0] == 0
        systemd.hear()
        assert "STOPPING=1" in systemd.said
        assert sorted(systemd.kept) == [f"{DESCRIPTOR_NAME_PREFIX}0", f"{DESCRIPTOR_NAME_PREFIX}1"]
        systemd.said.clear()
        unit = systemd.start(again(unit))
        assert systemd.kept == {}, "what was taken is kept no longer"
        with unit.open() as cache:
            assert tiers(cache) == {"host": 8}
            assert load(bound_to(cache), PROMPT) == expected
            assert cache.check() == []


def test_stored_descriptors_are_taken_once(unit: DaemonProcess, systemd: Systemd) -> None:
    """A process that was killed may have written anything over what the table tells of."""
    systemd.start(unit)
    with unit.open() as cache:
        store(bound_to(cache), PROMPT, 1)
    assert unit.terminate()[0] == 0
    systemd.hear()
    left = {
        name: [os.dup(descriptor) for descriptor in take_descriptors] for name, take_descriptors in systemd.kept.items()
    }
    second = systemd.start(again(unit))
    second.kill()
    systemd.kept = left  # as if it had not heard that they are taken
    third = systemd.start(again(unit))
    with third.open() as cache:
        assert tiers(cache) == {}
        expected = store(bound_to(cache), PROMPT, 2)
        assert load(bound_to(cache), PROMPT) == expected


def test_a_killed_process_keeps_nothing(unit: DaemonProcess, systemd: Systemd) -> None:
    systemd.start(unit)
    with unit.open() as cache:
        store(bound_to(cache), PROMPT, 1)
    unit.kill()
    systemd.hear()
    assert systemd.kept == {}


@pytest.mark.parametrize("room", ["", "0", "many"])
def test_a_failed_descriptor_store_keeps_nothing(unit: DaemonProcess, systemd: Systemd, room: str) -> None:
    unit.environ["FDSTORE"] = room
    systemd.start(unit)
    with unit.open() as cache:
        store(bound_to(cache), PROMPT, 1)
    assert unit.terminate()[0] == 0
    systemd.hear()
    assert systemd.kept == {}


def test_incomplete_descriptors_are_not_taken() -> None:
    assert take_descriptors({}) is None
    assert (
        take_descriptors({"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": f"{DESCRIPTOR_NAME_PREFIX}0"}) is None
    )
    assert not notify("READY=1", environ={})
    assert not notify("READY=1", environ={"NOTIFY_SOCKET": "relative"})
    assert not notify("READY=1", environ={"NOTIFY_SOCKET": "/nowhere/at/all"})


def test_the_unit_runs_under_systemd() -> None:
    """It is told that the daemon serves; a restart keeps what is in host memory, a kill does not; within the unit's
    limits on system calls, addresses, files and rights."""
    words = ["unshare", "--pid", "--fork", "--kill-child", "--mount", "--mount-proc"]
    if os.geteuid() != 0 or not Path("/usr/lib/systemd/systemd").exists() or shutil.which("unshare") is None:
        pytest.skip("a systemd, and the right to give it namespaces of its own")
    if subprocess.run([*words, "mount", "-t", "tmpfs", "tmpfs", "/run"], capture_output=True, check=False).returncode:
        pytest.skip("no namespaces can be made here")
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*words, sys.executable, "-m", "tests.daemon.systemd_unit"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environ,
        timeout=300,
        check=False,
    )
    if "Failed to allocate manager object" in done.stderr:
        pytest.skip("systemd finds no control groups here")
    assert done.returncode == 0, done.stderr[-3000:]
    seen = json.loads(done.stdout)
    assert seen.pop("status").startswith("serving unix:")
    assert [value for row in seen.pop("rights") for value in row if value] == ["0000000000000000", "1", "2"]
    assert seen == {
        "another": True,
        "after a restart": {"host": 8},
        "the same bytes": True,
        "kept twice": 0,
        "after a reload": True,
        "after a kill": {},
        "check": [],
        "result": "success",
        "left": False,
    }

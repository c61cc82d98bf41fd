"""Where control sockets lie: never where another user could meddle, and never for longer than their process."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import kvcache
from kvcache.daemon import discovery as place
from kvcache.daemon.client.control import find_caches
from kvcache.errors import StoreError
from kvcache.host_memory_budget import CLAIMS_FOLDER

RUN = """
import sys, kvcache
cache = kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)
{then}
print("ready", flush=True)
sys.stdin.read()
"""
FORK = """
import os
ours, theirs = os.pipe()
if os.fork() == 0:
    os.write(theirs, b".")
    sys.stdin.read()
    os._exit(0)
os.read(ours, 1)
"""


def running(runtime: Path, then: str = "") -> subprocess.Popen[str]:
    """A process with a cache of its own, until its standard input ends."""
    script = RUN.format(then=then)
    environ = {**os.environ, "XDG_RUNTIME_DIR": str(runtime.parent), "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environ,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def left_in(runtime: Path) -> list[Path]:
    """Of sockets; what else caches of a node tell each other has a folder of its own there."""
    return [path for path in runtime.iterdir() if path.name != CLAIMS_FOLDER]


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def test_a_stale_socket_is_removed_by_discovery(runtime: Path) -> None:
    with running(runtime) as process:
        assert [found.info["pid"] for found in find_caches()] == [process.pid]
        kill(process)
        assert len(left_in(runtime)) == 1
        assert list(find_caches()) == []
        assert left_in(runtime) == []


def test_a_stale_socket_is_removed_by_the_next_cache(runtime: Path) -> None:
    with running(runtime) as process:
        kill(process)
    left = runtime / f"{process.pid}-2.sock.new"  # killed before it listened
    left.touch()
    with closing(kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)):
        assert [path.name for path in left_in(runtime)] == [f"{os.getpid()}-1.sock"]


def test_an_unclosed_cache_removes_its_socket_at_exit(runtime: Path) -> None:
    with running(runtime) as process:
        process.communicate("")
    assert process.returncode == 0
    assert left_in(runtime) == []


def test_a_forked_child_does_not_keep_its_parents_socket(runtime: Path) -> None:
    with running(runtime, then=FORK) as process:
        (path,) = left_in(runtime)
        assert not place.is_stale(path)
        kill(process)
        assert place.is_stale(path), "the child listens in its parent's name"


def test_a_busy_socket_is_not_stale(runtime: Path) -> None:
    runtime.mkdir(mode=0o700)
    path = runtime / "1-1.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(path))
        assert place.is_stale(path)
        listener.listen(0)
        waiting = []
        for _ in range(8):  # more than wait in its queue
            assert not place.is_stale(path)
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            waiting[-1].setblocking(False)
            waiting[-1].connect_ex(os.fspath(path))
        for connection in waiting:
            connection.close()
    assert place.is_stale(path)


@pytest.fixture
def short() -> Iterator[Path]:
    with TemporaryDirectory(prefix="kv-") as made:
        yield Path(made)


def test_the_first_safe_directory_is_used(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_to_all, link, file = short / "open", short / "link", short / "file"
    open_to_all.mkdir()
    open_to_all.chmod(0o750)
    link.symlink_to(short)
    file.touch()
    sound = short / "sound"
    bad = [short / ("x" * 100), short / "missing" / "kvcache", open_to_all, link, file]
    monkeypatch.setattr(place, "socket_directories", lambda environ=None: [*bad, sound])
    assert place.make_socket_directory() == sound
    assert sound.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(place, "socket_directories", lambda environ=None: bad)
    with pytest.raises(StoreError, match="XDG_RUNTIME_DIR") as caught:
        place.make_socket_directory()
    assert all(str(path) in str(caught.value) for path in bad)


def test_the_runtime_directory_is_searched_first(short: Path) -> None:
    user = os.geteuid()
    assert place.socket_directories({"XDG_RUNTIME_DIR": str(short)})[0] == short / "kvcache"
    without = place.socket_directories({})
    assert Path(f"/tmp/kvcache-{user}") in without
    assert place.socket_directories({"XDG_RUNTIME_DIR": "relative"}) == without
    assert len(place.socket_directories({"XDG_RUNTIME_DIR": f"/run/user/{user}"})) == len(without)


def test_a_cache_runs_without_a_socket_directory(
    short: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(place, "socket_directories", lambda environ=None: [short / "missing" / "kvcache"])
    with caplog.at_level(logging.WARNING, "kvcache"):
        cache = kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)
    assert "does not list this cache" in caplog.text
    assert cache.check() == []
    cache.close()

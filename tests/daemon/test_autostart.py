"""A daemon of one engine: found or started by the first process, gone when the engine is."""

from __future__ import annotations

import errno
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

import kvcache
from kvcache.daemon.client import autostart as private
from kvcache.daemon.client.autostart import find_or_start, is_listening, settings_environment, socket_path
from kvcache.errors import ConfigError, StoreError
from tests.daemon.daemon_process import bound_to, load, store
from tests.daemon.in_process_daemon import PATIENT, InProcessDaemon, until

SMALL: dict[str, Any] = {"host": {"capacity_bytes": "8MiB"}, "nvme__enabled": False, "control__enabled": False}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="kv-") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        yield Path(made)


def opened(where: str) -> Any:
    return kvcache.open(where, **PATIENT)


def ended(process: int) -> bool:
    """Wait for the end of the process of a descriptor."""
    there, _, _ = select.select([process], [], [], 120)
    os.close(process)
    return bool(there)


def end(number: int) -> None:
    process = os.pidfd_open(number)
    os.kill(number, signal.SIGTERM)
    assert ended(process)


def test_the_first_process_starts_the_shared_daemon(place: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_or_start("engine", linger_s=4, **SMALL))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    with opened(found[0]) as one, opened(found[0]) as other:
        expected = store(bound_to(one), list(range(8)), 1)
        assert load(bound_to(other), list(range(8))) == expected
        assert one.stats()["tiers"]["host"]["capacity_bytes"] == 8 << 20
        daemon = os.pidfd_open(one.connection.pid)
    assert socket_path("engine") != socket_path("other")
    assert ended(daemon), "it did not end by itself when no client was connected"
    assert not is_listening(socket_path("engine"))


def parents_of(number: int) -> Iterator[int]:
    while number:
        number = int(Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[1])
        yield number


def test_an_autostarted_daemon_outlives_its_engine_briefly(place: Path) -> None:
    """vLLM ends with all its processes and their children: a daemon among them had no time to write what it had."""
    script = (
        "import os, kvcache\n"
        "from kvcache.daemon.client.autostart import find_or_start\n"
        "where = find_or_start('engine', linger_s=4, host={'capacity_bytes': '8MiB'}, nvme__enabled=False)\n"
        "cache = kvcache.open(where, patience_s=30.0)\n"
        "print(cache.connection.pid, flush=True)\n"
        "input()\n"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert engine.stdout is not None
    number = int(engine.stdout.readline())
    daemon = os.pidfd_open(number)
    assert engine.pid not in parents_of(number)
    assert os.getsid(number) != os.getsid(engine.pid)
    engine.kill()
    engine.communicate()
    assert ended(daemon), "the daemon outlived its engine"


def test_invalid_settings_start_no_daemon(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"host\.capacity_bytes"):
        find_or_start("engine", host={"capacity_bytes": "none"})
    with pytest.raises(StoreError, match="nvme directory /proc/nowhere"):
        find_or_start("engine", nvme={"path": "/proc/nowhere", "capacity_bytes": "64MiB"}, control__enabled=False)
    assert not is_listening(socket_path("engine"))


def test_a_refused_process_start_is_reported(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    for refused in ("os.open", "os.pipe", "subprocess.run", "socket.socket"):
        with monkeypatch.context() as changed:
            changed.setattr(refused, none_left)
            with pytest.raises(StoreError, match=r"cannot start a private daemon: .*Too many open files.*ulimit -n"):
                find_or_start("engine", **SMALL)
    with opened(find_or_start("engine", **SMALL)) as cache:
        end(cache.connection.pid)


def test_settings_are_passed_as_environment_variables() -> None:
    assert settings_environment({"host": {"capacity_bytes": "8MiB"}, "nvme__enabled": False}) == {
        "KVCACHE_HOST__CAPACITY_BYTES": "8MiB",
        "KVCACHE_NVME__ENABLED": "false",
    }


DRIVE: dict[str, Any] = {"nvme__min_free_bytes": 0, "host": {"capacity_bytes": "8MiB"}, "control__enabled": False}


def test_a_restarted_engine_reuses_its_daemon(place: Path) -> None:
    """It has another id, and the first daemon still has the NVMe directory that both name."""
    given = DRIVE | {"nvme__path": str(place / "nvme"), "nvme__capacity_bytes": "64MiB"}
    first = find_or_start("first", linger_s=60, **given)  # between two engines, on a machine with other work
    with opened(first) as cache:
        expected = store(bound_to(cache), list(range(8)), 1)
        daemon = cache.connection.pid
    assert find_or_start("second", **given) == first
    with opened(first) as cache:
        assert cache.connection.pid == daemon
        assert load(bound_to(cache), list(range(8))) == expected
        hit = cache.stats()["tiers"]["host"]
        assert hit["used_bytes"] > 0
        with pytest.raises(StoreError, match=r"host\.capacity_bytes = 8388608 and not 16777216"):
            find_or_start("third", **(given | {"host": {"capacity_bytes": "16MiB"}}))
        told = Path(first.removeprefix("unix:")).with_suffix(".json")
        for torn in (told.read_bytes()[:-1], b"[1]", b""):
            told.write_bytes(torn)
            with pytest.raises(StoreError, match=told.name):
                find_or_start("third", **given)
        told.unlink()
        with pytest.raises(StoreError, match=told.name):
            find_or_start("third", **given)
        end(daemon)


def test_waiting_for_another_start_is_not_counted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true, waited = private._starting, [0.0]

    @contextmanager
    def behind_another(directory: Path) -> Iterator[None]:
        with true(directory):
            waited[0] += 10 * private.START_TIMEOUT_S
            yield

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + waited[0], sleep=time.sleep)
    monkeypatch.setattr(private, "_starting", behind_another)
    monkeypatch.setattr(private, "time", clock)
    with opened(find_or_start("engine", **SMALL)) as cache:
        end(cache.connection.pid)


def test_a_liveness_probe_has_time_to_connect(in_process: InProcessDaemon) -> None:
    daemon, linger_s = in_process.daemon, 600.0
    daemon._linger_s = linger_s
    in_process.open().close()
    until(lambda: daemon._lingering is not None)
    ended = daemon._lingering
    assert ended is not None
    until(lambda: is_listening(in_process.path) and daemon._lingering is not ended)
    seen: list[bool] = []

    def it_is_over() -> None:
        """While somebody who was not accepted yet is in the queue."""
        seen.append(is_listening(in_process.path))
        daemon._lingers_until = daemon._loop.time()
        daemon._linger_expired()
        seen.append(daemon._ending)
        for _ in range(1000):  # of those who looked before, some may be in the queue
            if not daemon._ending:
                daemon._linger_expired()
        seen.append(daemon._ending)

    daemon._loop.call_soon_threadsafe(it_is_over)
    until(lambda: len(seen) == 3)
    assert seen == [True, False, True]


def test_a_daemon_that_is_ending_is_waited_for(place: Path) -> None:
    given = DRIVE | {"nvme__path": str(place / "nvme"), "nvme__capacity_bytes": "64MiB"}
    for engine in ("same", "another"):
        with opened(find_or_start(engine, **given)) as cache:
            handle = bound_to(cache)
            daemon = os.pidfd_open(cache.connection.pid)
            store(handle, list(range(64)), 1)
            os.kill(cache.connection.pid, signal.SIGTERM)
        where = find_or_start(engine, **given)  # while the first one may be writing what is queued
        with opened(where) as cache:
            assert ended(daemon)
            assert is_listening(Path(where.removeprefix("unix:")))
            end(cache.connection.pid)

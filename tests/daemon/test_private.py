"""A daemon of one engine: found or started by whoever comes first, gone when the engine is."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import kvcache
from kvcache.daemon.private import answers, find_or_start, socket_path, variables
from kvcache.errors import ConfigError, StoreError
from tests.daemon.house import bound_to, load, store

SMALL: dict[str, Any] = {"host": {"capacity_bytes": "8MiB"}, "nvme__enabled": False, "control__enabled": False}


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with TemporaryDirectory(prefix="kv-") as made:
        monkeypatch.setenv("XDG_RUNTIME_DIR", made)
        yield Path(made)


def ended(process: int) -> bool:
    """Wait for the end of the process of a descriptor."""
    there, _, _ = select.select([process], [], [], 30)
    os.close(process)
    return bool(there)


def test_whoever_comes_first_starts_it_and_all_find_the_same(place: Path) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(find_or_start("engine", linger_s=2, **SMALL))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4
    assert len(set(found)) == 1
    with kvcache.open(found[0]) as one, kvcache.open(found[0]) as other:
        expected = store(bound_to(one), list(range(8)), 1)
        assert load(bound_to(other), list(range(8))) == expected
        assert one.stats()["tiers"]["host"]["capacity_bytes"] == 8 << 20
        daemon = os.pidfd_open(one.link.pid)
    assert socket_path("engine") != socket_path("other")
    assert ended(daemon), "it did not end by itself when nobody was connected"
    assert not answers(socket_path("engine"))


def test_it_ends_when_its_engine_is_killed(place: Path) -> None:
    script = (
        "import os, kvcache\n"
        "from kvcache.daemon.private import find_or_start\n"
        "where = find_or_start('engine', linger_s=0.5, host={'capacity_bytes': '8MiB'}, nvme__enabled=False)\n"
        "cache = kvcache.open(where)\n"
        "print(cache.link.pid, flush=True)\n"
        "input()\n"
    )
    engine = subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    assert engine.stdout is not None
    daemon = os.pidfd_open(int(engine.stdout.readline()))
    engine.kill()
    engine.communicate()
    assert ended(daemon), "the daemon outlived its engine"


def test_settings_that_make_no_sense_start_nothing(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"host\.capacity_bytes"):
        find_or_start("engine", host={"capacity_bytes": "none"})
    with pytest.raises(StoreError, match="nvme directory /proc/nowhere"):
        find_or_start("engine", nvme={"path": "/proc/nowhere", "capacity_bytes": "64MiB"}, control__enabled=False)
    assert not answers(socket_path("engine"))


def test_settings_become_variables() -> None:
    assert variables({"host": {"capacity_bytes": "8MiB"}, "nvme__enabled": False}) == {
        "KVCACHE_HOST__CAPACITY_BYTES": "8MiB",
        "KVCACHE_NVME__ENABLED": "false",
    }


DRIVE: dict[str, Any] = {"nvme__free_floor_bytes": 0, "host": {"capacity_bytes": "8MiB"}, "control__enabled": False}


def test_an_engine_that_is_restarted_gets_the_daemon_of_the_one_before(place: Path) -> None:
    """It has another id, and the first daemon still has the NVMe directory that both name."""
    given = DRIVE | {"nvme__path": str(place / "nvme"), "nvme__capacity_bytes": "64MiB"}
    first = find_or_start("first", **given)
    with kvcache.open(first) as cache:
        expected = store(bound_to(cache), list(range(8)), 1)
        daemon = cache.link.pid
    assert find_or_start("second", **given) == first
    with kvcache.open(first) as cache:
        assert cache.link.pid == daemon
        assert load(bound_to(cache), list(range(8))) == expected
        hit = cache.stats()["tiers"]["host"]
        assert hit["used_bytes"] > 0
        with pytest.raises(StoreError, match=r"host\.capacity_bytes = 8388608 and not 16777216"):
            find_or_start("third", **(given | {"host": {"capacity_bytes": "16MiB"}}))
        os.kill(daemon, signal.SIGTERM)


def test_a_daemon_that_is_ending_is_waited_for(place: Path) -> None:
    given = DRIVE | {"nvme__path": str(place / "nvme"), "nvme__capacity_bytes": "64MiB"}
    for engine in ("same", "another"):
        with kvcache.open(find_or_start(engine, **given)) as cache:
            bound = bound_to(cache)
            daemon = os.pidfd_open(cache.link.pid)
            store(bound, list(range(64)), 1)
            os.kill(cache.link.pid, signal.SIGTERM)
        where = find_or_start(engine, **given)  # while the first one may be writing what is queued
        with kvcache.open(where) as cache:
            assert ended(daemon)
            assert answers(Path(where.removeprefix("unix:")))
            os.kill(cache.link.pid, signal.SIGTERM)

"""A daemon's start and end as one: whatever fails leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cache.cache import Cache
from kvcache.daemon.server.server import new_loop
from kvcache.daemon.server.service import Service
from kvcache.errors import ConfigError, StoreError
from kvcache.settings.sources import load as load_settings
from tests.daemon.daemon_process import bound_to, load, store
from tests.peer.ports import free_port

TOKENS = list(range(8))


@pytest.fixture
def made(tmp_path: Path) -> Callable[..., Service]:
    def make(
        *, report_status: Callable[[str], object] = len, components: Callable[[Cache], object] = id, **more: Any
    ) -> Service:
        read = partial(
            load_settings,
            None,
            daemon__socket=str(tmp_path / "s"),
            host={"capacity_bytes": "8MiB", "slab_bytes": "4MiB"},
            nvme={"enabled": True, "path": str(tmp_path / "nvme"), "capacity_bytes": "64MiB", "min_free_bytes": 0},
            control={"enabled": False},
            **more,
        )
        return Service(read, version="1", insecure=True, components=[components], report_status=report_status)

    return make


@contextmanager
def running(service: Service) -> Iterator[None]:
    serves = threading.Event()
    service.start()
    daemon = service.daemon
    assert daemon is not None
    on_started, daemon.on_started = daemon.on_started, lambda: (on_started(), serves.set())
    thread = threading.Thread(target=service.run)
    thread.start()
    try:
        assert serves.wait(60)
        yield
    finally:
        daemon.stop()
        thread.join()
        service.stop()


def test_a_service_keeps_its_blocks_for_the_next(made: Callable[..., Service], tmp_path: Path) -> None:
    lines: list[str] = []
    for turn in range(2):
        service = made(report_status=lines.append)
        with running(service), kvcache.open(f"unix:{tmp_path / 's'}", patience_s=30, deadline_s=30) as cache:
            if turn == 0:
                expected = store(bound_to(cache), TOKENS, 1)
            assert load(bound_to(cache), TOKENS) == expected
        service.stop()
        assert not (tmp_path / "s").exists()
    serving, ending = (
        f"serving unix:{tmp_path / 's'}, 8 MiB of host memory",
        "ending; queued blocks are written first",
    )
    assert [line[: len(serving)] for line in lines] == [serving, ending] * 2


def test_a_plan_equals_the_start_and_opens_nothing(made: Callable[..., Service], tmp_path: Path) -> None:
    port = free_port()
    told = made(daemon__listen=f"127.0.0.1:{port}").plan()
    assert told.startswith(f"unix:{tmp_path / 's'}, 8 MiB of host memory, 64 MiB at {tmp_path / 'nvme'}")
    assert list(tmp_path.iterdir()) == []
    with socket.create_server(("127.0.0.1", port)):
        pass


def no_room(cache: Cache) -> None:
    raise StoreError("not this one")


@pytest.mark.parametrize("step", ["http", "drive", "beside"])
def test_a_failed_start_leaves_nothing_open(made: Callable[..., Service], tmp_path: Path, step: str) -> None:
    listen = f"127.0.0.1:{free_port()}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if step == "http":
            service = made(daemon__listen=listen, http={"enabled": True, "port": taken.getsockname()[1]})
        elif step == "drive":
            (tmp_path / "nvme").write_text("a file")
            service = made(daemon__listen=listen)
        else:
            service = made(daemon__listen=listen, components=no_room)
        with pytest.raises((StoreError, ConfigError)):
            service.start()
    service.stop()
    assert not (tmp_path / "s").exists()
    if step == "drive":
        (tmp_path / "nvme").unlink()
    with running(made(daemon__listen=listen)), kvcache.open(f"tcp://{listen}", patience_s=30, deadline_s=30) as cache:
        expected = store(bound_to(cache), TOKENS, 1)
        assert load(bound_to(cache), TOKENS) == expected


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.AbstractEventLoop]:
    """That were made for a daemon."""
    made: list[asyncio.AbstractEventLoop] = []

    def new() -> asyncio.AbstractEventLoop:
        made.append(new_loop())
        return made[-1]

    monkeypatch.setattr("kvcache.daemon.server.server.new_loop", new)
    return made


def no_thread(*_: object) -> None:
    raise OSError("no thread")


@pytest.mark.parametrize("step", ["kvcache.daemon.http.server.serve_http", "kvcache.daemon.http.server.start", None])
def test_a_daemon_that_never_runs_leaves_nothing_open(
    made: Callable[..., Service],
    loops: list[asyncio.AbstractEventLoop],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    step: str | None,
) -> None:
    service = made(http={"enabled": True, "port": 0})
    if step is None:
        service.start()
    else:
        monkeypatch.setattr(step, no_thread)
        with pytest.raises(OSError, match="no thread"):
            service.start()
        assert [loop.is_closed() for loop in loops] == [True]
    service.stop()
    assert [loop.is_closed() for loop in loops] == [True]
    assert not (tmp_path / "s").exists()

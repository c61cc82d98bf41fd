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
from tests.daemon.house import House
from tests.daemon.within import Within, start, until


@pytest.fixture
def make_house() -> Iterator[Callable[..., House]]:
    """Daemons that end with the test; short paths, since a socket's has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="kv-") as directory:
        made: list[House] = []

        def make(**more: Any) -> House:
            place = Path(directory, str(len(made)))
            place.mkdir()
            made.append(House(place, **more))
            return made[-1]

        yield make
        for house in made:
            house.close()


@pytest.fixture
def house(make_house: Callable[..., House]) -> House:
    return make_house().start()


@pytest.fixture
def make_within() -> Iterator[Callable[..., Within]]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory, ExitStack() as undo:
        houses: list[Within] = []

        def make(*, insecure: bool = False, **more: Any) -> Within:
            settings = load_settings(
                None,
                host={"capacity_bytes": "768KiB", "slab_bytes": "192KiB"},  # 64 records, in extents of 16
                **{"nvme__enabled": False, "daemon__lease_s": 30, **more},
            )
            cache = Cache(settings, shared=True)
            undo.callback(cache.close)
            path = Path(directory, str(len(houses)))
            admission = Admission(settings.daemon.tenants_file, SystemClock())
            port = TcpListener(settings.daemon, admission, insecure=insecure) if settings.daemon.listen else None
            claim = SocketClaim(path, 0o600)
            undo.callback(claim.release)
            daemon = Daemon(cache, claim, admission=admission, port=port)
            undo.callback(start(daemon))
            houses.append(Within(cache, daemon, path, undo, port))
            return houses[-1]

        yield make
        for made in houses:
            until(lambda made=made: made.lost == 0)
            assert made.cache.check() == []


@pytest.fixture
def within(make_within: Callable[..., Within]) -> Within:
    return make_within()


@pytest.fixture
def loopback(make_within: Callable[..., Within]) -> Within:
    """By TCP, without TLS."""
    return make_within(insecure=True, daemon__listen="127.0.0.1:0")

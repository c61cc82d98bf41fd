from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcache.config import load as load_settings
from kvcache.daemon.address import Claim
from kvcache.daemon.server import Daemon, start
from kvcache.hierarchy.cache import Cache
from tests.daemon.house import House
from tests.daemon.within import Within, until


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
def within() -> Iterator[Within]:
    with tempfile.TemporaryDirectory(prefix="kv-") as directory, ExitStack() as undo:
        settings = load_settings(
            None,
            host={"capacity_bytes": "768KiB", "extent_bytes": "192KiB"},  # 64 records, in extents of 16
            nvme__enabled=False,
            daemon__lease_s=0.2,
        )
        cache = Cache(settings, shared=True)
        undo.callback(cache.close)
        daemon = Daemon(cache, Claim(Path(directory, "s"), 0o600))
        undo.callback(start(daemon))
        made = Within(cache, daemon, Path(directory, "s"), undo)
        yield made
        until(lambda: made.lost == 0)
        assert cache.check() == []

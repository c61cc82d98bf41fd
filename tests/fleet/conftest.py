"""A real server for each test of the fleet, emptied before it, and boards on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcache.fleet.coordination import Coordination
from kvcache.settings.tiers import RedisSettings
from tests.peer.server import MISSING, Server, empty


@pytest.fixture
def server(tmp_path: Path) -> Server:
    if MISSING:
        pytest.skip(MISSING)
    return empty(tmp_path)


@pytest.fixture
def boards(server: Server) -> Iterator[Callable[[], Coordination]]:
    made: list[Coordination] = []

    def make() -> Coordination:
        made.append(Coordination(RedisSettings(enabled=True, url=server.tcp)))
        return made[-1]

    yield make
    for coordination in made:
        coordination.close()


@pytest.fixture
def coordination(boards: Callable[[], Coordination]) -> Coordination:
    return boards()

"""A real server for each test of the fleet, emptied before it, and make_coordination on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcache.fleet.coordination import Coordination
from kvcache.settings.tiers import RedisSettings
from tests.peer.redis_server import MISSING, RedisServer, empty


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    if MISSING:
        pytest.skip(MISSING)
    return empty(tmp_path)


@pytest.fixture
def make_coordination(server: RedisServer) -> Iterator[Callable[[], Coordination]]:
    made: list[Coordination] = []

    def make() -> Coordination:
        made.append(Coordination(RedisSettings(enabled=True, url=server.tcp)))
        return made[-1]

    yield make
    for coordination in made:
        coordination.close()


@pytest.fixture
def coordination(make_coordination: Callable[[], Coordination]) -> Coordination:
    return make_coordination()

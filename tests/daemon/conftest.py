from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon.house import House


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

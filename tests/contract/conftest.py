"""Each tier and each cache that there is, one after the other; audited at the end of every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.hierarchy.naive import NaiveCache
from kvcache.tier.tier import Tier
from tests.contract.caches import MiB
from tests.contract.tiers import KINDS, Bench, make
from tests.peer.server import MISSING, empty


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = make(request.param, tmp_path)
    yield bench
    assert bench.tier.check() == []
    bench.tier.close()


@pytest.fixture
def tier(bench: Bench) -> Tier:
    return bench.tier


@pytest.fixture(
    params=[
        "naive",
        "host",
        "host+nvme",
        pytest.param("host+redis", marks=pytest.mark.skipif(bool(MISSING), reason=MISSING)),
    ]
)
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    if request.param == "naive":
        made: Any = NaiveCache()
    else:
        made = kvcache.open(
            host={"capacity_bytes": 8 * MiB},
            nvme={
                "enabled": request.param == "host+nvme",
                "path": tmp_path / "nvme",
                "capacity_bytes": 64 * MiB,
                "free_floor_bytes": 0,
            },
            redis={"enabled": True, "url": empty(tmp_path).unix} if request.param == "host+redis" else {},
        )
    yield made
    assert made.flush(30)
    assert made.check() == []
    made.close()

"""Each tier that there is, one after the other; audited at the end of every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.tier.tier import Tier
from tests.contract.tiers import KINDS, Bench, make


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    bench = make(request.param, tmp_path)
    yield bench
    assert bench.tier.check() == []
    bench.tier.close()


@pytest.fixture
def tier(bench: Bench) -> Tier:
    return bench.tier

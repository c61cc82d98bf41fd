"""What every tier promises, for each of `TIERS`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.errors import KVCacheError
from kvcache.port import Port
from kvcache.testing.tier import CAPACITY, Bench, TierContract
from tests.contract.tiers import KINDS, make, nvme


class TestTier(TierContract):
    @pytest.fixture(params=KINDS)
    def bench(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
        bench = make(request.param, tmp_path)
        yield bench
        assert bench.tier.check() == []
        bench.tier.close()


def test_nothing_but_our_errors(tmp_path: Path) -> None:
    """A place that is none: one line that says what to do."""
    (tmp_path / "nvme").write_text("a file")
    with pytest.raises(KVCacheError, match="directory"):
        nvme(tmp_path, CAPACITY, Port())

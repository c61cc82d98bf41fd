"""What every tier promises, of object stores over real servers that speak S3."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.port import Port
from kvcache.testing.tier import Bench, TierContract, on_bench
from kvcache.tier.object import ObjectTier
from kvcache.tier.tier import Tier
from tests.peer.objects import MISSING, shared


@pytest.mark.skipif(bool(MISSING["seaweedfs"]), reason=MISSING["seaweedfs"])
class TestSeaweedFS(TierContract):
    kind = "seaweedfs"

    def make(self, path: Path, capacity_bytes: int, port: Port) -> Tier:
        prefix = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        return ObjectTier(**shared(self.kind).settings, prefix=prefix, timeout_s=60, port=port)

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = on_bench(self.make, tmp_path)
        yield bench
        assert bench.tier.check() == []
        bench.tier.close()


@pytest.mark.skipif(bool(MISSING["moto"]), reason=MISSING["moto"])
class TestMoto(TestSeaweedFS):
    kind = "moto"

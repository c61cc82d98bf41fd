"""What every tier promises, of object stores over real servers that speak S3."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvcache.port import Port
from kvcache.testing.blocks import chain
from kvcache.testing.tier import Bench, TierContract, intact, on_bench, write
from kvcache.tier.object import ObjectTier
from kvcache.tier.tier import Outcome, Tier
from tests.peer import google
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

    def test_large_ones_that_several_write_at_once_lie_there_once(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each goes in parts to a place of its own, and one of them to where all look for it."""
        monkeypatch.setattr("kvcache.tier.object.store.MULTIPART_BYTES", 6 << 20)
        settings = {**shared(self.kind).settings, "prefix": hashlib.sha256(str(tmp_path).encode()).hexdigest()[:16]}
        tiers = [ObjectTier(**settings, pack_bytes=5 << 20, timeout_s=60) for _ in range(3)]
        try:
            blocks, size, start = chain(2), 12 << 20, threading.Barrier(3)

            def store(tier: ObjectTier) -> tuple[Outcome, ...]:
                assert not any(outcome is Outcome.DONE for outcome in tier.contains(blocks))
                start.wait(60)
                return write(tier, blocks, size)

            with ThreadPoolExecutor(3) as pool:
                assert set(pool.map(store, tiers)) == {(Outcome.DONE, Outcome.DONE)}
            assert [space.packs for space in tiers[0].survey.spaces()] == [2]
            assert all(intact(tier, blocks, size) for tier in tiers)
            assert tiers[0].check() == []
        finally:
            for tier in tiers:
                tier.close()


@pytest.mark.skipif(bool(MISSING["moto"]), reason=MISSING["moto"])
class TestMoto(TestSeaweedFS):
    kind = "moto"


@pytest.mark.skipif(bool(google.MISSING), reason=google.MISSING)
class TestGoogle(TierContract):
    """Its own names, conditions, listings and ranges; uploads in parts are not played."""

    def make(self, path: Path, capacity_bytes: int, port: Port) -> Tier:
        prefix = hashlib.sha256(str(path).encode()).hexdigest()[:16]
        return ObjectTier(**google.shared().settings, prefix=prefix, timeout_s=60, port=port)

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[Bench]:
        bench = on_bench(self.make, tmp_path)
        yield bench
        assert bench.tier.check() == []
        bench.tier.close()

    def test_two_that_write_the_same_at_once_leave_one_copy(self, tmp_path: Path) -> None:
        tiers, blocks, start = [self.make(tmp_path, 0, Port()) for _ in range(3)], chain(20), threading.Barrier(3)

        def store(tier: Tier) -> tuple[Outcome, ...]:
            start.wait(60)
            return write(tier, blocks)

        try:
            with ThreadPoolExecutor(3) as pool:
                assert set(pool.map(store, tiers)) == {(Outcome.DONE,) * 20}
            assert [space.packs for space in tiers[0].survey.spaces()] == [1]
            assert all(intact(tier, blocks) for tier in tiers)
        finally:
            for tier in tiers:
                tier.close()

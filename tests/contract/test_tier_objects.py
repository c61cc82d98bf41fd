"""What every tier promises, of object stores over real servers that speak S3, and over what plays Microsoft's and
Google's."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import ObjectSettings
from kvcache.testing.tier import TierContract, TierFixture, chain, intact, tier_fixture, write
from kvcache.tier.object import ObjectTier
from kvcache.tier.tier import Outcome, Tier
from tests.peer import azure_server, gcs_server
from tests.peer.s3_server import MISSING, shared


@pytest.mark.skipif(bool(MISSING["seaweedfs"]), reason=MISSING["seaweedfs"])
class TestSeaweedFS(TierContract):
    kind = "seaweedfs"

    def settings(self, path: Path) -> dict[str, str]:
        """Of its store, at a place of its own."""
        return {**self.store(), "prefix": hashlib.sha256(str(path).encode()).hexdigest()[:16]}

    def store(self) -> dict[str, str]:
        return shared(self.kind).settings

    def make(self, path: Path, capacity_bytes: int, os_env: OsEnv) -> Tier:
        return ObjectTier(ObjectSettings(**self.settings(path), timeout_s=60), os_env=os_env)  # type: ignore[arg-type]  # strings all

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[TierFixture]:
        bench = tier_fixture(self.make, tmp_path)
        yield bench
        assert bench.tier.check() == []
        bench.tier.close()

    def test_a_range_behind_the_end_is_empty(self, tmp_path: Path) -> None:
        tier = ObjectTier(ObjectSettings(**self.settings(tmp_path), timeout_s=60))  # type: ignore[arg-type]  # strings all
        try:
            bucket, (path, nothing) = tier._bucket, (f"{tier._names.root}/{name}" for name in ("three", "nothing"))
            for name, data in ((path, b"abc"), (nothing, b"")):
                bucket.put(name, [memoryview(data)], None, create=False)
            far = 9 << 20
            assert [bytes(piece) for piece in bucket.ranges(path, [(1, 9), (far, far + 9)], None) or ()] == [b"bc", b""]
            assert bucket.get(nothing, None, end=9) == b""
            assert bucket.ranges(f"{path}-gone", [(far, far + 9)], None) is None
            assert "faults" not in tier.counters
            bucket.delete([path, nothing], None)
        finally:
            tier.close()

    def test_concurrent_multipart_writes_leave_one_copy(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each goes in parts to a place of its own, and one of them to where all look for it."""
        monkeypatch.setattr("kvcache.tier.object.store.MULTIPART_BYTES", 6 << 20)
        given: dict[str, Any] = {**self.settings(tmp_path), "pack_bytes": 5 << 20, "timeout_s": 60}
        tiers = [ObjectTier(ObjectSettings(**given)) for _ in range(3)]
        try:
            blocks, size, start = chain(2), 12 << 20, threading.Barrier(3)

            def store(tier: ObjectTier) -> tuple[Outcome, ...]:
                assert not any(outcome is Outcome.DONE for outcome in tier.contains(blocks))
                start.wait(60)
                return write(tier, blocks, size)

            with ThreadPoolExecutor(3) as pool:
                assert set(pool.map(store, tiers)) == {(Outcome.DONE, Outcome.DONE)}
            assert [space.packs for space in tiers[0].inspector.spaces()] == [2]
            assert all(intact(tier, blocks, size) for tier in tiers)
            assert tiers[0].check() == []
        finally:
            for tier in tiers:
                tier.close()


@pytest.mark.skipif(bool(MISSING["moto"]), reason=MISSING["moto"])
class TestMoto(TestSeaweedFS):
    kind = "moto"


@pytest.mark.skipif(bool(azure_server.MISSING), reason=azure_server.MISSING)
class TestAzure(TestSeaweedFS):
    """Its own names, conditions, listings, ranges, copies and uploads in parts; signed by the account's key."""

    def store(self) -> dict[str, str]:
        return azure_server.shared().settings

    def stranger(self, path: Path) -> str:
        """Credentials that do not fit."""
        return azure_server.credentials(path, b"another key")

    def test_concurrent_writes_leave_one_copy(self, tmp_path: Path) -> None:
        tiers, blocks, start = [self.make(tmp_path, 0, OsEnv()) for _ in range(3)], chain(20), threading.Barrier(3)

        def store(tier: Tier) -> tuple[Outcome, ...]:
            start.wait(60)
            return write(tier, blocks)

        try:
            with ThreadPoolExecutor(3) as pool:
                assert set(pool.map(store, tiers)) == {(Outcome.DONE,) * 20}
            assert [space.packs for space in tiers[0].inspector.spaces()] == [1]
            assert all(intact(tier, blocks) for tier in tiers)
        finally:
            for tier in tiers:
                tier.close()

    def test_invalid_credentials_fail_and_change_nothing(self, tmp_path: Path) -> None:
        known = self.make(tmp_path, 0, OsEnv())
        given: dict[str, Any] = {**self.settings(tmp_path), "credentials_file": self.stranger(tmp_path)}
        stranger, blocks = ObjectTier(ObjectSettings(**given, timeout_s=60)), chain(3)
        try:
            assert write(known, blocks) == (Outcome.DONE,) * 3
            assert set(stranger.contains(blocks)) == {Outcome.FAILED}
            assert stranger.counters["faults_denied"] > 0
            assert intact(known, blocks)
        finally:
            known.close()
            stranger.close()


@pytest.mark.skipif(bool(gcs_server.MISSING), reason=gcs_server.MISSING)
class TestGoogle(TestAzure):
    """Its own names, conditions, listings and ranges; uploads in parts, copies and the check of what a service account
    signed are the gate's."""

    def store(self) -> dict[str, str]:
        return gcs_server.shared().settings

    def stranger(self, path: Path) -> str:
        return gcs_server.credentials(path, gcs_server.new_key())

"""Tiers in one directory, closed at the end; those on NVMe are audited first."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.os_env import OsEnv
from kvcache.settings.tiers import NvmeSettings, ObjectSettings
from kvcache.testing.tier import Clock
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.object import ObjectTier
from tests.tier.tier_files import MIB, Open, OpenObjects, inline


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers in one directory; each that is still open at the end is audited and closed."""
    opened: list[NvmeTier] = []

    def open_tier(**settings: Any) -> NvmeTier:
        settings = {"capacity_bytes": 4 * MIB, "segment_bytes": MIB // 4, "min_free_bytes": 0, **settings}
        os_env = settings.pop("os_env", OsEnv(executor=inline))
        opened.append(NvmeTier(str(tmp_path / "store"), NvmeSettings(**settings), os_env=os_env))
        return opened[-1]

    yield open_tier
    for tier in opened:
        if not tier._closed:
            assert tier.check() == []
            tier.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[OpenObjects]:
    """Opens object tiers in one directory, as processes of a fleet do; each is closed at the end."""
    tiers: list[ObjectTier] = []

    def open_tier(**settings: Any) -> ObjectTier:
        given = {"url": f"file://{tmp_path}/store", "refresh_s": 1e9, "timeout_s": 60}
        os_env = settings.pop("os_env", OsEnv(clock=Clock()))
        tiers.append(ObjectTier(ObjectSettings().model_copy(update={**given, **settings}), os_env))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()

"""NVMe tiers in one directory, audited at the end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.port import Port
from kvcache.tier.nvme import NvmeTier
from tests.tier.stores import MIB, Open, inline


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Open]:
    """Opens tiers in one directory; each that is still open at the end is audited and closed."""
    opened: list[NvmeTier] = []

    def open_tier(**settings: Any) -> NvmeTier:
        settings = {"capacity_bytes": 4 * MIB, "segment_bytes": MIB // 4, "free_floor_bytes": 0, **settings}
        settings.setdefault("port", Port(executor=inline))
        opened.append(NvmeTier(str(tmp_path / "store"), **settings))
        return opened[-1]

    yield open_tier
    for tier in opened:
        if not tier._closed:
            assert tier.check() == []
            tier.close()

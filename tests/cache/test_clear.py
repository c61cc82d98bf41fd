"""Clearing forgets one namespace, in every tier and across a restart, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kvcache
from tests.contract.fake_engine import FULL, HYBRID, Engine, bind, store


def opened(place: Path) -> Any:
    return kvcache.open(
        host={"capacity_bytes": 8 << 20},
        nvme={"path": place, "capacity_bytes": 64 << 20, "min_free_bytes": 0},
        control={"enabled": False},
    )


@pytest.mark.parametrize("layout", [FULL, HYBRID], ids=["full", "hybrid"])
def test_clear_removes_one_namespace(layout: Any, tmp_path: Path) -> None:
    tokens, engine = list(range(32)), Engine(layout)
    with opened(tmp_path) as cache:
        mine, others = bind(cache, layout), bind(cache, layout, model="other")
        for handle in (mine, others):
            assert store(handle, engine, tokens, list(range(8))).blocks == 8
        assert cache.flush(30)
        assert mine.clear() == 2 * 8 * len(layout.groups)
        assert mine.clear() == 0
        for handle, blocks in ((mine, 0), (others, 8)):
            with handle.request() as r:
                assert r.match(tokens).blocks == blocks
        assert cache.check() == []
    with opened(tmp_path) as cache:
        for handle, blocks in ((bind(cache, layout), 0), (bind(cache, layout, model="other"), 8)):
            with handle.request() as r:
                assert r.match(tokens).blocks == blocks
        assert store(bind(cache, layout), engine, tokens, list(range(8))).blocks == 8
        assert cache.flush(30)
        assert cache.check() == []

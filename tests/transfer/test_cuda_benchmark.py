"""The benchmark of the CUDA copies runs to its end on the device that is not there: only its figures mean nothing."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from kvcache.block.layout import KVLayout
from tests.transfer.cuda_on_cpu import HostDevice


def test_every_row_is_there_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    gpu_copy = importlib.import_module("gpu_copy")
    layout = KVLayout.mha(layers=2, kv_heads=2, head_dim=64)
    device = HostDevice()
    rows = list(gpu_copy.Bench(device, layout, pages=8, blocks=4, runs=1).rows({"gather": 2.0}))
    ids = [row.id for row in rows]
    assert [row.id for row in rows if row.peer is not None] == ["gpu/gather/2MiB/nhd"]
    assert len(ids) == len(set(ids))
    for direction in ("gather", "scatter"):
        for kind in ("whole", "nhd", "hnd"):
            wanted = {f"gpu/{direction}/2MiB/{kind}{way}" for way in ("", "/direct", "/staged", "/mapped")}
            assert wanted | {f"gpu/hbm/{direction}/{kind}"} <= set(ids)
        assert {f"gpu/bus/{direction}", f"gpu/{direction}/fp8/nhd", f"gpu/mapped/{direction}/32"} <= set(ids)
    assert {name.rpartition("_")[2] for name in device.launches} == {
        "16",
        "wide",
    }  # every shape takes the widest access

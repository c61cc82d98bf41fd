"""The benchmark of the CUDA copies runs to its end on the device that is not there: only its figures mean nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.layout import KVLayout
from tests.transfer.cuda_on_cpu import HostDevice


def test_the_benchmark_reports_every_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    gpu_copy = importlib.import_module("gpu_copy")
    layout = KVLayout.mha(layers=2, kv_heads=2, head_dim=64)
    device = HostDevice()
    rows, lost = gpu_copy.measured(gpu_copy.Bench(device, layout, pages=8, blocks=4, runs=1), {"gather": 2.0})
    assert lost == []
    ids = [row.id for row in rows]
    assert [row.id for row in rows if row.peer is not None] == ["gpu/gather/2MiB/nhd"]
    assert len(ids) == len(set(ids))
    for direction in ("gather", "scatter"):
        for kind in ("whole", "nhd", "hnd"):
            ways = ("", "/staged", "/mapped") if kind == "hnd" else ("", "/direct", "/staged", "/mapped")
            wanted = {f"gpu/{direction}/2MiB/{kind}{way}" for way in ways}
            assert wanted | {f"gpu/hbm/{direction}/{kind}"} <= set(ids)
        assert {f"gpu/bus/{direction}", f"gpu/{direction}/fp8/nhd", f"gpu/mapped/{direction}/32"} <= set(ids)
    assert {name.rpartition("_")[2] for name in device.launches} == {
        "16",
        "wide",
    }  # every shape takes the widest access


def test_a_failed_part_does_not_lose_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    gpu_copy = importlib.import_module("gpu_copy")
    row = gpu_copy.Row("gpu/bus/gather", 1.0, "GB/s")

    def broken() -> Iterator[Any]:
        yield row
        raise RuntimeError("an illegal memory access was encountered")

    class Bench:
        def parts(self, theirs: object) -> Iterator[Any]:
            yield "first", broken
            yield "second", lambda: iter([gpu_copy.Row("gpu/hbm/plain", 2.0, "GB/s")])

    rows, lost = gpu_copy.measured(Bench(), {})
    assert [found.id for found in rows] == ["gpu/bus/gather", "gpu/hbm/plain"]
    assert lost == ["first: failed, RuntimeError: an illegal memory access was encountered"]
    monkeypatch.setattr(gpu_copy, "MOST_S", -1.0)
    rows, lost = gpu_copy.measured(Bench(), {})
    assert (rows, len(lost)) == ([], 2)

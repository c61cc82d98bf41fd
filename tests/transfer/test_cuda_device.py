"""What `CupyDevice` asks of CuPy, and what it says where there is none or no GPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvcache.block.layout import KVLayout
from kvcache.errors import ConfigError, StoreError
from kvcache.transfer.copier import Copier, current_stream
from kvcache.transfer.cuda.copier import CudaCopier
from kvcache.transfer.cuda.device import BatchCopy, CupyDevice
from tests.transfer.fake_cupy import FakeCupy
from tests.transfer.test_copier import HND, engine


@pytest.fixture
def cupy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeCupy:
    made = FakeCupy(**getattr(request, "param", {}))
    monkeypatch.setitem(sys.modules, "cupy", made)
    monkeypatch.setattr(BatchCopy, "of_driver", classmethod(lambda cls: cls(None)))  # whatever this machine has
    return made


def test_missing_cupy_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ConfigError, match=r"pages on a GPU need CuPy: pip install 'kvcache-tiers\[cuda13\]'"):
        CupyDevice()


@pytest.mark.parametrize("cupy", [{"devices": 0}], indirect=True)
def test_a_missing_gpu_is_reported(cupy: FakeCupy) -> None:
    with pytest.raises(
        ConfigError, match=r"no GPU for this process: cudaErrorInsufficientDriver.*; look at nvidia-smi"
    ):
        CupyDevice()


@pytest.mark.parametrize("index", [-1, 2])
def test_a_device_out_of_range_is_reported(cupy: FakeCupy, index: int) -> None:
    with pytest.raises(ConfigError, match=f"device cuda:{index}: expected one of cuda:0 to cuda:1"):
        CupyDevice(index)


@pytest.mark.parametrize("cupy", [{"pinning": False}], indirect=True)
def test_memory_that_cuda_cannot_pin_is_reported(cupy: FakeCupy, monkeypatch: pytest.MonkeyPatch) -> None:
    copier = CudaCopier(1)
    for limit, advice in [
        (1 << 16, r"the locked-memory limit is 64 KiB: raise it \(`ulimit -l unlimited`"),
        (1 << 30, "check the free memory"),
        (-1, "check the free memory"),
    ]:
        monkeypatch.setattr("resource.getrlimit", lambda which, limit=limit: (limit, limit))
        with pytest.raises(StoreError, match=f"^128 KiB .* for cuda:1: cudaErrorMemoryAllocation: .*{advice}"):
            copier.pinned.add(memoryview(bytearray(128 << 10)))


def test_copies_run_with_and_without_pinned_memory(cupy: FakeCupy) -> None:
    copier = CudaCopier(1)
    contract: Copier = copier
    layout = KVLayout.mha(layers=4, kv_heads=2, head_dim=8)
    e = engine(layout, 0, layout.whole[0], 6, axes=HND)
    pages = replace(e.pages, device="cuda:1")
    memory = np.zeros(3 * pages.block_bytes, np.uint8)
    buffers = [memoryview(memory)[i * pages.block_bytes :][: pages.block_bytes] for i in range(3)]
    for pinned in (False, True):
        if pinned:
            copier.pinned.add(memoryview(memory))
        taken = contract.gather(pages, [4, 0, 5], buffers)
        assert taken.wait()
        assert taken.done
        assert [bytes(b) for b in buffers] == [e.payload(page) for page in (4, 0, 5)]
        assert contract.scatter(pages, [1, 2, 3], buffers).wait(10)
        assert [e.payload(page) for page in (1, 2, 3)] == [bytes(b) for b in buffers]
    assert copier.copy_pages(pages, [4], [0]).wait()
    assert e.payload(0) == e.payload(4)
    copier.gather(pages, [0], [memoryview(bytearray(pages.block_bytes // 2 + 4 * 16))], quantised="int8").wait()
    copier.close()
    assert len(cupy.compiled) == 2  # each file once
    assert cupy.device_stack == []


def test_a_read_only_region_is_registered_as_such(cupy: FakeCupy) -> None:
    """As the extents of a daemon's arena are to its clients."""
    copier = CudaCopier(1)
    copier.pinned.add(memoryview(bytes(4096)))
    copier.pinned.add(memoryview(bytearray(4096)))
    assert cupy.flags == [3 | 8, 3]


def test_time_is_in_seconds(cupy: FakeCupy) -> None:
    device = CupyDevice(1)
    work: list[Any] = []
    assert device.seconds(device.stream(), lambda: work.append(1)) == 0.002
    assert work == [1]


@pytest.mark.parametrize(("torch", "stream"), [(None, 0), (False, 0), (True, 77)], ids=["none", "unused", "used"])
def test_the_engines_current_stream_is_used(torch: bool | None, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without CUDA has no streams to ask for."""

    def current(index: int) -> Any:
        assert torch, "torch was asked for a stream that it does not have"
        return SimpleNamespace(cuda_stream=77)

    cuda = SimpleNamespace(is_initialized=lambda: torch, current_stream=current)
    monkeypatch.setitem(sys.modules, "torch", None if torch is None else SimpleNamespace(cuda=cuda))
    assert current_stream(0) == stream

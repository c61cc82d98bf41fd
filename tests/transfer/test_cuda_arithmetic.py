"""What host and device must agree on: division, walks, the places of a struct's members, an entry of the driver."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvcache.transfer.cuda import kernels
from kvcache.transfer.cuda import quantise as quantised
from kvcache.transfer.cuda.crossover import NEVER, Crossover, crossover_bytes, measure
from kvcache.transfer.cuda.device import ATTRIBUTES, BatchCopy
from kvcache.transfer.walk import coalesce_axes
from tests.transfer.cuda_on_cpu import CXX, HostDevice, compiled

LARGEST = (1 << 31) - 1


@given(divisor=st.integers(1, 1 << 31), dividends=st.lists(st.integers(0, LARGEST), min_size=1))
@example(divisor=1, dividends=[0, 1, LARGEST])
@example(divisor=1 << 31, dividends=[0, LARGEST])
@example(divisor=LARGEST, dividends=[LARGEST - 1, LARGEST])
@example(divisor=(1 << 30) + 1, dividends=[1 << 30, (1 << 30) + 1, LARGEST])
def test_kernel_division_equals_integer_division(divisor: int, dividends: list[int]) -> None:
    near = [m for n in dividends for m in (n, n // divisor * divisor, n // divisor * divisor - 1) if 0 <= m]
    given_, quotients, made = np.array(near, np.uint32), np.zeros(len(near), np.uint32), np.zeros(3, np.uint32)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (given_, quotients)]
    compiled().divide(
        ctypes.c_uint32(divisor), *pointers, ctypes.c_uint64(len(near)), ctypes.c_void_p(made.ctypes.data)
    )
    assert quotients.tolist() == [n // divisor for n in near]
    assert tuple(made.tolist()) == kernels.division(divisor)


@st.composite
def axes_of_blocks(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], int]:
    """Up to five axes without gaps in the payload, in any order; in the page nested in another order, with gaps."""
    item = draw(st.sampled_from([1, 2, 4]))
    extents = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    steps: list[dict[int, int]] = []
    for gaps in (st.just(0), st.sampled_from([0, 0, 3])):
        step, span = {}, item
        for axis in draw(st.permutations(range(len(extents)))):
            step[axis] = span
            span = span * extents[axis] + draw(gaps)
        steps.append(step)
    payload, page = steps
    return [(extent, page[i], payload[i]) for i, extent in enumerate(extents)], item


@given(axes_of_blocks())
def test_walks_visit_every_element_once(made: tuple[list[tuple[int, int, int]], int]) -> None:
    """The twin says what the header says, and both visit every element once, at the place that its indices give."""
    axes, item = made
    ours = coalesce_axes(axes, item)
    given_ = np.array(axes, np.int64)
    theirs, places = np.zeros(18, np.int64), np.zeros((ours.fragments, 2), np.int64)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (theirs, places)]
    compiled().walk(
        ctypes.c_void_p(given_.ctypes.data),
        len(axes),
        ctypes.c_uint64(item),
        *pointers,
        ctypes.c_uint64(ours.fragments),
    )
    flat = [number for axis in ours.axes for number in axis]
    assert theirs[: len(flat) + 3].tolist() == [*flat, ours.run, len(ours.axes), ours.fragments]
    np.testing.assert_array_equal(ours.offsets, places)
    elements = np.zeros((1, 2), np.int64)
    for extent, *steps in axes:
        elements = (elements[:, None] + np.arange(extent)[:, None] * np.array(steps)).reshape(-1, 2)
    within = np.arange(0, ours.run, item)[:, None]
    visited = (ours.offsets[:, None] + within).reshape(-1, 2)
    assert len(visited) == prod(extent for extent, _, _ in axes)
    assert sorted(visited.tolist()) == sorted(elements.tolist())


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("job", kernels.JOB), ("step", kernels.JOB["axes"].base), ("quantise_job", quantised.JOB)],
)
def test_struct_members_have_the_kernels_offsets(name: str, dtype: np.dtype[Any]) -> None:
    assert dtype.names is not None
    assert dtype.fields is not None
    ours = [dtype.fields[field][1] for field in dtype.names]
    places = np.zeros(len(ours) + 1, np.uint64)
    getattr(compiled(), f"{name}_places")(ctypes.c_void_p(places.ctypes.data))
    assert places.tolist() == [*ours, dtype.itemsize]


class Driver:
    """Takes what `Batch` gives as the driver would, and copies."""

    def __init__(self, name: str, result: int = 0) -> None:
        setattr(self, name, self.call)
        self.name, self.result, self.calls = name, result, 0

    def call(self, targets: Any, sources: Any, sizes: Any, count: Any, attributes: Any, first: Any, *rest: Any) -> int:
        self.calls += 1
        with_failure = self.name == "cuMemcpyBatchAsync"
        assert len(rest) == (3 if with_failure else 2)
        assert rest[0].value == 1
        assert rest[-1].value == 77
        arrays = [
            np.ctypeslib.as_array((ctypes.c_uint64 * count.value).from_address(a.value))
            for a in (targets, sources, sizes)
        ]
        assert ctypes.c_uint64.from_address(first.value).value == 0
        assert ctypes.string_at(attributes.value, 24) == np.array([1, 0, 0, 0, 0, 1], np.int32).tobytes()
        if self.result == 0:
            for target, origin, size in zip(*(a.tolist() for a in arrays), strict=True):
                ctypes.memmove(target, origin, size)
        return self.result


class TestBatch:
    def copied(self, batch: BatchCopy) -> tuple[bool, bytes]:
        source, target = np.arange(100, dtype=np.uint8), np.zeros(100, np.uint8)
        starts, sizes = np.array([0, 50], np.uint64), np.array([50, 50], np.uint64)
        ends = [starts + np.uint64(a.ctypes.data) for a in (target[::1], source)]
        return batch.copy(ends[0], ends[1], sizes, 77), target.tobytes()

    @pytest.mark.parametrize("name", ["cuMemcpyBatchAsync_v2", "cuMemcpyBatchAsync"])
    def test_the_batch_call_follows_each_driver_version(self, name: str) -> None:
        assert self.copied(BatchCopy(Driver(name))) == (True, bytes(range(100)))

    def test_a_driver_without_batch_copies_is_not_called(self) -> None:
        assert self.copied(BatchCopy(None)) == (False, bytes(100))

    def test_a_refusing_driver_is_called_once(self) -> None:
        driver = Driver("cuMemcpyBatchAsync_v2", result=801)
        batch = BatchCopy(driver)
        assert [self.copied(batch)[0] for _ in range(3)] == [False] * 3
        assert driver.calls == 1

    def test_an_empty_batch_copies_nothing(self) -> None:
        nothing = np.zeros(0, np.uint64)
        assert BatchCopy(None).copy(nothing, nothing, nothing, 77)

    def test_the_struct_equals_the_cuda_header(self, tmp_path: Path) -> None:
        header = Path("/usr/local/cuda/include/cuda.h")
        if not header.exists() or not shutil.which(CXX):
            pytest.skip("no cuda.h of a CUDA toolkit here")
        program = tmp_path / "places"
        (tmp_path / "places.cpp").write_text(
            "#include <cuda.h>\n#include <cstddef>\n#include <cstdio>\n"
            "using A = CUmemcpyAttributes;\n"
            'int main() { std::printf("%zu %zu %zu %zu %zu %d %d", offsetof(A, srcAccessOrder),'
            " offsetof(A, srcLocHint),"
            " offsetof(A, dstLocHint), offsetof(A, flags), sizeof(A), CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,"
            " CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE); }\n"
        )
        subprocess.run([CXX, f"-I{header.parent}", tmp_path / "places.cpp", "-o", program], check=True)
        printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
        assert ATTRIBUTES.fields is not None
        ours = [place for _, place in ATTRIBUTES.fields.values()]
        assert [int(number) for number in printed.split()] == [*ours, ATTRIBUTES.itemsize, 1, 1]


class TestCrossover:
    @pytest.mark.parametrize(
        ("dma", "found"),
        [
            ({1: 10, 2: 50, 4: 97, 8: 100}, 4),
            ({1: 97, 2: 50, 4: 97, 8: 100}, 4),  # a small size that kept up by chance
            ({1: 100, 2: 100}, 1),
            ({1: 10, 2: 96}, NEVER),
            ({}, NEVER),
        ],
    )
    def test_the_crossover_is_where_larger_copies_keep_up(self, dma: dict[int, float], found: int) -> None:
        assert crossover_bytes(dma, 100) == found

    def test_the_crossover_is_measured_with_real_copies(self) -> None:
        class Timed(HostDevice):
            """A microsecond for each piece and a nanosecond a byte by DMA; two nanoseconds a byte by the kernel."""

            def seconds(self, stream: int, work: Any) -> float:
                launches, copies = len(self.launches), len(self.copies)
                work()
                assert len(self.launches) + len(self.copies) == launches + copies + 1
                total = (16 << 20) * 1e-9
                return 2 * total if len(self.launches) > launches else total + 1e-6 * self.copies[-1][0]

        device = Timed()
        found = measure(device, device.stream(), 4, sizes=[250, 500, 1024, 2048, 1 << 20])
        assert found == Crossover(1024, 1024)
        assert set(device.launches) == {"copy.cu:gather_16", "copy.cu:scatter_16"}

"""The contract of a copier, for every one there is; what is told apart by layout is in tests/transfer."""

from __future__ import annotations

import pytest

from kvcache.block.layout import KVLayout
from kvcache.testing import CopierContract
from kvcache.testing.copier import CpuPages
from kvcache.transfer.copier import Copier
from kvcache.transfer.cpu import CpuCopier, ReferenceCopier
from kvcache.transfer.cuda.copier import CopyPath, CudaCopier
from kvcache.transfer.cuda.crossover import NEVER, Crossover
from tests.cache.test_device import on_gpu
from tests.transfer.cuda_on_cpu import HostDevice

pytestmark = pytest.mark.filterwarnings("ignore:kvcache._native is not there")


class TestPlain(CopierContract):
    def make(self) -> Copier:
        return ReferenceCopier()


class TestCpu(CopierContract):
    def make(self) -> Copier:
        return CpuCopier(3)


class TestCuda(CopierContract):
    """On a device that this processor plays."""

    way: CopyPath | None = None

    def make(self) -> Copier:
        return CudaCopier(HostDevice(), crossover=Crossover(NEVER, NEVER), way=self.way, staging_bytes=512)

    def place(self, layout: KVLayout) -> CpuPages:
        there = CpuPages(layout)
        there.described = on_gpu(there.described)
        return there


class TestCudaStaged(TestCuda):
    way: CopyPath | None = "staged"

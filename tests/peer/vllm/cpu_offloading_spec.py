"""vLLM's offloading to host memory on a processor, where its own worker wants a GPU: its copies, all else is its own.

Named in a job as `spec_module_path`. Only chunks of one block, so that a chunk is one row of each tensor.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class CpuOffloadingWorker(OffloadingWorker):
    def __init__(self, caches: Any, region: SharedOffloadRegion) -> None:
        self.region, self.refs = region, caches.group_data_refs
        self.pages = [t.tensor.view(torch.int8).view(-1, t.page_size_bytes) for t in caches.tensors]
        self.host = [region.create_next_worker_view(t.page_size_bytes) for t in caches.tensors]
        self.ended: list[TransferResult] = []

    def _move(self, job_id: int, pages: Any, chunks: Any, *, store: bool) -> bool:
        began, moved, at = time.perf_counter(), 0, 0
        for group, size in enumerate(pages.group_sizes):
            ids = torch.as_tensor(pages.block_ids[at : at + size], dtype=torch.int64)
            rows = torch.as_tensor(chunks[at : at + size], dtype=torch.int64)
            for number in {ref.tensor_idx for ref in self.refs[group]} if size else ():
                there, here = self.pages[number], self.host[number]
                if store:
                    here[rows] = there[ids]
                else:
                    there[ids] = here[rows]
                moved += size * there.shape[1]
            at += size
        self.ended.append(TransferResult(job_id, True, moved, time.perf_counter() - began))
        return True

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, src_spec, dst_spec.block_ids, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._move(job_id, dst_spec, src_spec.block_ids, store=False)

    def get_finished(self) -> list[TransferResult]:
        ended, self.ended = self.ended, []
        return ended

    def wait(self, job_ids: Any) -> None:
        """Every copy is over when it was begun."""

    def shutdown(self) -> None:
        self.host.clear()
        self.pages.clear()
        self.region.cleanup()


class CpuOffloadingSpec(TieringOffloadingSpec):
    def get_worker(self, kv_caches: Any) -> CpuOffloadingWorker:
        if not self._worker:
            assert self.blocks_per_chunk == 1
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuOffloadingWorker(kv_caches, region)
        return self._worker

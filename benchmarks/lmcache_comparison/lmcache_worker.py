"""LMCache as a side: its in-process engine, unmodified, on a processor without a GPU.

Its connectors for paged memory insist on CUDA. `Connector` stands in for them and hands each chunk to the copy that
LMCache itself brings for processors. All else is LMCache's, with its defaults: chunks of 256 tokens, its `builtin`
hash, LRU.
"""

# mypy: disable-error-code="import-not-found, misc"
# ruff: noqa: SLF001  what it lacks is mended within its own class
# LMCache lies in another environment than the checks.

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lmcache.lmcache_native as native
import torch
from lmcache import device_ops
from lmcache.utils import CacheEngineKey, mock_up_broadcast_fn, mock_up_broadcast_object_fn
from lmcache.v1.cache_engine import LMCacheEngineBuilder
from lmcache.v1.config import LMCacheEngineConfig
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import EvictionConfig, L1ManagerConfig, L1MemoryManagerConfig, StorageManagerConfig
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache.v1.gpu_connector.gpu_connectors import GPUConnectorInterface
from lmcache.v1.memory_management import MemoryFormat
from lmcache.v1.metadata import LMCacheMetadata
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

from lmcache_comparison.worker_loop import serve
from lmcache_comparison.workload import (
    BLOCK_TOKENS,
    KEPT_ON_DISK,
    LEAST,
    Pages,
    Shape,
    prompt,
    resident_bytes,
    token_bytes,
)

MODEL = "meta-llama/Llama-3-8B"
CHUNK_TOKENS = 256
GIB = 1 << 30


class Connector(GPUConnectorInterface):
    """Between pages and LMCache's memory: a list of pages a layer, `kvcaches`, and a slot a token, `slot_mapping`."""

    def __init__(self, shape: Shape) -> None:
        self._layers, heads, self._dim = shape
        self._hidden = heads * self._dim
        self.kvcaches = None

    def _copy(self, memory: Any, start: int, end: int, way: Any, kvcaches: Any, slot_mapping: Any, **_: Any) -> None:
        flat = [layer.view(2, -1, self._hidden) for layer in kvcaches]
        device_ops.multi_layer_kv_transfer(
            memory.tensor,
            flat,
            slot_mapping[start:end],
            torch.device("cpu"),
            flat[0].shape[1],
            way,
            native.EngineKVFormat.NL_X_TWO_NB_BS_NH_HS,
            block_size=BLOCK_TOKENS,
            head_size=self._dim,
        )

    def to_gpu(self, memory_obj: Any, start: int, end: int, **pages: Any) -> None:
        self._copy(memory_obj, start, end, native.TransferDirection.H2D, **pages)

    def from_gpu(self, memory_obj: Any, start: int, end: int, **pages: Any) -> None:
        self._copy(memory_obj, start, end, native.TransferDirection.D2H, **pages)

    def batched_to_gpu(self, memory_objs: Any = None, starts: Any = None, ends: Any = None, **pages: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(memory, start, end, **pages)

    def batched_from_gpu(self, memory_objs: Any, starts: Any, ends: Any, **pages: Any) -> None:
        for memory, start, end in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(memory, start, end, **pages)

    def get_shape(self, num_tokens: int) -> torch.Size:
        return torch.Size([2, self._layers, num_tokens, self._hidden])


def metadata(shape: Shape) -> LMCacheMetadata:
    layers, heads, dim = shape
    return LMCacheMetadata(
        model_name=MODEL,
        world_size=1,
        local_world_size=1,
        worker_id=0,
        local_worker_id=0,
        kv_dtype=torch.bfloat16,
        kv_shape=(layers, 2, CHUNK_TOKENS, heads, dim),
        chunk_size=CHUNK_TOKENS,
    )


class LMCacheWorker:
    def __init__(self) -> None:
        self._opened = 0

    def name(self) -> str:
        return f"LMCache {version('lmcache')}"

    def open(
        self,
        shape: Shape,
        tokens: int,
        room_tokens: int,
        directory: str | None = None,
        direct: bool = True,
        patience_s: float = 60.0,
        url: str = "",
        native: bool = False,
    ) -> None:
        """As `ours`. `direct`: on the drive by the path around the page cache, else through it. `patience_s`: how
        long to wait for a write to the drive or the server, since some never end. `native`: by the client in C++."""
        self._tokens, self._pages, self._directory = tokens, Pages(shape, tokens), directory
        self._patience_s, self._url = patience_s, url
        size = token_bytes(shape)
        settings: dict[str, Any] = {
            "chunk_size": CHUNK_TOKENS,
            "local_cpu": directory is None and not url,  # else nothing would be read from the drive, or the server
            "max_local_cpu_size": room_tokens * size / GIB,
        }
        if directory:
            os.makedirs(directory, exist_ok=True)
            settings["local_disk"] = f"file://{directory}"
            settings["max_local_disk_size"] = KEPT_ON_DISK * tokens * size / GIB
            settings["extra_config"] = {"use_odirect": direct}
        if url and native:
            _mend()
        if url:
            # its client in C++ takes no database
            settings["remote_url"] = url.replace("redis:", "resp:").removesuffix("/0") if native else url
            settings["remote_serde"] = "naive"
        self._opened += 1
        self._engine = LMCacheEngineBuilder.get_or_create(
            f"comparison-{self._opened}",
            LMCacheEngineConfig.from_defaults(**settings),
            metadata(shape),
            Connector(shape),
            mock_up_broadcast_fn,
            mock_up_broadcast_object_fn,
        )
        self._engine.post_init()
        self._taken: list[Any] = []

    def store(self, seed: int) -> dict[str, float]:
        """Seconds until the pages may change again, until all of it can be found on the drive (there is no way to
        wait for that but to look), and until it would survive a loss of power, for which we call fsync: LMCache does
        not."""
        ids, slots, before = prompt(seed, self._tokens), self._pages.slots(seed), set(self.files())
        begun = time.perf_counter()
        self._engine.store(ids, kvcaches=self._pages.source, slot_mapping=slots)
        stored = time.perf_counter() - begun
        if self._directory or self._url:
            while self._engine.lookup(ids) < self._tokens and time.perf_counter() - begun < self._patience_s:
                time.sleep(0.001)
        found = time.perf_counter() - begun
        _sync(sorted(set(self.files()) - before))
        return {"stored_s": stored, "found_s": found, "durable_s": time.perf_counter() - begun}

    def retrieve(self, seed: int, salt: str = "") -> dict[str, Any]:
        """As `ours`, the page cache emptied before. The engine has no place for a salt but a request's settings."""
        ids, slots = prompt(seed, self._tokens), self._pages.slots(seed + 1)
        self._pages.forget()
        _drop(self.files())
        begun = time.perf_counter()
        said = self._engine.retrieve(
            ids, kvcaches=self._pages.target, slot_mapping=slots, request_configs={"cache_salt": salt} if salt else None
        )
        seconds = time.perf_counter() - begun
        hits = int(said.sum())
        near = 0 if self._directory or self._url else hits
        return {"seconds": seconds, "hits": hits, "near": near, "wrong": self._pages.wrong(seed, said)}

    def match(self, seed: int, kind: str, runs: int) -> list[float]:
        """Seconds of each look-up of a prompt that is all there, without pinning it."""
        ids: Any = prompt(seed, self._tokens)
        ids = ids.tolist() if kind == "list" else ids
        times = []
        for _ in range(runs):
            begun = time.perf_counter()
            found = self._engine.lookup(ids)
            times.append(time.perf_counter() - begun)
            assert found == self._tokens, found
        return times

    def contains(self, seed: int, runs: int) -> list[float]:
        """As `ours`; nothing but the server knows what is there."""
        return self.match(seed, "tensor", runs)

    def hold(self, seed: int, runs: int) -> list[float]:
        """The same of a list, pinned and unpinned."""
        ids = prompt(seed, self._tokens).tolist()
        times = []
        for i in range(runs):
            begun = time.perf_counter()
            self._engine.lookup(ids, pin=True, lookup_id=f"held-{i}")
            self._engine.lookup_unpin(f"held-{i}")
            times.append(time.perf_counter() - begun)
        return times

    def evict(self, runs: int, tokens: int) -> list[float]:
        """Seconds to find room for so many tokens in a full pool."""
        shapes, dtypes = self._engine.metadata.get_shapes(CHUNK_TOKENS), self._engine.metadata.get_dtypes()
        allocate, times = self._engine.storage_manager.allocate, []
        assert allocate(shapes, dtypes, fmt=self._engine.fmt, eviction=False) is None, "the pool is not full"
        for _ in range(runs):
            begun = time.perf_counter()
            taken = [
                allocate(shapes, dtypes, fmt=self._engine.fmt, busy_loop=False) for _ in range(tokens // CHUNK_TOKENS)
            ]
            times.append(time.perf_counter() - begun)
            assert None not in taken
            self._taken += taken
        return times

    def structure(self, name: str, records: int) -> float:
        """Bytes a cached token of what is kept beside keys and values. Once a process, as `kvcache_worker`."""
        return {"in-process": _in_process, "multiprocess": _multiprocess}[name](records) / (records * CHUNK_TOKENS)

    def files(self) -> list[str]:
        return sorted(map(str, Path(self._directory).glob("*.pt"))) if self._directory else []

    def close(self) -> None:
        for memory in self._taken:
            memory.ref_count_down()
        LMCacheEngineBuilder.destroy(f"comparison-{self._opened}")
        del self._engine
        gc.collect()


def _mend() -> None:
    """Its client in C++ sends a question first and notes who asked afterwards, while another thread takes answers: one
    that comes in between is thrown away, and who asked waits for ever (0.5.6; with two cores, within a few prompts). A
    lock over both steps; without it there would be no figure."""
    from lmcache.v1.storage_backend.native_clients.connector_client_base import ConnectorClientBase as Client

    if hasattr(Client, "mended"):
        return
    begin, ready, lock = Client.__init__, Client._on_ready, threading.Lock()

    class Asking:
        def __init__(self, client: Any) -> None:
            self._client = client

        def __getattr__(self, name: str) -> Any:
            call = getattr(self._client, name)
            if not name.startswith("submit_"):
                return call

            def submit(*arguments: Any) -> Any:
                lock.acquire()
                try:
                    return call(*arguments)
                except BaseException:
                    lock.release()
                    raise

            return submit

    def noted(note: Any) -> Any:
        def register(*arguments: Any) -> Any:
            try:
                return note(*arguments)
            finally:
                lock.release()

        return register

    def answered(client: Any) -> None:
        with lock:
            ready(client)

    Client.__init__ = lambda self, native_client, loop=None: begin(self, Asking(native_client), loop)
    Client._register_future_sync = noted(Client._register_future_sync)
    Client._register_future_async = noted(Client._register_future_async)
    Client._on_ready = answered
    Client.mended = True


def _in_process(chunks: int) -> int:
    layers, heads, dim = LEAST
    config = LMCacheEngineConfig.from_defaults(
        chunk_size=CHUNK_TOKENS, local_cpu=True, max_local_cpu_size=2 * chunks * 4096 / GIB
    )
    backend = LocalCPUBackend(config, metadata(LEAST), "cpu")
    backend.memory_allocator.buffer.zero_()  # resident before, so that it does not count
    gc.collect()
    before = resident_bytes()
    for i in range(chunks):
        memory = backend.allocate(torch.Size([2, layers, 1, heads * dim]), torch.bfloat16, MemoryFormat.KV_2LTD)
        backend.submit_put_task(CacheEngineKey(MODEL, 1, 0, (1 << 62) + i, torch.bfloat16), memory)
        memory.ref_count_down()
    gc.collect()
    return resident_bytes() - before


def _multiprocess(chunks: int) -> int:
    size = 2 * chunks * 4096 + (64 << 20)
    pool = L1MemoryManagerConfig(size_in_bytes=size, use_lazy=False, init_size_in_bytes=size, align_bytes=4096)
    manager = StorageManager(
        StorageManagerConfig(
            l1_manager_config=L1ManagerConfig(memory_config=pool, write_ttl_seconds=600, read_ttl_seconds=300),
            eviction_config=EvictionConfig(eviction_policy="LRU"),
            l2_adapter_config=L2AdaptersConfig([]),
            prefetch_policy="default",
        )
    )
    layout = MemoryLayoutDesc(shapes=[torch.Size([8])], dtypes=[torch.bfloat16])
    rank = ObjectKey.ComputeKVRank(1, 0, 1, 0)
    gc.collect()
    before = resident_bytes()
    for first in range(0, chunks, 1000):
        hashes = [i.to_bytes(32, "big") for i in range(first, min(first + 1000, chunks))]
        keys = [ObjectKey(chunk_hash=each, model_name=MODEL, kv_rank=rank) for each in hashes]
        manager.reserve_write(keys, layout)
        manager.finish_write(keys)
    gc.collect()
    return resident_bytes() - before


def _sync(paths: Sequence[str]) -> None:
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _drop(paths: Sequence[str]) -> None:
    """Out of the page cache, as after a restart of the machine."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


if __name__ == "__main__":
    serve(LMCacheWorker())

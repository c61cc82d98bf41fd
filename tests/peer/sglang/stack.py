"""SGLang's own cache, without a server: device pool, host pool, controller and tree, on the processor."""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

PAGE, TOKENS, LAYERS, HEADS, DIM = 16, 4096, 4, 2, 32


@dataclass
class Stack:
    """One life of it. `extra` goes to the backend; `place` holds what outlives it."""

    place: Any
    layout: str = "page_first_direct"
    io: str = "direct"
    v1: int = 1
    policy: str = "write_through"
    prefetch: str = "wait_complete"
    extra: dict[str, Any] = field(default_factory=dict)
    ours: dict[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.bfloat16
    model: str = "tiny"

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        arguments = self._arguments()
        self.kv = MHATokenToKVPool(TOKENS, PAGE, self.dtype, HEADS, DIM, LAYERS, "cpu", False)
        self.allocator = PagedTokenToKVPoolAllocator(TOKENS, PAGE, self.dtype, "cpu", self.kv, False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=ReqToTokenPool(8, TOKENS, "cpu", False),
            token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE,
            tp_cache_group=torch.distributed.group.WORLD,
            tree_components=(ComponentType.FULL,),
        )
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(arguments, params)

    def _arguments(self) -> Any:
        from sglang.srt.runtime_context import get_context

        nvme = {"path": str(self.place / "nvme"), "capacity_bytes": 64 << 20, "free_floor_bytes": 0}
        ours = {"revision": "1", "host": {"capacity_bytes": 32 << 20}, "nvme": nvme, "control": {"enabled": False}}
        extra = {
            "backend_name": "kvcache",
            "module_path": "kvcache.connector.sglang",
            "class_name": "KVCacheStorage",
            "interface_v1": self.v1,
            "prefetch_threshold": 32,
            "kvcache": ours | self.ours,
        }
        override = get_context().override_server_args(
            model_path=self.model,
            device="cpu",
            page_size=PAGE,
            enable_hierarchical_cache=True,
            hicache_ratio=2.0,
            hicache_mem_layout=self.layout,
            hicache_io_backend=self.io,
            hicache_write_policy=self.policy,
            hicache_storage_backend="dynamic",
            hicache_storage_prefetch_policy=self.prefetch,
            hicache_storage_backend_extra_config=json.dumps(extra | self.extra),
            served_model_name="tiny",
        )
        return override.install()

    @property
    def backend(self) -> Any:
        return self.tree.cache_controller.storage_backend

    def pump(self, until: Callable[[], Any], seconds: float = 20.0) -> None:
        end = time.monotonic() + seconds
        while not until():
            self.tree.check_hicache_events()
            assert time.monotonic() < end, "SGLang's cache did not get there"
            time.sleep(0.002)

    def compute(self, tokens: list[int], seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Fill device pages with the keys and values of these tokens and put them into the tree; what they are."""
        made = torch.Generator().manual_seed(seed)
        return self.put(tokens, torch.randn(LAYERS, 2, len(tokens), HEADS, DIM, generator=made))

    def put(self, tokens: list[int], computed: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """These keys and values, (layer, K and V, token, head, dim), as a request's that has just been computed."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        at = self.allocator.alloc(len(tokens))
        for layer in range(LAYERS):
            for kv, buffers in enumerate((self.kv.k_buffer, self.kv.v_buffer)):
                buffers[layer][at] = computed[layer, kv].to(self.dtype)
        self.tree.insert(InsertParams(key=self.key(tokens), value=at))
        return self.read(at)

    def read(self, at: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(self.kv.k_buffer[i][at].clone(), self.kv.v_buffer[i][at].clone()) for i in range(LAYERS)]

    def key(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.radix_cache import RadixKey

        return RadixKey(array("q", tokens))

    def match(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.tree.match_prefix(MatchPrefixParams(key=self.key(tokens)))

    def prefetch_of(self, tokens: list[int], rid: str = "r") -> int:
        """Ask the backend for these, to the end; tokens that lie in the host pool afterwards."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        handle, found = CacheRequestHandle(rid, 0), self.match(tokens)
        node, known = found.last_host_node, found.device_prefix_len + found.host_hit_length
        told = self.tree.get_prefix_hash_values(node) if self.tree.hicache_storage_pass_prefix_keys else None
        last = self.tree.get_last_hash_value(node) if known else None
        self.tree.prefetch_from_storage(handle, node, array("q", tokens[known:]), last, told)
        self.pump(lambda: self.tree.check_prefetch_progress(handle))
        return int(self.match(tokens).host_hit_length)

    def bring_back(self, tokens: list[int], rid: str = "r") -> list[tuple[torch.Tensor, torch.Tensor]]:
        """From the host pool into device pages; what is there then."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        found = self.match(tokens)
        request = SimpleNamespace(
            rid=rid,
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            host_hit_length=found.host_hit_length,
            kv=SimpleNamespace(mamba_pool_idx=None),
        )
        wanted = InitLoadBackParams(
            best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request
        )
        self.tree.init_load_back(wanted)
        self.tree.ready_to_load_host_cache()
        self.pump(lambda: not self.tree.cache_controller.ack_load_queue)
        found = self.match(tokens)
        return self.read(self.tree.path_device_indices(found.last_device_node)[: found.device_prefix_len])

    def stored(self, pages: int) -> None:
        """Wait until so many pages are in the cache."""
        cache = self.backend.cache
        self.pump(lambda: cache.stats()["tiers"]["host"]["records"] >= pages)
        assert cache.flush(20)

    def close(self) -> None:
        self.tree.shutdown()

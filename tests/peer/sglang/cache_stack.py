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

from tests.peer.sglang.device_pools import PAGE, SIZES, Pools, make


@dataclass
class HiCacheStack:
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
    kind: str = "mha"

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        arguments = self._arguments()
        arguments._mamba_cache_chunk_size = 64  # else it looks for the model
        self.pools = make(self.kind, self.dtype)
        params = params_of(self.pools)
        self.tree = UnifiedRadixCache(params)
        self.tree.init_hicache(arguments, params)

    def _arguments(self) -> Any:
        from sglang.srt.runtime_context import get_context

        nvme = {"path": str(self.place / "nvme"), "capacity_bytes": 64 << 20, "min_free_bytes": 0}
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
            page_size=SIZES.get(self.kind, PAGE),
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

    def compute(self, tokens: list[int], seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
        """Fill device pages with the keys and values of these tokens and put them into the tree; what they are."""
        made = torch.Generator().manual_seed(seed)
        return self.put(tokens, self.pools.random(len(tokens), made))

    def put(self, tokens: list[int], computed: Any) -> list[tuple[torch.Tensor, ...]]:
        """These, by layer and plane (token, head, dim), as a request's that has just been computed."""
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        at = self.pools.alloc(len(tokens))
        self.pools.write(at, computed)
        state = None
        if self.kind == "mamba":
            state = self.pools.requests.mamba_allocator.alloc(1)
            for part in self.pools.extras:
                part[:, state] = torch.randn(part[:, state].shape, generator=torch.Generator().manual_seed(9)).to(
                    part.dtype
                )
        self.tree.insert(InsertParams(key=key_of(tokens), value=at, mamba_value=state))
        return self.pools.read(at)

    def match(self, tokens: list[int]) -> Any:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        return self.tree.match_prefix(MatchPrefixParams(key=key_of(tokens)))

    def run_prefetch(self, tokens: list[int], rid: str = "r") -> int:
        """Ask the backend for these, to the end; tokens that lie in the host pool afterwards."""
        from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle

        handle, found = CacheRequestHandle(rid, 0), self.match(tokens)
        node, known = found.last_host_node, found.device_prefix_len + found.host_hit_length
        told = self.tree.get_prefix_hash_values(node) if self.tree.hicache_storage_pass_prefix_keys else None
        last = self.tree.get_last_hash_value(node) if known else None
        self.tree.prefetch_from_storage(handle, node, array("q", tokens[known:]), last, told)
        self.pump(lambda: self.tree.check_prefetch_progress(handle))
        return int(self.match(tokens).host_hit_length)

    def load_back(self, tokens: list[int], rid: str = "r") -> list[tuple[torch.Tensor, ...]]:
        """From the host pool into device pages; what is there then."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        found = self.match(tokens)
        request = SimpleNamespace(
            rid=rid,
            last_node=found.last_device_node,
            swa_host_hit_length=0,
            mamba_host_hit_length=0,
            host_hit_length=found.host_hit_length,
            kv=SimpleNamespace(mamba_pool_idx=None, holds_mamba=False),
        )
        self.request = request
        wanted = InitLoadBackParams(
            best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request
        )
        self.tree.init_load_back(wanted)
        self.tree.ready_to_load_host_cache()
        self.pump(lambda: not self.tree.cache_controller.ack_load_queue)
        found = self.match(tokens)
        return self.pools.read(self.tree.path_device_indices(found.last_device_node)[: found.device_prefix_len])

    def stored(self, pages: int) -> None:
        """Wait until so many pages are in the cache."""
        cache = self.backend.cache
        self.pump(lambda: cache.stats()["tiers"]["host"]["records"] >= pages)
        assert cache.flush(20)

    def close(self) -> None:
        self.tree.shutdown()


@dataclass
class LinkerStack:
    """SGLang's tree over our linker: device pools and nothing of its own below."""

    place: Any
    kind: str = "mha"
    dtype: torch.dtype = torch.bfloat16
    ours: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        self.pools = make(self.kind, self.dtype)
        self.tree = UnifiedRadixCache(params_of(self.pools))
        self.linker = make_linker(self.place, self.pools, **{"lookup_wait_s": 4.0} | self.ours)
        self.tree.init_cache_linker(self.linker)

    def compute(self, tokens: list[int], seed: int = 0) -> list[tuple[torch.Tensor, ...]]:
        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        made = torch.Generator().manual_seed(seed)
        at = self.pools.alloc(len(tokens))
        self.pools.write(at, self.pools.random(len(tokens), made))
        self.tree.insert(InsertParams(key=key_of(tokens), value=at))
        end = time.monotonic() + 30
        while self.tree.linker.pending_offloads:
            self.tree.check_hicache_events()
            assert time.monotonic() < end, "the offload did not end"
            time.sleep(0.002)
        return self.pools.read(at)

    def found(self, tokens: list[int], rid: str = "r") -> tuple[int, Any]:
        """Tokens that the linker promises, and the request as SGLang's scheduler has it."""
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams

        request = SimpleNamespace(
            rid=rid,
            session=None,
            last_node=None,
            kv=None,
            swa_branching_seqlen=None,
            extra_key=None,
        )
        result = self.tree.match_prefix(MatchPrefixParams(key=key_of(tokens), req=request))
        request.last_node, request.result = result.last_device_node, result
        return int(result.host_hit_length), request

    def load(self, request: Any) -> list[tuple[torch.Tensor, ...]] | None:
        """What lies in the request's pages then; nothing where it was refused and is computed, None where SGLang would
        answer with an error."""
        from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

        found = request.result
        wanted = InitLoadBackParams(
            best_match_node=found.best_match_node, host_hit_length=found.host_hit_length, req=request
        )
        count, _ = self.tree.init_load_back(wanted)
        at = self.tree.linker.private_load_indices.get(request.rid)
        self.tree.ready_to_load_host_cache()
        if self.tree.linker.finish_loads():
            return None
        if at is None:
            assert count == 0
            return []
        assert len(at) == count
        loaded = self.pools.read(at)
        self.pools.allocator.free(at)
        return loaded

    def close(self) -> None:
        assert self.linker.cache.flush(20)
        assert self.linker.cache.check() == []
        self.linker.close()


def key_of(tokens: list[int]) -> Any:
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", tokens))


def params_of(pools: Pools) -> Any:
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

    return CacheInitParams(
        disable=False,
        req_to_token_pool=pools.requests,
        token_to_kv_pool_allocator=pools.allocator,
        page_size=pools.page,
        tp_cache_group=torch.distributed.group.WORLD,
        tree_components=pools.components,
        sliding_window_size=pools.window,
    )


def make_linker(place: Any, pools: Pools, *, params: Any = None, **ours: Any) -> Any:
    from sglang.srt.runtime_context import get_context

    from kvcache.connector.sglang import KVCacheLinker

    served = get_context().override_server_args(model_path="tiny", device="cpu", page_size=pools.page).install()
    nvme = {"path": str(place / "nvme"), "capacity_bytes": 64 << 20, "min_free_bytes": 0}
    given = {"revision": "1", "host": {"capacity_bytes": 32 << 20}, "nvme": nvme, "control": {"enabled": False}}
    return KVCacheLinker(
        served, params or params_of(pools), components=set(pools.components), extra_config={"kvcache": given | ours}
    )

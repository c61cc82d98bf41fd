"""SGLang's own pools of device memory on a processor, for models of several kinds, and what lies in their pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

PAGE, TOKENS, LAYERS, HEADS, DIM, LATENT, ROPE, WINDOW = 16, 4096, 4, 2, 32, 48, 16, 64
SIZES = {"dsa": 64, "mamba": 1}
"""Tokens of a page, where SGLang wants others than `PAGE`."""


@dataclass
class Pools:
    """`planes`: by layer of the model its buffers, each (tokens, heads, dim), and whether they are of a window."""

    kv: Any
    allocator: Any
    components: tuple[Any, ...]
    planes: list[tuple[list[torch.Tensor], bool]]
    window: int | None = None
    requests: Any = None
    page: int = PAGE
    extras: tuple[torch.Tensor, ...] = ()
    """Of an indexer each layer's buffer, (page, bytes); of states each part, (layer, slot, ...)."""

    def alloc(self, tokens: int) -> torch.Tensor:
        if self.window is None:
            return self.allocator.alloc(tokens)
        full = self.allocator.full_attn_allocator.alloc(tokens)
        self.allocator.set_full_to_swa_mapping(full, self.allocator.swa_attn_allocator.alloc(tokens))
        return full

    def rows(self, at: torch.Tensor, windowed: bool) -> torch.Tensor:
        return self.allocator.full_to_swa_index_mapping[at] if windowed else at

    def random(self, tokens: int, made: torch.Generator) -> list[list[torch.Tensor]]:
        """By layer and plane (tokens, heads, dim)."""
        return [
            [torch.randn(tokens, *buffer.shape[1:], generator=made) for buffer in buffers] for buffers, _ in self.planes
        ]

    def write(self, at: torch.Tensor, computed: Any) -> None:
        """The like of these at these places."""
        for (buffers, windowed), values in zip(self.planes, computed, strict=True):
            for buffer, value in zip(buffers, values, strict=True):
                buffer[self.rows(at, windowed)] = value.to(buffer.dtype)

    def read(self, at: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
        """The same, of a window only its last tokens."""
        read = []
        for buffers, windowed in self.planes:
            wanted = at[-self.window :] if windowed and self.window is not None else at
            read.append(tuple(buffer[self.rows(wanted, windowed)].clone() for buffer in buffers))
        return read


def make(kind: str, dtype: torch.dtype) -> Pools:
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    requests = ReqToTokenPool(8, TOKENS, "cpu", False)
    if kind == "swa":
        swa = SWAKVPool(TOKENS, TOKENS // 2, PAGE, dtype, HEADS, DIM, [0, 2], [1, 3], "cpu")
        allocator = SWATokenToKVPoolAllocator(TOKENS, TOKENS // 2, PAGE, dtype, "cpu", swa, False)
        planes = []
        for layer in range(LAYERS):
            number, windowed = swa.layers_mapping[layer]
            of = swa.swa_kv_pool if windowed else swa.full_kv_pool
            planes.append(([of.k_buffer[number], of.v_buffer[number]], windowed))
        return Pools(swa, allocator, (ComponentType.FULL, ComponentType.SWA), planes, WINDOW, requests)
    if kind.startswith("mamba"):
        return _mamba(dtype, latent=kind == "mamba")
    page = SIZES.get(kind, PAGE)
    if kind == "dsa":
        kv: Any = DSATokenToKVPool(
            TOKENS,
            page,
            kv_lora_rank=LATENT,
            dtype=dtype,
            qk_rope_head_dim=ROPE,
            layer_num=LAYERS,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            kv_cache_dim=LATENT + ROPE,
        )
        planes = [([kv.kv_buffer[layer]], False) for layer in range(LAYERS)]
    elif kind == "mla":
        kv = MLATokenToKVPool(TOKENS, PAGE, dtype, LATENT, ROPE, LAYERS, "cpu", False)
        planes = [([kv.kv_buffer[layer]], False) for layer in range(LAYERS)]
    else:
        kv = MHATokenToKVPool(TOKENS, PAGE, dtype, HEADS, DIM, LAYERS, "cpu", False)
        planes = [([kv.k_buffer[layer], kv.v_buffer[layer]], False) for layer in range(LAYERS)]
    allocator = PagedTokenToKVPoolAllocator(TOKENS, page, dtype, "cpu", kv, False)
    extras = tuple(getattr(kv, "index_k_with_scale_buffer", ()))
    return Pools(kv, allocator, (ComponentType.FULL,), planes, None, requests, page, extras)


def _mamba(dtype: torch.dtype, *, latent: bool) -> Pools:
    """States in two layers, latents or keys and values in the other two."""
    from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool
    from sglang.srt.mem_cache.unified_cache.components import ComponentType

    page = SIZES["mamba"]
    shape = Mamba2StateShape.create(
        tp_world_size=1,
        intermediate_size=64,
        n_groups=1,
        num_heads=2,
        head_dim=32,
        state_size=16,
        conv_kernel=4,
    )
    requests = HybridReqToTokenPool(
        size=8,
        mamba_size=16,
        mamba_spec_state_size=8,
        max_context_len=TOKENS,
        device="cpu",
        enable_memory_saver=False,
        cache_params=Mamba2CacheParams(shape=shape, layers=[0, 2]),
        mamba_layer_ids=[0, 2],
        enable_mamba_extra_buffer=False,
    )
    kv = HybridLinearKVPool(
        TOKENS,
        dtype,
        page,
        1,
        DIM,
        [1, 3],
        "cpu",
        requests.mamba_pool,
        use_mla=latent,
        kv_lora_rank=LATENT,
        qk_rope_head_dim=ROPE,
    )
    allocator = PagedTokenToKVPoolAllocator(TOKENS, page, dtype, "cpu", kv, False)
    full = kv.full_kv_pool
    by_layer = [[buffer] for buffer in full.kv_buffer] if latent else zip(full.k_buffer, full.v_buffer, strict=True)
    planes = [(list(buffers), False) for buffers in by_layer]
    cache = requests.mamba_pool.mamba_cache
    states = (*cache.conv, cache.temporal)
    return Pools(kv, allocator, (ComponentType.FULL, ComponentType.MAMBA), planes, None, requests, page, states)

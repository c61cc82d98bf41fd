"""Describes SGLang's own pools of device memory: which pools a model has, and where their pages are.

A pool of keys and values has one tensor for K and one for V a layer. It is described in the order that all engines
read. Other pools that SGLang can describe for its own linkers (states, indexers, compressed pools) are opaque pieces.
Any other pool is refused, since a page that lacks a part gives wrong answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.block.layout import Group, KVLayout, Shard
from kvcache.connector.sglang.host_pools import DTYPES, PoolLayout, Ranks, opaque_groups
from kvcache.errors import LayoutError
from kvcache.transfer.pages import GroupPages

KV, SWA = "kv", "swa"
_PLAIN_POOL_CLASSES = ("MHATokenToKVPool", "MLATokenToKVPool")


@dataclass(frozen=True, slots=True)
class DevicePool:
    """One pool. `source` names the SGLang transfer that has its places; `translate` maps them to this pool."""

    name: str
    source: str
    described: PoolLayout
    layers: Mapping[int, int]
    """Layer of the model: layer of the pool, where its layers arrive one by one."""
    translate: Callable[[Any], Any]
    form: str
    """What its bytes are, where the layout does not say."""


@dataclass(frozen=True, slots=True)
class DevicePools:
    all: tuple[DevicePool, ...]
    layers: int
    """Number of layers of the model, as SGLang waits for them."""
    replicated: bool
    """Whether each rank has the same pages; then only the first rank stores."""


def device_pools(params: Any, components: Sequence[Any], ranks: Ranks) -> DevicePools:
    """Return the pools; LayoutError for a model with a pool that cannot be described."""
    pool, tokens = params.token_to_kv_pool_allocator.get_kvcache(), params.page_size
    kinds = {str(component.name) for component in components} or {"FULL"}
    drafts = [n for n in ("mtp_draft_device_pools", "sidecar_draft_device_pools") if getattr(params, n, None)]
    if not drafts and kinds == {"FULL"} and type(pool).__name__ in _PLAIN_POOL_CLASSES:
        replicated = type(pool).__name__ == "MLATokenToKVPool"
        described = describe_device(pool, tokens, ranks)
        layers = described.shards[0].layers
        only = DevicePool(KV, KV, described, {i: i for i in range(layers)}, _same, "")
        return DevicePools((only,), layers, replicated)
    windows = getattr(pool, "swa_kv_pool", None)
    if not drafts and kinds == {"FULL", "SWA"} and type(pool).__name__ == "SWAKVPool":
        parts = ((KV, pool.full_kv_pool, False), (SWA, windows, True))
        pools = []
        for name, part, swa in parts:
            if type(part).__name__ != _PLAIN_POOL_CLASSES[0]:
                raise LayoutError(f"SWAKVPool of {type(part).__name__}: expected two of {_PLAIN_POOL_CLASSES[0]}")
            own = {layer: at for layer, (at, is_swa) in pool.layers_mapping.items() if is_swa is swa}
            pools.append(DevicePool(name, name, describe_device(part, tokens, ranks), own, _same, ""))
        return DevicePools(tuple(pools), pool.layer_num, False)
    return _pools_of_linker(pool, params, components, ranks)


def describe_device(pool: Any, page_tokens: int, ranks: Ranks) -> PoolLayout:
    """Describe a pool; LayoutError where its layers differ, or it holds something else than keys and values."""
    planes = [list(getattr(pool, name, None) or ()) for name in ("k_buffer", "v_buffer")]
    mha = all(planes)
    if not mha:
        planes = [list(getattr(pool, "kv_buffer", None) or ())]
    if not all(planes):
        raise LayoutError(f"{type(pool).__name__}: no buffers by layer; use the storage backend with this model")
    if any(getattr(pool, name, None) is not None for name in ("k_scale_buffer", "native_k_scale_buffer")):
        raise LayoutError(f"{type(pool).__name__} has scales beside its keys; use the storage backend with this model")
    first = planes[0][0]
    alike = {(tuple(t.shape), t.stride(), t.dtype, t.device) for plane in planes for t in plane}
    if len(alike) != 1 or str(first.dtype) not in DTYPES or first.ndim != 3 or first.stride(2) != 1:
        raise LayoutError(
            f"{type(pool).__name__}: buffers {sorted(map(str, alike))[:2]}; expected (tokens, heads, dim) alike"
        )
    layers, heads, dim, item = len(planes[0]), int(first.shape[1]), int(first.shape[2]), first.element_size()
    group = Group(
        layers=layers * ranks.pp_size,
        kv_heads=heads * ranks.tp_size if mha else 1,
        head_dim=dim,
        dtype=DTYPES[str(first.dtype)],
        kind="mha" if mha else "mla",
    )
    first_head, first_layer = (heads * ranks.tp_rank if mha else 0), layers * ranks.pp_rank
    shard = Shard(first_layer, first_layer + layers, first_head, first_head + heads)
    layout = KVLayout((group,), page_tokens)
    pages = GroupPages(
        layout=layout,
        group=0,
        shard=shard,
        bases=np.array([[plane[layer].data_ptr() for plane in planes] for layer in range(layers)], np.uint64),
        pages=int(first.shape[0]) // page_tokens,
        page_stride=int(first.stride(0)) * item * page_tokens,
        token_stride=int(first.stride(0)) * item,
        head_stride=int(first.stride(1)) * item if mha else 0,
        device=str(first.device),
        owner=planes,
    )
    return PoolLayout(layout, (shard,), (pages,), page_tokens, pool)


def _pools_of_linker(pool: Any, params: Any, components: Sequence[Any], ranks: Ranks) -> DevicePools:
    """Return the pools as SGLang assembles them for its own linkers; LayoutError with its reason where it refuses."""
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import resolve_hybrid_device_pool_group

    try:
        group = resolve_hybrid_device_pool_group(
            kvcache=pool, page_size=params.page_size, params=params, components=set(components)
        )
    except (ValueError, AssertionError, AttributeError) as error:
        raise LayoutError(f"{type(pool).__name__}: {error}; use the storage backend with this model") from None
    ranks = Ranks() if group.rank_replicated else ranks
    return DevicePools(
        tuple(_entry(entry, params.page_size, ranks) for entry in group.entries),
        group.num_layers,
        bool(group.rank_replicated),
    )


def _entry(entry: Any, block_tokens: int, ranks: Ranks) -> DevicePool:
    """Describe the pieces of pages of an SGLang entry: several components with one buffer a layer."""
    pieces, pages = [], set()
    form = [type(entry.device_pool).__name__, *(f"{c[0].dtype} {tuple(c[0].shape[1:])}" for c in entry.components)]
    for buffers, described in zip(entry.components, entry.buffer_meta, strict=True):
        for buffer, (base, row_step, size) in zip(buffers, described, strict=True):
            rows = size * int(buffer.shape[0]) // int(buffer.nbytes)
            if rows > 1 and row_step * rows != size:
                raise LayoutError(f"pool {entry.name}: the bytes of a page are not contiguous")
            pieces.append((int(base), int(size), int(row_step) * rows))
            pages.add(int(buffer.shape[0]) // rows)
    described = opaque_groups(pieces, min(pages), block_tokens, ranks, entry, device=str(entry.components[0][0].device))
    # SGLang's transfers count pages in tokens; each slot of a state counts as one.
    described = PoolLayout(described.layout, described.shards, described.pages, int(entry.page_size), entry)
    source = str(entry.indices_from_pool)
    return DevicePool(str(entry.name), source, described, {}, entry.translate_indices, " ".join(form))


def _same(places: Any) -> Any:
    return places

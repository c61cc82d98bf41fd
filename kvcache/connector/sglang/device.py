"""SGLang's own pool of device memory, a tensor for K and one for V a layer: in the order that all engines read."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.block.layout import Group, KVLayout, Shard
from kvcache.connector.sglang.pool import DTYPES, Described, Ranks
from kvcache.errors import LayoutError
from kvcache.transfer.pages import GroupPages


def describe_device(pool: Any, page_tokens: int, ranks: Ranks) -> Described:
    """LayoutError for a pool whose layers are not alike, or that holds something else than keys and values."""
    planes = [list(getattr(pool, name, None) or ()) for name in ("k_buffer", "v_buffer")]
    mha = all(planes)
    if not mha:
        planes = [list(getattr(pool, "kv_buffer", None) or ())]
    if not all(planes):
        raise LayoutError(f"{type(pool).__name__}: no buffers by layer; use the storage backend with this model")
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
    there = GroupPages(
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
    return Described(layout, (shard,), (there,), page_tokens, pool)

"""Describes SGLang's pools of host memory: their layout, and where their pages are.

    layout               page of an MHA pool                order
    layer_first          [K, V][layer] of a page's tokens   kv, layer, token, head, dim
    page_first           [K, V] of [token][layer]           kv, token, layer, head, dim
    page_first_direct    [K, V] of [layer][token]           kv, layer, token, head, dim
    page_head            [K, V] of [head][token][layer]     kv, head, token, layer, dim

An MLA pool has the same orders without K, V and heads. A pool of another kind is described by the pieces of its pages.
They are opaque, and only that kind of pool can read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from kvcache.block.layout import CANONICAL_ORDERS, Group, KVLayout, Shard
from kvcache.errors import LayoutError
from kvcache.transfer.pages import GroupPages

MHA_ORDERS: Mapping[str, tuple[str, ...]] = {
    "layer_first": ("kv", "layer", "token", "head", "dim"),
    "page_first": ("kv", "token", "layer", "head", "dim"),
    "page_first_direct": ("kv", "layer", "token", "head", "dim"),
    "page_head": ("kv", "head", "token", "layer", "dim"),
}
"""Axes of a page, outermost first; SGLang's flat pages have the same."""

MLA_ORDERS: Mapping[str, tuple[str, ...]] = {
    name: tuple("latent" if axis == "dim" else axis for axis in order if axis not in {"kv", "head"})
    for name, order in MHA_ORDERS.items()
    if name != "page_head"
}
DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The rank of this process among those that hold one model."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1

    @property
    def alone(self) -> bool:
        return self.tp_size * self.pp_size == 1


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """A pool: the layout of all ranks together, this rank's shard of each group, and its pages."""

    layout: KVLayout
    shards: tuple[Shard, ...]
    pages: tuple[GroupPages, ...]
    page_tokens: int
    owner: Any

    @property
    def page_bytes(self) -> int:
        return sum(pages.block_bytes for pages in self.pages)

    def flat(self, memory: Any, count: int) -> list[GroupPages]:
        """Return `count` of SGLang's flat pages, one after the other in `memory`; a page is the payload itself."""
        [pages] = self.pages
        shard, step = pages.shard, self.layout.strides(pages.shard)
        first = int(memory.data_ptr())
        layers = first + np.arange(shard.layers, dtype=np.uint64)[:, None] * np.uint64(step["layer"])
        planes = layers + np.arange(pages.bases.shape[1], dtype=np.uint64) * np.uint64(step.get("kv", 0))
        return [
            GroupPages(
                layout=self.layout,
                group=0,
                shard=shard,
                bases=planes.astype(np.uint64),
                pages=count,
                page_stride=pages.block_bytes,
                token_stride=step["token"],
                head_stride=step.get("head", 0),
                owner=memory,
            )
        ]


def is_logical(pool: Any) -> bool:
    """Return whether the pool has no memory of its own, and only counts pages of other pools."""
    return getattr(pool, "kv_buffer", None) is None and _query(pool, pool.get_page_buffer_element_size) is None


def describe_pool(pool: Any, ranks: Ranks, *, canonical: bool = False) -> PoolLayout:
    """Describe a pool, in its own order or in the order that engines share; LayoutError where that is not possible."""
    kind = type(pool).__name__
    if kind == "MHATokenToKVPoolHost" and pool.layout in MHA_ORDERS and str(pool.dtype) in DTYPES:
        return _attention(pool, ranks, "mha", MHA_ORDERS[pool.layout], canonical)
    if kind == "MLATokenToKVPoolHost" and pool.layout in MLA_ORDERS and str(pool.dtype) in DTYPES:
        return _attention(pool, ranks, "mla", MLA_ORDERS[pool.layout], canonical)
    if canonical:
        raise LayoutError(
            f"{kind} in {pool.layout}, {pool.dtype}: other engines cannot read it; set share_across_engines = false"
        )
    return _opaque(pool, ranks)


def _attention(pool: Any, ranks: Ranks, kind: Any, order: tuple[str, ...], canonical: bool) -> PoolLayout:
    mha = kind == "mha"
    heads, dim, tokens = (
        (pool.head_num, pool.head_dim, pool.page_size) if mha else (1, pool.kv_cache_dim, pool.page_size)
    )
    group = Group(
        layers=pool.layer_num * ranks.pp_size,
        kv_heads=heads * ranks.tp_size if mha else 1,
        head_dim=dim,
        dtype=DTYPES[str(pool.dtype)],
        kind=kind,
        order=CANONICAL_ORDERS[kind] if canonical else order,
    )
    first_head = heads * ranks.tp_rank if mha else 0
    first_layer = pool.layer_num * ranks.pp_rank
    shard = Shard(first_layer, first_layer + pool.layer_num, first_head, first_head + heads)
    layout = KVLayout((group,), tokens)
    extent = {"kv": 2, "layer": pool.layer_num, "token": tokens, "head": heads, "dim": dim, "latent": dim}
    item = pool.dtype.itemsize
    axes = [axis for axis in order if axis != "kv"]  # K and V are half the pool apart
    if pool.layout == "layer_first":
        plane = tokens * heads * dim * item
        step = {"layer": pool.size * heads * dim * item, "token": heads * dim * item, "head": dim * item}
    else:
        plane = prod(extent[axis] for axis in axes) * item
        step = {axis: item * prod(extent[after] for after in axes[i + 1 :]) for i, axis in enumerate(axes)}
    base = int(pool.kv_buffer.data_ptr())
    planes = [int(pool.kv_buffer[kv].data_ptr()) for kv in range(2)] if mha else [base]
    pages = GroupPages(
        layout=layout,
        group=0,
        shard=shard,
        bases=np.array(
            [[plane + layer * step["layer"] for plane in planes] for layer in range(pool.layer_num)], np.uint64
        ),
        pages=pool.page_num,
        page_stride=plane,
        token_stride=step["token"],
        head_stride=step.get("head", 0) if mha else 0,
        owner=pool.kv_buffer,
    )
    return PoolLayout(layout, (shard,), (pages,), tokens, pool)


def _opaque(pool: Any, ranks: Ranks) -> PoolLayout:
    """Describe a pool by the pieces of its pages. Pieces of one size and one distance between pages form a group with
    one layer each."""
    first, second, last = (_pieces(pool, page) for page in (0, 1, pool.page_num - 1))
    steps = [later - earlier for (earlier, _), (later, _) in zip(first, second, strict=True)]
    expected = [
        (address + (pool.page_num - 1) * step, size) for (address, size), step in zip(first, steps, strict=True)
    ]
    if expected != last:
        raise LayoutError(f"{type(pool).__name__} in {pool.layout}: expected pages at equal distances")
    pieces = [(address, size, step) for (address, size), step in zip(first, steps, strict=True)]
    return opaque_groups(pieces, pool.page_num, pool.page_size, ranks, pool)


def opaque_groups(
    pieces: Sequence[tuple[int, int, int]],
    count: int,
    page_tokens: int,
    ranks: Ranks,
    owner: Any,
    *,
    device: str = "cpu",
) -> PoolLayout:
    """Return the layout of `count` pages, from the pieces of the first: address, bytes, distance to the next page's."""
    alike: dict[tuple[int, int], list[int]] = {}  # (size, step): addresses of the pieces of page 0
    for address, size, step in pieces:
        alike.setdefault((size, step), []).append(address)
    all_ranks, mine = ranks.tp_size * ranks.pp_size, ranks.pp_rank * ranks.tp_size + ranks.tp_rank
    layout = KVLayout(
        tuple(
            Group(kind="opaque", layers=len(bases), kv_heads=all_ranks, opaque_bytes=size * all_ranks, name=f"part {g}")
            for g, ((size, _), bases) in enumerate(alike.items())
        ),
        page_tokens,
    )
    shards = tuple(Shard(0, len(bases), mine, mine + 1) for bases in alike.values())
    pages = tuple(
        GroupPages(
            layout=layout,
            group=g,
            shard=shards[g],
            bases=np.array(bases, np.uint64)[:, None],
            pages=count,
            page_stride=step,
            token_stride=0,
            head_stride=0,
            device=device,
            owner=owner,
        )
        for g, ((_, step), bases) in enumerate(alike.items())
    )
    return PoolLayout(layout, shards, pages, page_tokens, owner)


def _pieces(pool: Any, page: int) -> list[tuple[int, int]]:
    """Return address and size of each piece of a page."""
    import torch

    tokens = torch.arange(page * pool.page_size, (page + 1) * pool.page_size, dtype=torch.int64)
    reported = _query(pool, pool.get_page_buffer_meta, tokens)
    if not reported or not reported[0]:
        raise LayoutError(f"{type(pool).__name__}: it does not describe its pages")
    return list(zip(map(int, reported[0]), map(int, reported[1]), strict=True))


def _query(pool: Any, ask: Callable[..., Any], *arguments: Any) -> Any:
    """Return the pool's answer about its pages; LayoutError where it has none in this layout."""
    try:
        return ask(*arguments)
    except ValueError as error:
        raise LayoutError(
            f"{type(pool).__name__}: {error}; expected a layout with page addresses, "
            "--hicache-mem-layout page_first or page_first_direct"
        ) from None

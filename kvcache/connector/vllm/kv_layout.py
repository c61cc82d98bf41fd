"""Describes the tensors that vLLM registers as groups of a `KVLayout`, from shapes and strides, not from vLLM's
version.

Known forms of a layer's cache:

    [B, H, N, C]      blocks, heads, tokens, K then V of a token (or one latent, with H = 1), in any physical order
    [2, B, N, H, D]   K apart from V; or [B, 2, N, H, D]; H and N the other way round
    [B, N, C]         a latent

On a CPU vLLM packs the bytes of one block and head for the instruction set. Such a block is opaque: it is copied whole,
and the namespace names the packing. A dense block of an unknown form is opaque too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from typing import Any

import numpy as np

from kvcache.block.layout import CachingRule, Group, GroupKind, KVLayout, Shard
from kvcache.cache.api import KVCache, NamespaceHandle
from kvcache.connector.vllm.identity import NamespaceKey
from kvcache.errors import LayoutError
from kvcache.transfer.pages import GroupPages

_DTYPES = {
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
    "torch.float32": "fp32",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLayout:
    """One layer's cache on this rank; steps in bytes."""

    kind: GroupKind
    kv_heads: int
    head_dim: int = 0
    dtype: str = "bf16"
    order: tuple[str, ...] = ()
    opaque_bytes: int = 0  # of one block
    packing: str = "plain"
    page_step: int
    token_step: int = 0
    head_step: int = 0
    kv_step: int = 0


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one of vLLM's groups that look alike: one group of our layout, as this rank holds it."""

    vllm_group: int  # index of vLLM's group
    layers: tuple[str, ...]
    rule: CachingRule
    window_tokens: int
    block_tokens: int
    layer_layout: LayerLayout


def describe_layers(
    caches: Mapping[str, Any], groups: Sequence[Any], blocks: int, *, packing: str
) -> tuple[LayerGroup, ...]:
    """Return the layer groups of a rank.

    Args:
        groups: vLLM's groups.
        blocks: number of blocks of each layer.
        packing: name of the code that packs blocks on a CPU.

    Raises:
        LayoutError: the caches cannot be cached; the message says why.
    """
    shapes = []
    for g, group in enumerate(groups):
        names = [name for name in group.layer_names if name in caches]
        specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        alike = []
        for name in names:
            spec = specs.get(name, group.kv_cache_spec)
            alike.append(((*_rule(spec), spec.block_size, _layer_layout(caches[name], spec, blocks, packing)), name))
        for (rule, window, block_tokens, layer_layout), members in groupby(alike, key=lambda pair: pair[0]):
            shapes.append(LayerGroup(g, tuple(name for _, name in members), rule, window, block_tokens, layer_layout))
    if not shapes:
        raise LayoutError("no layer has keys and values that can be cached")
    sizes = {shape.block_tokens for shape in shapes}
    if len(sizes) > 1:
        raise LayoutError(f"groups with blocks of {sorted(sizes)} tokens: expected one size")
    return tuple(shapes)


def pages_of(
    shape: LayerGroup, caches: Mapping[str, Any], blocks: int, layout: KVLayout, group: int, shard: Shard
) -> GroupPages:
    """Return the pages on this rank of a layer group, which is group `group` of the layout."""
    tensors = [caches[name] for name in shape.layers]
    parts = (0, shape.layer_layout.kv_step) if shape.layer_layout.kind == "mha" else (0,)
    return GroupPages(
        layout=layout,
        group=group,
        shard=shard,
        bases=np.array([[t.data_ptr() + part for part in parts] for t in tensors], np.uint64),
        pages=blocks,
        page_stride=shape.layer_layout.page_step,
        token_stride=shape.layer_layout.token_step,
        head_stride=shape.layer_layout.head_step,
        device=str(tensors[0].device),
        owner=tuple(tensors),
    )


def _rule(spec: Any) -> tuple[CachingRule, int]:
    """Return which blocks of a prefix a group needs; LayoutError for a group that blocks cannot restore."""
    name = type(spec).__name__
    for part in ("Mamba", "ChunkedLocal", "CrossAttention", "HiSparse", "CircularBuffer", "RSWA", "HiddenState"):
        if part in name:
            raise LayoutError(f"layers of kind {name} are not cached: their state does not consist of whole blocks")
    if not getattr(spec, "prefix_cacheable", True) or getattr(spec, "tokens_per_state", 1) != 1:
        raise LayoutError(f"layers of kind {name} are not cached by prefix")
    if getattr(getattr(spec, "kv_quant_mode", None), "is_per_token_head", False):
        raise LayoutError(f"layers of kind {name}: scales per token and head would not be stored with the blocks")
    if "SlidingWindow" in name:  # the next token sees itself, so one token less before it
        return "window", max(1, spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0))
    return "all", 0


def _layer_layout(tensor: Any, spec: Any, blocks: int, packing: str) -> LayerLayout:
    item = tensor.element_size()
    dtype = _DTYPES.get(str(tensor.dtype), "")
    latent = "MLA" in type(spec).__name__
    steps = [step * item for step in tensor.stride()]
    dims, size = tensor.dim(), tuple(tensor.shape)
    of_block = size[0] == blocks and steps[-1] == item and bool(dtype)
    if latent and of_block and (dims == 3 or (dims == 4 and size[1] == 1)):
        return LayerLayout(
            kind="mla", kv_heads=1, head_dim=size[-1], dtype=dtype, page_step=steps[0], token_step=steps[-2]
        )
    if tensor.device.type != "cpu" and not latent:
        heads, tokens, dim = spec.num_kv_heads, spec.block_size, spec.head_size
        if dims == 4 and of_block and size[1:] == (heads, tokens, 2 * dim):
            return _plain(heads, dim, dtype, steps[0], steps[2], steps[1], dim * item)
        if dims == 5 and bool(dtype) and steps[-1] == item and {size[0], size[1]} == {2, blocks} and size[4] == dim:
            page, kv = (0, 1) if size[1] == 2 else (1, 0)
            if size[2:4] in {(tokens, heads), (heads, tokens)} and heads != tokens:
                token, head = (2, 3) if size[2] == tokens else (3, 2)
                return _plain(heads, dim, dtype, steps[page], steps[token], steps[head], steps[kv])
    return _opaque(tensor, spec, blocks, packing)


def _plain(heads: int, dim: int, dtype: str, page: int, token: int, head: int, kv: int) -> LayerLayout:
    """Describe keys and values. The payload has the axes in the page's own order, so that the copy is a plain one."""
    apart = sorted((("token", token), ("head", head), ("kv", kv)), key=lambda axis: -axis[1])
    return LayerLayout(
        kind="mha",
        kv_heads=heads,
        head_dim=dim,
        dtype=dtype,
        order=("layer", *(name for name, _ in apart), "dim"),
        page_step=page,
        token_step=token,
        head_step=head,
        kv_step=kv,
    )


def _opaque(tensor: Any, spec: Any, blocks: int, packing: str) -> LayerLayout:
    """Describe a block that is copied whole; LayoutError where its bytes do not lie together."""
    item, size, steps = tensor.element_size(), tuple(tensor.shape), tensor.stride()
    elements = prod(size[1:])
    pieces = size[0] // blocks if size[0] % blocks == 0 else 0  # vLLM may cut a block into several for its kernels
    reach = 1 + sum((n - 1) * step for n, step in zip(size[1:], steps[1:], strict=True))
    if not pieces or reach != elements or (pieces > 1 and steps[0] != elements):
        raise LayoutError(
            f"a cache of shape {size} and strides {tuple(steps)} in {blocks} blocks: the bytes of a block do not lie "
            "together, and nothing says which are keys; this layer cannot be cached"
        )
    split = pieces == 1 and len(size) == 4 and size[1] == getattr(spec, "num_kv_heads", 0)
    return LayerLayout(
        kind="opaque",
        kv_heads=size[1] if split and steps[1] == prod(size[2:]) else 1,
        dtype=_DTYPES.get(str(tensor.dtype), "bf16"),
        opaque_bytes=elements * pieces * item,
        packing=f"{packing} {tensor.dtype} {size[1:]}" + (f" x {pieces}" if pieces > 1 else ""),
        page_step=steps[0] * item * pieces,
    )


# The whole model, combined from the reports of all ranks, and the namespaces bound to it.

Rank = tuple[int, int]
"""Pipeline rank, tensor rank."""


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """The layout of all ranks together, the facts that identify the model's blocks, and the shards of each rank."""

    name: str
    revision: str
    facts: Mapping[str, Any]
    layout: KVLayout
    shards: Mapping[Rank, tuple[Shard, ...]]
    vllm_groups: tuple[int, ...]  # by group of the layout: index of vLLM's group

    @property
    def block_bytes(self) -> int:
        return sum(self.layout.block_bytes(group=g) for g in range(len(self.layout.groups)))

    def bind(self, cache: KVCache, namespace_key: NamespaceKey, rank: Rank | None = None) -> NamespaceHandle:
        """Bind a namespace. `rank` selects the part of the blocks that this process holds; None selects all of them."""
        return cache.namespace(
            self.layout,
            model=self.name,
            revision=self.revision,
            adapter=namespace_key.adapter,
            tenant=namespace_key.tenant,
            cache_salt=namespace_key.salt,
            facts={**self.facts, "since": namespace_key.epoch} if namespace_key.epoch else self.facts,
            shards=None if rank is None else self.shards[rank],
            ranks=[self.shards[at] for at in sorted(self.shards)],
        )


def combine_ranks(
    ranks: Mapping[Rank, tuple[LayerGroup, ...]], *, replicas: int = 1
) -> tuple[KVLayout, dict[Rank, tuple[Shard, ...]], tuple[int, ...], list[str]]:
    """Combine the layer groups of all ranks.

    Args:
        replicas: consecutive tensor ranks that hold the same heads.

    Returns:
        Layout, shards by rank, vLLM's group of each of our groups, and the packing of each group.

    Raises:
        LayoutError: the ranks do not fit together.
    """
    stages = sorted({stage for stage, _ in ranks})
    width = len({tensor for _, tensor in ranks})
    first = ranks[stages[0], 0]
    groups, shards = [], {rank: [] for rank in ranks}  # type: ignore[var-annotated]  # the return type says it
    for g, shape in enumerate(first):
        parts = 1 if shape.layer_layout.kind == "mla" else width // replicas
        layer = 0
        for stage in stages:
            layers = len(ranks[stage, 0][g].layers) if g < len(ranks[stage, 0]) else 0
            for (at, tensor), shapes in ranks.items():
                if at != stage:
                    continue
                if len(shapes) != len(first) or not _alike(shapes[g], shape) or len(shapes[g].layers) != layers:
                    raise LayoutError(f"rank {(at, tensor)} has other groups of layers than rank (0, 0)")
                part = 0 if parts == 1 else tensor // replicas
                heads = shape.layer_layout.kv_heads
                shards[at, tensor].append(Shard(layer, layer + layers, part * heads, (part + 1) * heads))
            layer += layers
        groups.append(_group(g, shape, layer, parts))
    layout = KVLayout(tuple(groups), first[0].block_tokens)
    packing = [shape.layer_layout.packing for shape in first]
    return (
        layout,
        {rank: tuple(held) for rank, held in shards.items()},
        tuple(shape.vllm_group for shape in first),
        packing,
    )


def _alike(shape: LayerGroup, other: LayerGroup) -> bool:
    def what(s: LayerGroup) -> tuple[Any, ...]:
        layer_layout = s.layer_layout
        return (
            s.vllm_group,
            s.rule,
            s.window_tokens,
            s.block_tokens,
            layer_layout.kind,
            layer_layout.kv_heads,
            layer_layout.head_dim,
            layer_layout.dtype,
            layer_layout.order,
            layer_layout.opaque_bytes,
            layer_layout.packing,
        )

    return what(shape) == what(other)


def _group(index: int, shape: LayerGroup, layers: int, parts: int) -> Group:
    layer_layout = shape.layer_layout
    return Group(
        layers=layers,
        kv_heads=layer_layout.kv_heads * parts,
        head_dim=layer_layout.head_dim,
        dtype=layer_layout.dtype,
        kind=layer_layout.kind,
        order=layer_layout.order,
        rule=shape.rule,
        window_tokens=shape.window_tokens,
        opaque_bytes=layer_layout.opaque_bytes * parts,
        name=f"{shape.rule} {index}",
    )

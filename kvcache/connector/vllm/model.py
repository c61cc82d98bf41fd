"""The whole model, put together from what each rank says of its pages; and the namespaces bound to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvcache.block.layout import Group, KVLayout, Shard
from kvcache.cache.api import Bound, KVCache
from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.shape import Shape
from kvcache.errors import LayoutError

Rank = tuple[int, int]
"""Pipeline rank, tensor rank."""


@dataclass(frozen=True, slots=True)
class Model:
    """The layout of all ranks together, what else identifies the model's blocks, and what each rank holds."""

    name: str
    revision: str
    facts: Mapping[str, Any]
    layout: KVLayout
    shards: Mapping[Rank, tuple[Shard, ...]]
    of: tuple[int, ...]  # by group of the layout: which of vLLM's groups

    @property
    def block_bytes(self) -> int:
        return sum(self.layout.block_bytes(group=g) for g in range(len(self.layout.groups)))

    def bind(self, cache: KVCache, who: Who, rank: Rank | None = None) -> Bound:
        """`rank`: which part of the blocks this process holds; all of them where not given."""
        return cache.namespace(
            self.layout,
            model=self.name,
            revision=self.revision,
            adapter=who.adapter,
            tenant=who.tenant,
            cache_salt=who.salt,
            facts={**self.facts, "since": who.since} if who.since else self.facts,
            shards=None if rank is None else self.shards[rank],
            ranks=[self.shards[at] for at in sorted(self.shards)],
        )


def combine(
    ranks: Mapping[Rank, tuple[Shape, ...]], *, replicas: int = 1
) -> tuple[KVLayout, dict[Rank, tuple[Shard, ...]], tuple[int, ...], list[str]]:
    """Layout, shards by rank, vLLM's group of each of ours, and what packed each group's blocks.

    `replicas` consecutive tensor ranks hold the same heads. LayoutError where the ranks do not fit together.
    """
    stages = sorted({stage for stage, _ in ranks})
    width = len({tensor for _, tensor in ranks})
    first = ranks[stages[0], 0]
    groups, shards = [], {rank: [] for rank in ranks}  # type: ignore[var-annotated]  # told by the return
    for g, shape in enumerate(first):
        parts = 1 if shape.look.kind == "mla" else width // replicas
        layer = 0
        for stage in stages:
            layers = len(ranks[stage, 0][g].layers) if g < len(ranks[stage, 0]) else 0
            for (at, tensor), shapes in ranks.items():
                if at != stage:
                    continue
                if len(shapes) != len(first) or not _alike(shapes[g], shape) or len(shapes[g].layers) != layers:
                    raise LayoutError(f"rank {(at, tensor)} has other groups of layers than rank (0, 0)")
                part = 0 if parts == 1 else tensor // replicas
                heads = shape.look.kv_heads
                shards[at, tensor].append(Shard(layer, layer + layers, part * heads, (part + 1) * heads))
            layer += layers
        groups.append(_group(g, shape, layer, parts))
    layout = KVLayout(tuple(groups), first[0].block_tokens)
    packing = [shape.look.packing for shape in first]
    return layout, {rank: tuple(held) for rank, held in shards.items()}, tuple(shape.of for shape in first), packing


def _alike(shape: Shape, other: Shape) -> bool:
    def what(s: Shape) -> tuple[Any, ...]:
        look = s.look
        return (s.of, s.rule, s.window_tokens, s.block_tokens, look.kind, look.kv_heads, look.head_dim, look.dtype,
                look.order, look.opaque_bytes, look.packing)  # fmt: skip

    return what(shape) == what(other)


def _group(index: int, shape: Shape, layers: int, parts: int) -> Group:
    look = shape.look
    return Group(
        layers=layers,
        kv_heads=look.kv_heads * parts,
        head_dim=look.head_dim,
        dtype=look.dtype,
        kind=look.kind,
        order=look.order,
        rule=shape.rule,
        window_tokens=shape.window_tokens,
        opaque_bytes=look.opaque_bytes * parts,
        name=f"{shape.rule} {index}",
    )

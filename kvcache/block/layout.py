"""The layout of a block's bytes: groups, axes, strides, sizes, shards.

A block holds the keys and values of `block_tokens` consecutive tokens. Its payload, for one shard of one group, is one
array without gaps, with its axes in the group's `order`:

    kind     axes
    mha      layer, kv (0 = K, 1 = V), token, head, dim      covers MHA, GQA, MQA
    mla      layer, token, latent                            one latent a token, shared by all heads
    opaque   bytes that only the engine that wrote them can read

This module knows neither the tiers nor the keys of blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from struct import Struct
from typing import Any, Literal

from kvcache.errors import LayoutError

DTYPE_BYTES: Mapping[str, int] = {"bf16": 2, "fp16": 2, "fp32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
GroupKind = Literal["mha", "mla", "opaque"]
CachingRule = Literal["all", "window", "boundary"]
CACHING_RULES: tuple[CachingRule, ...] = ("all", "window", "boundary")

CANONICAL_ORDERS: Mapping[str, tuple[str, ...]] = {
    "mha": ("layer", "kv", "token", "head", "dim"),
    "mla": ("layer", "token", "latent"),
    "opaque": (),
}
_PACKED = Struct("<4H")
_U16 = 0xFFFF


@dataclass(frozen=True, slots=True)
class Shard:
    """A range of layers and heads of one group (ends excluded), held by one rank."""

    first_layer: int
    end_layer: int
    first_head: int
    end_head: int

    def __post_init__(self) -> None:
        for name, first, end in (
            ("layers", self.first_layer, self.end_layer),
            ("heads", self.first_head, self.end_head),
        ):
            if not 0 <= first < end <= _U16:
                raise LayoutError(f"shard {name} {first}:{end}: expected 0 <= first < end <= {_U16}")

    @property
    def layers(self) -> int:
        return self.end_layer - self.first_layer

    @property
    def heads(self) -> int:
        return self.end_head - self.first_head

    def pack(self) -> bytes:
        """Return 8 bytes: the four numbers as little-endian uint16."""
        return _PACKED.pack(self.first_layer, self.end_layer, self.first_head, self.end_head)

    @classmethod
    def unpack(cls, packed: bytes) -> Shard:
        return cls(*_PACKED.unpack(packed))


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers with one caching rule.

    `rule` is the part of a prefix that the group needs. `all`: every block. `window`: the blocks of the last
    `window_tokens` tokens. `boundary`: only the last block (a recurrent state at its end).

    `opaque_bytes`, of an `opaque` group, are the bytes of one layer of one block with all its heads.
    """

    layers: int
    kv_heads: int = 1
    head_dim: int = 0
    dtype: str = "bf16"
    kind: GroupKind = "mha"
    order: tuple[str, ...] = ()
    rule: CachingRule = "all"
    window_tokens: int = 0
    opaque_bytes: int = 0
    name: str = "full"

    def __post_init__(self) -> None:
        if self.kind not in CANONICAL_ORDERS:
            raise LayoutError(f"kind {self.kind!r}: expected one of {', '.join(CANONICAL_ORDERS)}")
        if self.dtype not in DTYPE_BYTES:
            raise LayoutError(f"dtype {self.dtype!r}: expected one of {', '.join(DTYPE_BYTES)}")
        if self.rule not in CACHING_RULES:
            raise LayoutError(f"rule {self.rule!r}: expected one of {', '.join(CACHING_RULES)}")
        object.__setattr__(self, "order", tuple(self.order) or CANONICAL_ORDERS[self.kind])
        if sorted(self.order) != sorted(CANONICAL_ORDERS[self.kind]):
            raise LayoutError(f"order {self.order}: expected a permutation of {CANONICAL_ORDERS[self.kind]}")
        for name in ("layers", "kv_heads"):
            if not 1 <= getattr(self, name) <= _U16:
                raise LayoutError(f"{name} = {getattr(self, name)}: expected 1 to {_U16}")
        if self.kind == "opaque":
            if self.opaque_bytes < 1 or self.opaque_bytes % self.kv_heads:
                raise LayoutError(f"opaque_bytes = {self.opaque_bytes}: expected a positive multiple of kv_heads")
        elif self.head_dim < 1 or self.opaque_bytes:
            found = f"head_dim = {self.head_dim}, opaque_bytes = {self.opaque_bytes}"
            raise LayoutError(f"{found} with kind {self.kind}: expected head_dim of at least 1, and no opaque_bytes")
        if self.kind == "mla" and self.kv_heads != 1:
            raise LayoutError(f"kv_heads = {self.kv_heads} with kind mla: a latent is shared by all heads, expected 1")
        if (self.rule == "window") != (self.window_tokens > 0) or self.window_tokens < 0:
            raise LayoutError(f"window_tokens = {self.window_tokens} with rule {self.rule!r}: give both or neither")

    @property
    def whole(self) -> Shard:
        return Shard(0, self.layers, 0, self.kv_heads)

    def token_bytes(self, shard: Shard | None = None) -> int:
        """Return the bytes of one token in one shard; 0 for an `opaque` group, in which only blocks have a size."""
        shard = shard or self.whole
        streams = {"mha": 2, "mla": 1, "opaque": 0}[self.kind]
        return streams * shard.layers * shard.heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """The layout of a whole model: its groups and the number of tokens in a block."""

    groups: tuple[Group, ...]
    block_tokens: int = 16
    max_tokens: int = field(default=0, compare=False)  # the model's context where known; not part of the identity

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", tuple(self.groups))
        if not self.groups:
            raise LayoutError("a layout without groups: expected at least one")
        if len(self.groups) > _U16:
            raise LayoutError(f"{len(self.groups)} groups: expected at most {_U16}")
        if not 1 <= self.block_tokens <= _U16:
            raise LayoutError(f"block_tokens = {self.block_tokens}: expected 1 to {_U16}")

    @classmethod
    def mha(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str = "bf16",
        block_tokens: int = 16,
        order: Sequence[str] = (),
    ) -> KVLayout:
        """Return a layout of one group of full-attention layers, the common case."""
        group = Group(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, order=tuple(order))
        return cls((group,), block_tokens)

    def shard(
        self, layers: tuple[int, int] | None = None, heads: tuple[int, int] | None = None, *, group: int = 0
    ) -> Shard:
        """Return a part of one group: ranges of layers and heads, ends excluded. Shards do not change the namespace."""
        whole = self.groups[group].whole
        shard = Shard(*(layers or (0, whole.end_layer)), *(heads or (0, whole.end_head)))
        if shard.end_layer > whole.end_layer or shard.end_head > whole.end_head:
            raise LayoutError(f"{shard} reaches past the group's {whole.end_layer} layers, {whole.end_head} heads")
        return shard

    @property
    def whole(self) -> tuple[Shard, ...]:
        """The whole shard of each group, for a process that holds the whole model."""
        return tuple(group.whole for group in self.groups)

    def shape(self, shard: Shard | None = None, *, group: int = 0) -> tuple[int, ...]:
        """Return the length of each axis of a block's payload, in the group's order; the last axis in elements."""
        g = self.groups[group]
        shard = shard or g.whole
        extent = {
            "layer": shard.layers,
            "kv": 2,
            "token": self.block_tokens,
            "head": shard.heads,
            "dim": g.head_dim,
            "latent": g.head_dim,
        }
        return tuple(extent[axis] for axis in g.order)

    def strides(self, shard: Shard | None = None, *, group: int = 0) -> dict[str, int]:
        """Return the bytes from one index of an axis to the next within a block's payload, by axis."""
        g = self.groups[group]
        shape = self.shape(shard, group=group)
        size = DTYPE_BYTES[g.dtype]
        return {axis: size * prod(shape[i + 1 :]) for i, axis in enumerate(g.order)}

    def block_bytes(self, shard: Shard | None = None, *, group: int = 0) -> int:
        """Return the bytes of one block's payload in one shard of one group."""
        g = self.groups[group]
        if g.kind == "opaque":
            shard = shard or g.whole
            return g.opaque_bytes // g.kv_heads * shard.layers * shard.heads
        return g.token_bytes(shard) * self.block_tokens

    @property
    def token_bytes(self) -> int:
        """Bytes that one token adds in the groups that keep a whole prefix."""
        return sum(g.token_bytes() for g in self.groups if g.rule == "all")

    def context_bytes(self, tokens: int) -> int:
        """Return the bytes of a context: the whole of it, the window, or one block, by each group's rule."""
        blocks = -(-tokens // self.block_tokens)
        return sum(
            self.block_bytes(group=i) * blocks_needed(g, blocks, self.block_tokens) for i, g in enumerate(self.groups)
        )

    def describe(self) -> dict[str, Any]:
        """Return the layout as plain values for the namespace, field by field, so that a new field is a new name."""
        return {
            "block_tokens": self.block_tokens,
            "groups": [
                {
                    "name": g.name,
                    "kind": g.kind,
                    "layers": g.layers,
                    "kv_heads": g.kv_heads,
                    "head_dim": g.head_dim,
                    "dtype": g.dtype,
                    "order": list(g.order),
                    "rule": g.rule,
                    "window_tokens": g.window_tokens,
                    "opaque_bytes": g.opaque_bytes,
                }
                for g in self.groups
            ],
        }


def blocks_needed(group: Group, blocks: int, block_tokens: int) -> int:
    """Return how many of the last blocks of a prefix of `blocks` blocks the group's rule needs."""
    if group.rule == "all":
        return blocks
    if group.rule == "boundary":
        return min(1, blocks)
    return min(blocks, -(-group.window_tokens // block_tokens))

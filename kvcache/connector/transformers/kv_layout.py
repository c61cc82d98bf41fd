"""The layout of a transformers model's cache, found by running one token, and pages of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache

from kvcache.block.hf import engine_facts, rope_types
from kvcache.block.layout import Group, KVLayout
from kvcache.errors import LayoutError
from kvcache.transfer.pages import GroupPages

_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_LAYER_CLASSES = ("DynamicLayer", "DynamicSlidingWindowLayer")
_ATTENTION_TYPES = frozenset({"full_attention", "sliding_attention"})
_LENGTH_DEPENDENT_ROPES = frozenset({"dynamic", "longrope", "su"})

Tensors = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values by layer, each (rows, heads, tokens, dim)."""


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """The layout of a model's cache, and for each group the model's layers in it."""

    layout: KVLayout
    layers: tuple[tuple[int, ...], ...]

    @property
    def count(self) -> int:
        return sum(map(len, self.layers))

    def check(self, tensors: Tensors, rows: int) -> None:
        """Raise LayoutError for tensors that the layout does not describe: their pages would be read past their
        ends."""
        for group, layers in zip(self.layout.groups, self.layers, strict=True):
            expected = (group.dtype, rows, group.kv_heads, group.head_dim)
            for i in layers:
                for held in tensors[i]:
                    found = (_DTYPES.get(held.dtype), held.shape[0], held.shape[1], held.shape[3])
                    if found != expected:
                        raise LayoutError(f"layer {i} has {found}: expected {expected} (type, rows, heads, dim)")

    def pages(self, tensors: Tensors, row: int, first: int) -> list[GroupPages]:
        """Return one row's tokens from `first` on as pages of one block each."""
        described = []
        for g, layers in enumerate(self.layers):
            pairs = [tensors[i] for i in layers]
            keys, item = pairs[0][0], pairs[0][0].element_size()
            _, heads, tokens, _ = (item * step for step in keys.stride())
            at = row * item * keys.stride(0) + first * tokens
            described.append(
                GroupPages(
                    layout=self.layout,
                    group=g,
                    shard=self.layout.groups[g].whole,
                    bases=np.array([[k.data_ptr() + at, v.data_ptr() + at] for k, v in pairs], np.uint64),
                    pages=(keys.shape[2] - first) // self.layout.block_tokens,
                    page_stride=tokens * self.layout.block_tokens,
                    token_stride=tokens,
                    head_stride=heads,
                    owner=pairs,
                )
            )
        return described

    def zeros(self, rows: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tensors of zeros. Masked values are multiplied too, so they must be finite."""
        made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for group, layers in zip(self.layout.groups, self.layers, strict=True):
            dtype = next(kind for kind, name in _DTYPES.items() if name == group.dtype)
            shape = (rows, group.kv_heads, tokens, group.head_dim)
            made |= {i: (torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)) for i in layers}
        return [made[i] for i in range(self.count)]


def cache_layout(model: Any, block_tokens: int) -> CacheLayout:
    """Return the layout of what the model caches for one token; LayoutError for state that is no prefix."""
    config = model.config.get_text_config(decoder=True)
    other = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_TYPES
    if model.config.is_encoder_decoder or getattr(model, "_is_stateful", False) or other:
        held = f"layers of {sorted(other)}" if other else "an encoder or a recurrent state"
        raise LayoutError(f"{type(model).__name__} has {held}: expected full or sliding attention in every layer")
    shards = getattr(model, "tp_size", None) or 1
    if shards > 1:
        raise LayoutError(f"{type(model).__name__} is one of {shards} tensor-parallel shards: expected all heads here")
    moving = rope_types(engine_facts(model.config)) & _LENGTH_DEPENDENT_ROPES
    if moving:
        raise LayoutError(f"rope of type {', '.join(sorted(moving))}: keys depend on the prompt's length")
    expected = DynamicCache(config=model.config).layers
    for i, layer in enumerate(expected):
        if type(layer).__name__ not in _LAYER_CLASSES:
            raise LayoutError(
                f"layer {i} is cached as {type(layer).__name__}: expected one of {', '.join(_LAYER_CLASSES)}"
            )
    probe = DynamicCache()
    with torch.no_grad():
        token = torch.zeros((1, 1), dtype=torch.long, device=model.device)
        model(input_ids=token, use_cache=True, **{cache_argument(model): probe})
    groups: dict[Group, list[int]] = {}
    for i, layer in enumerate(probe.layers):
        groups.setdefault(_group(i, layer, expected[i] if i < len(expected) else None, block_tokens), []).append(i)
    if not groups:
        raise LayoutError(
            f"{type(model).__name__} cached nothing for a token: expected keys and values; is it in training?"
        )
    laid = tuple(replace(group, layers=len(layers)) for group, layers in groups.items())
    return CacheLayout(KVLayout(laid, block_tokens), tuple(map(tuple, groups.values())))


def cache_argument(model: Any) -> str:
    """Return the model's name for its cache argument, which changed in transformers 5.24."""
    return "cache" if "cache" in signature(type(model).forward).parameters else "past_key_values"


def _group(i: int, layer: Any, expected: Any, block_tokens: int) -> Group:
    keys, values = layer.keys, layer.values
    if not isinstance(keys, torch.Tensor) or keys.shape != values.shape or keys.dtype not in _DTYPES:
        found = "nothing"
        if isinstance(keys, torch.Tensor):
            found = f"{keys.dtype} keys of {tuple(keys.shape)} and values of {tuple(values.shape)}"
        raise LayoutError(f"layer {i} caches {found}: expected one shape, in {', '.join(_DTYPES.values())}")
    if keys.shape[2] != 1:
        raise LayoutError(
            f"layer {i} caches {keys.shape[2]} tokens for one: expected no virtual tokens (prompt tuning)"
        )
    group = Group(layers=1, kv_heads=keys.shape[1], head_dim=keys.shape[3], dtype=_DTYPES[keys.dtype])
    if not getattr(expected, "is_sliding", False):
        return group
    # A prefix may end within its last block, and must have a whole window even then.
    return replace(group, name="window", rule="window", window_tokens=expected.sliding_window + block_tokens - 1)

"""Layouts and payloads for tests of codecs."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kvcache.block.layout import Group, KVLayout, Shard

TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORDS = {"bf16": np.uint16, "fp16": np.uint16, "fp32": np.uint32}


def mha(dtype: str = "bf16", *, order: tuple[str, ...] = (), block_tokens: int = 16) -> KVLayout:
    return KVLayout.mha(layers=2, kv_heads=3, head_dim=8, dtype=dtype, block_tokens=block_tokens, order=order)


def mla(dtype: str = "bf16", *, order: tuple[str, ...] = (), block_tokens: int = 16) -> KVLayout:
    group = Group(layers=3, head_dim=10, dtype=dtype, kind="mla", order=order)
    return KVLayout((group,), block_tokens)


def numbers(payload: memoryview, dtype: str) -> NDArray[np.float64]:
    """What the elements mean, in their order, by torch."""
    words = torch.frombuffer(bytearray(payload), dtype=TORCH[dtype])
    return words.to(torch.float64).numpy()


def payload(values: Any, dtype: str) -> memoryview:
    """The nearest elements of these numbers."""
    tensor = torch.as_tensor(np.asarray(values)).to(TORCH[dtype]).contiguous()
    return memoryview(bytearray(tensor.view(torch.uint8).numpy().tobytes()))


def noise(layout: KVLayout, seed: int, shard: Shard | None = None, *, spread: float = 1.0) -> memoryview:
    """Normal numbers, whose size differs from channel to channel by powers of e^`spread`."""
    group = layout.groups[0]
    shape = layout.shape(shard)
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * np.exp(spread * rng.standard_normal(shape[-1]))
    return payload(values, group.dtype)


def largest(values: NDArray[np.float64], layout: KVLayout, shard: Shard | None = None) -> NDArray[np.float64]:
    """The largest magnitude in each element's scale group, in the elements' order, an element at a time."""
    shape, order = layout.shape(shard), layout.groups[0].order
    groups = []
    for index in np.ndindex(*shape):
        at = dict(zip(order, index, strict=True))
        groups.append((at["layer"], at.get("kv", 0), at.get("head", 0), at["token"] // 16))
    tops: dict[tuple[int, ...], float] = {}
    for group, value in zip(groups, np.abs(values), strict=True):
        tops[group] = float(np.maximum(tops.get(group, 0.0), value))  # NaN stays NaN
    return np.array([tops[group] for group in groups])

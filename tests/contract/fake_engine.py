"""Caches of every kind there is, and a pretended engine, for the suites of the face."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from kvcache.block.layout import Group, KVLayout
from kvcache.transfer.pages import GroupPages

MiB = 1 << 20
FULL = KVLayout.mha(layers=2, kv_heads=2, head_dim=8, dtype="fp32", block_tokens=4)
HYBRID = KVLayout(
    (
        Group(layers=1, kv_heads=2, head_dim=8, dtype="fp32"),
        Group(layers=2, kv_heads=1, head_dim=4, dtype="fp32", rule="window", window_tokens=6, name="sliding"),
        Group(layers=1, kv_heads=1, head_dim=2, dtype="fp32", rule="boundary", name="state"),
    ),
    block_tokens=4,
)


@dataclass
class Engine:
    """Pages of a pretended engine, one array a layer: (kv, page, token, head, dim)."""

    layout: KVLayout
    pages: int = 64

    def __post_init__(self) -> None:
        bt = self.layout.block_tokens
        self.memory = [
            [np.zeros((2, self.pages, bt, g.kv_heads, g.head_dim), np.float32) for _ in range(g.layers)]
            for g in self.layout.groups
        ]
        self.described = [
            GroupPages.from_tensors(self.layout, layers, axes=("kv", "page", "token", "head", "dim"), group=i)
            for i, layers in enumerate(self.memory)
        ]

    def fill(self, seed: int, ids: list[int]) -> None:
        rng = np.random.default_rng(seed)
        for group in self.memory:
            for layer in group:
                layer[:, ids] = rng.standard_normal(layer[:, ids].shape, np.float32)

    def poison(self) -> None:
        for group in self.memory:
            for layer in group:
                layer.fill(np.nan)

    def block(self, page: int, group: int = 0) -> bytes:
        return b"".join(layer[:, page].tobytes() for layer in self.memory[group])

    def ids(self, ids: list[int]) -> list[list[int]]:
        return [ids] * len(self.layout.groups)


def bind(cache: Any, layout: KVLayout = FULL, **fields: Any) -> Any:
    return cache.namespace(layout, **{"model": "m", "revision": "r", **fields})


def wait_background(cache: Any) -> None:
    """What a cache of this process does in the background is done: owners' names written, records counted."""
    for submit in (cache.erasure.submit, cache._context.background.submit):
        submit(lambda: None).result(60)


def store(handle: Any, engine: Engine, tokens: list[int], ids: list[int], first_block: int = 0) -> Any:
    with handle.request() as r:
        r.match(tokens)
        transfer = r.store(engine.described, engine.ids(ids), first_block=first_block)
        assert transfer.wait(30)
    return transfer


def flushed(cache: Any, timeout_s: float = 60) -> bool:
    """Whether no block waits for a lower tier after a flush; a full tier may have refused some."""
    return not any(tier.waiting for tier in cache.flush(timeout_s).tiers.values())

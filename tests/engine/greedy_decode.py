"""Drives a model without an engine: greedy answers to several prompts, in chunks and pages of the test's choosing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import torch

from kvcache.engine.model import Model
from kvcache.engine.scheduler import Batch, Span

Chunk = Callable[[int], int]
"""How many of so many waiting tokens a sequence computes in this step; 0 leaves it out of the batch."""


def pages(model: Model, count: int) -> torch.Tensor:
    """Full of NaN, so that a key read before it was written spoils the answer."""
    group = model.layout.groups[0]
    shape = (group.layers, 2, count, model.layout.block_tokens, group.kv_heads, group.head_dim)
    return torch.full(shape, torch.nan, dtype=model.dtype)


def greedy(
    model: Model, prompts: Sequence[Sequence[int]], new_tokens: int, *, chunk: Chunk = lambda n: n, seed: int = 0
) -> list[list[int]]:
    """The answers, each `new_tokens` long, whatever the ends. Pages are scattered, by `seed`."""
    block = model.layout.block_tokens
    needed = [-(-(len(prompt) + new_tokens) // block) for prompt in prompts]
    free = Random(seed).sample(range(sum(needed) + 3), sum(needed) + 3)
    tables = [[free.pop() for _ in range(n)] for n in needed]
    kv = pages(model, sum(needed) + 3)
    tokens, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
    while True:
        open_ = [i for i in range(len(prompts)) if len(tokens[i]) < len(prompts[i]) + new_tokens]
        if not open_:
            return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]
        take = {i: chunk(len(tokens[i]) - done[i]) for i in open_}
        if not any(take.values()):
            take = {open_[0]: 1}
        spans, rows, last = [], 0, {}
        for i, n in take.items():
            if n:
                spans.append(Span(rows, n, done[i], tables[i]))
                rows += n
                if done[i] + n == len(tokens[i]):
                    last[i] = rows - 1
        parts = [(i, done[i], done[i] + n) for i, n in take.items() if n]
        batch = Batch(
            torch.tensor([t for i, first, end in parts for t in tokens[i][first:end]]),
            torch.tensor([p for _, first, end in parts for p in range(first, end)]),
            spans,
            torch.tensor(list(last.values()), dtype=torch.int64),
        )
        logits = model.forward(batch, kv)
        assert logits.shape == (len(last), model.vocab_size)
        assert logits.dtype is torch.float32
        for i, _, end in parts:
            done[i] = end
        for i, row in zip(last, logits, strict=True):
            tokens[i].append(int(row.argmax()))

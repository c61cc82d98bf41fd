"""Attention of one flat batch: each sequence for itself, over its pages.

A span is attended to alone, never padded or stacked with others, so that what it yields depends on its own tokens
only. How its rows are cut into steps still moves the last bits: a chunk is reduced in blocks of its own size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from kvcache.engine.batch import Span


@dataclass(frozen=True, slots=True)
class Reach:
    """The keys that one span's rows see; the same in all layers with the same window."""

    rows: slice  # of the flat batch
    pages: torch.Tensor | None  # where the keys are; None: the rows' own are all there are
    keys: slice  # of the keys in those pages
    mask: torch.Tensor | None  # (rows, keys) to be added to the scores
    causal: bool

    @classmethod
    def of(cls, span: Span, *, window: int, block_tokens: int, like: torch.Tensor) -> Reach:
        """`window`: how many tokens a row sees, itself included; 0 for all. `like`: dtype and device of the scores."""
        context, end = span.context, span.context + span.length
        rows = slice(span.start, span.start + span.length)
        windowed = 0 < window < end
        if context == 0 and not windowed:
            return cls(rows, None, slice(0, end), None, causal=span.length > 1)
        first = max(0, context + 1 - window) if windowed else 0
        mask = _mask(context, end, first, window if windowed else end, like) if span.length > 1 else None
        if context == 0:
            return cls(rows, None, slice(0, end), mask, causal=False)
        page = first // block_tokens
        ids = span.page_ids[page : -(-end // block_tokens)]
        before = page * block_tokens
        return cls(rows, torch.tensor(ids, device=like.device), slice(first - before, end - before), mask, causal=False)


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reaches: Sequence[Reach], pages: torch.Tensor
) -> torch.Tensor:
    """(T, heads, head_dim), from q (T, heads, head_dim) and the batch's own k and v (T, kv_heads, head_dim).

    `pages` (2, pages, block_tokens, kv_heads, head_dim) is one layer's, with k and v already written into it.
    """
    outs = []
    for reach in reaches:
        if reach.pages is None:
            keys, values = k[reach.rows], v[reach.rows]
        else:
            keys, values = (side.index_select(0, reach.pages).flatten(0, 1)[reach.keys] for side in pages)
        heads_first = [x.transpose(0, 1)[None] for x in (q[reach.rows], keys, values)]
        out = functional.scaled_dot_product_attention(
            heads_first[0],
            heads_first[1],
            heads_first[2],
            attn_mask=reach.mask,
            is_causal=reach.causal,
            enable_gqa=True,
        )
        outs.append(out[0].transpose(0, 1))
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _mask(context: int, end: int, first: int, window: int, like: torch.Tensor) -> torch.Tensor:
    row = torch.arange(context, end, device=like.device)[:, None]
    key = torch.arange(first, end, device=like.device)
    seen = (key <= row) & (key > row - window)
    return torch.zeros(seen.shape, dtype=like.dtype, device=like.device).masked_fill_(~seen, -torch.inf)

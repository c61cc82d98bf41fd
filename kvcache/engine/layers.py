"""The layers of the model: attention over pages, linear layers, rotary position embeddings.

Rotary embeddings split `x` in halves: dimension i is paired with i + head_dim / 2, as in checkpoints of the Hugging
Face form.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from kvcache.engine.scheduler import Span

# Attention of one flat batch, one sequence at a time, over its pages. A span is never padded or stacked with others, so
# that its result depends on its own tokens only. The cut of its rows into steps still changes the last bits: a chunk is
# reduced in blocks of its own size.


@dataclass(frozen=True, slots=True)
class KeyRange:
    """The keys that one span's rows see; the same in all layers with the same window."""

    rows: slice  # of the flat batch
    pages: torch.Tensor | None  # where the keys are; None: the rows' own keys are all
    keys: slice  # range of the keys in those pages
    mask: torch.Tensor | None  # (rows, keys), added to the scores
    causal: bool

    @classmethod
    def of(cls, span: Span, *, window: int, block_tokens: int, like: torch.Tensor) -> KeyRange:
        """Return the keys of a span.

        Args:
            window: how many tokens a row sees, itself included; 0 for all.
            like: gives dtype and device of the scores.
        """
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


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, reaches: Sequence[KeyRange], pages: torch.Tensor
) -> torch.Tensor:
    """Return (T, heads, head_dim), from q (T, heads, head_dim) and the batch's own k and v (T, kv_heads, head_dim).

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


# A matrix product whose rows do not depend on the number of rows beside them.
#
# On a CPU, the library behind `torch.nn.functional.linear` picks another kernel for small batches, so that a row's last
# bits change with its neighbours. On processors of other makers than the library's, it is also slow: a quarter of the
# memory's speed for one row, and half of the arithmetic speed for many. oneDNN, which torch carries and its compiler
# uses, does neither once the weights are packed. Its one exception is a single row, computed here as two.

_ONEDNN = torch.ops.mkldnn  # these names are private to torch; without them the plain product is used
_PACK_ROWS = 512  # the packing is tuned to this number; any number of rows works


class Linear:
    """Maps x (T, columns) to (T, rows), with weights (rows, columns). Keeps only the packed weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.rows = weight.shape[0]
        self.bias = bias
        self.packed = _can_pack(weight)
        self.weight = _ONEDNN._reorder_linear_weight(weight, _PACK_ROWS) if self.packed else weight  # noqa: SLF001

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not self.packed:
            return functional.linear(x, self.weight, self.bias)
        rows = x.shape[0]
        if rows == 0:
            return x.new_empty((0, self.rows))
        if rows == 1:
            x = x.expand(2, -1).contiguous()
        y: torch.Tensor = _ONEDNN._linear_pointwise(x, self.weight, self.bias, "none", [], "")  # noqa: SLF001
        return y[:rows]


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not hasattr(_ONEDNN, "_reorder_linear_weight"):
        return False
    if weight.dtype is torch.bfloat16:
        return bool(_ONEDNN._is_mkldnn_bf16_supported())  # noqa: SLF001
    return weight.dtype is torch.float32


class RotaryEmbedding:
    """Rotary embeddings of one model, with the settings that `Architecture.rope` has checked.

    `dynamic` scaling begins only past the trained length, which is also the limit here, since a cached key could not be
    rotated again. Within that length it equals `default`.
    """

    def __init__(self, settings: Mapping[str, Any], *, head_dim: int, max_tokens: int, device: str = "cpu") -> None:
        kind = settings["rope_type"]
        rate = 1.0 / settings["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.scale = 1.0  # of keys and queries alike
        if kind == "linear":
            rate = rate / settings["factor"]
        elif kind == "llama3":
            rate = _llama3(rate, settings, max_tokens)
        elif kind == "yarn":
            rate, self.scale = _yarn(rate, settings, max_tokens)
        else:
            assert kind in ("default", "dynamic")
        self.rate = rate.to(device)  # (head_dim / 2,) radians a token

    def angles(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosine and sine, each (T, 1, head_dim / 2): the same for all heads and layers."""
        angle = positions.to(torch.float32)[:, None, None] * self.rate
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def apply_rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Return x, (T, heads, head_dim), rotated by the angles of `RotaryEmbedding.angles`; a new tensor."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _llama3(rate: torch.Tensor, settings: Mapping[str, Any], max_tokens: int) -> torch.Tensor:
    """Return llama3's rates: slow pairs are divided by `factor`, fast ones kept, and those between are mixed by their
    turns in the trained length."""
    turns = settings.get("original_max_position_embeddings", max_tokens) * rate / (2 * math.pi)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    mixed: torch.Tensor = keep * rate + (1 - keep) * rate / settings["factor"]
    return mixed


def _yarn(rate: torch.Tensor, settings: Mapping[str, Any], max_tokens: int) -> tuple[torch.Tensor, float]:
    """Return the rates and the scale of YaRN (arXiv 2309.00071).

    A ramp lies over the pairs between those that turn `beta_fast` and `beta_slow` times in the trained length. The
    scale keeps the entropy of the attention.
    """
    pairs, trained = len(rate), settings.get("original_max_position_embeddings", max_tokens)
    factor = settings.get("factor") or max_tokens / trained

    def pair(turns: float) -> float:
        return pairs * math.log(trained / (turns * 2 * math.pi)) / math.log(settings["rope_theta"])

    first, last = pair(settings.get("beta_fast") or 32), pair(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    slowed = ((torch.arange(pairs) - first) / max(last - first, 0.001)).clamp(0, 1)

    def entropy(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    scale = settings.get("attention_factor")
    if scale is None:
        weights = settings.get("mscale"), settings.get("mscale_all_dim")
        scale = entropy(weights[0]) / entropy(weights[1]) if weights[0] and weights[1] else entropy(1)
    return rate * (1 - slowed) + rate / factor * slowed, float(scale)

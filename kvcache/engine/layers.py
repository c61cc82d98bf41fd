"""Rotary position embeddings: the angle by which each pair of dimensions turns a token, and the turning.

`x` is split in halves, dimension i paired with i + head_dim / 2, as checkpoints in the Hugging Face form expect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch


class Rope:
    """The settings of one model, as `Architecture.rope` has checked them.

    `dynamic` scaling begins only past the trained length, which is also our limit (a cached key could not be turned
    again): within it, it is `default`.
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
        """Cosine and sine, each (T, 1, head_dim / 2): the same for all heads and layers."""
        angle = positions.to(torch.float32)[:, None, None] * self.rate
        return (angle.cos() * self.scale).to(dtype), (angle.sin() * self.scale).to(dtype)


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """(T, heads, head_dim), turned by `Rope.angles`; a new tensor."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def _llama3(rate: torch.Tensor, settings: Mapping[str, Any], max_tokens: int) -> torch.Tensor:
    """Slow pairs are slowed by `factor`, fast ones kept, those between mixed by how often they turn in the trained
    length."""
    turns = settings.get("original_max_position_embeddings", max_tokens) * rate / (2 * math.pi)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    mixed: torch.Tensor = keep * rate + (1 - keep) * rate / settings["factor"]
    return mixed


def _yarn(rate: torch.Tensor, settings: Mapping[str, Any], max_tokens: int) -> tuple[torch.Tensor, float]:
    """arXiv 2309.00071: a ramp over the pairs between those that turn `beta_fast` and `beta_slow` times in the trained
    length, and a scale that keeps the attention's entropy."""
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

"""What a model runs in one step: rows of several sequences, one behind the other, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step: rows `start` to `start + length` of the flat batch.

    `page_ids` are the pages that hold the sequence's first `context + length` tokens, in order; more may follow. The
    first `context` tokens are already in them, the model writes the others.
    """

    start: int
    length: int
    context: int
    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of a step, in the order of their rows and covering every row once.

    Two spans may read the same page; no page is written by one span and read or written by another in the same step.
    """

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64: where each row stands in its sequence
    spans: list[Span]
    logits_at: torch.Tensor  # (R,) int64: the rows whose logits are wanted

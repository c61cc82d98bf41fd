"""Computes one block again, outside the engine's pool and any cache, for the canary to compare."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from kvcache.engine.scheduler import Batch, Span
from kvcache.transfer.cpu import CpuCopier
from kvcache.transfer.pages import GroupPages

if TYPE_CHECKING:
    from kvcache.engine.model import Runner


class Recompute:
    """Computes the last block of some tokens.

    Thread safety: called from another thread than the engine's; it only reads the model.
    """

    def __init__(self, model: Runner, rows: int) -> None:
        """`rows` is the number of tokens of a step."""
        self._model, self._rows = model, rows

    def __call__(self, tokens: Sequence[int]) -> list[bytes]:
        model, layout = self._model, self._model.layout
        group, pages = layout.groups[0], len(tokens) // layout.block_tokens
        shape = (group.layers, 2, pages, layout.block_tokens, group.kv_heads, group.head_dim)
        kv = torch.zeros(shape, dtype=model.dtype, device=model.device)
        for first in range(0, len(tokens), self._rows):
            part = tokens[first : first + self._rows]
            span = Span(0, len(part), first, list(range(pages)))
            positions = range(first, first + len(part))
            model.forward(Batch(self._tensor(part), self._tensor(positions), [span], self._tensor([len(part) - 1])), kv)
        last = list(kv[:, :, -1:].cpu().contiguous())
        described = GroupPages.from_tensors(layout, last, axes=("kv", "page", "token", "head", "dim"))
        payload = bytearray(described.block_bytes)
        CpuCopier().gather(described, [0], [memoryview(payload)]).wait()
        return [bytes(payload)]

    def _tensor(self, numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64, device=self._model.device)

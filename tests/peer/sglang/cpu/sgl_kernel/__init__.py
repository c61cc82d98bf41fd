"""Stands in for SGLang's kernels, which are published for CUDA only: one of them in torch, the rest by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor, table: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, places: torch.Tensor, *_: Any
) -> None:
    """Write each request's new places into its row, from its start to its end."""
    lengths = (ends - starts).tolist()
    parts = places.to(table.dtype).split([int(length) for length in lengths])
    for request, start, part in zip(requests.tolist(), starts.tolist(), parts, strict=False):
        table[request, start : start + len(part)] = part


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"sgl_kernel.{name}: there are no kernels on this machine")

    return missing

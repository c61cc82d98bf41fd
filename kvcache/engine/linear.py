"""A matrix product whose rows do not depend on how many stand beside them.

On a CPU, what `torch.nn.functional.linear` calls picks another kernel for small batches, so that a row's last bits
change with its neighbours; on processors not of that library's maker it also reaches a quarter of the memory's speed
for one row and half of the arithmetic's for many. oneDNN, which torch carries and its compiler uses, does neither once
the weights are packed. Its one exception is a single row, computed here as two.
"""

from __future__ import annotations

import torch
from torch.nn import functional

_ONEDNN = torch.ops.mkldnn  # the names are private to torch: without them the plain product is used
_PACK_ROWS = 512  # what the packing is tuned to; any number of rows works


class Linear:
    """x (T, columns) -> (T, rows), with weights (rows, columns). Keeps the packed weights only."""

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

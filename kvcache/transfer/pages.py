"""The description of an engine's pages: base addresses and strides, one description for each group.

The address of an element of page `p`:

    mha   base[layer, kv] + p * page_stride + token * token_stride + head * head_stride + dim * itemsize
    mla   base[layer, 0]  + p * page_stride + token * token_stride + latent * itemsize
    opaque  base[layer, 0] + p * page_stride, `opaque_bytes` of the layer long

This covers NHD and HND pages, K and V separate or fused, and one tensor for all layers or for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.layout import DTYPE_BYTES, KVLayout, Shard
from kvcache.errors import LayoutError


@dataclass(frozen=True, slots=True, eq=False)
class GroupPages:
    """The pages of one shard of one group. `owner` keeps the memory alive; this class never frees it."""

    layout: KVLayout
    group: int
    shard: Shard
    bases: NDArray[np.uint64]  # (layers of the shard, 2 for mha, else 1): byte addresses of page 0
    pages: int
    page_stride: int  # bytes
    token_stride: int  # bytes
    head_stride: int  # bytes
    device: str = "cpu"
    owner: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        kind = self.layout.groups[self.group].kind
        expected = (self.shard.layers, 2 if kind == "mha" else 1)
        if self.bases.shape != expected:
            raise LayoutError(f"bases of shape {self.bases.shape}: expected (layers, K and V) = {expected}")

    @property
    def block_bytes(self) -> int:
        return self.layout.block_bytes(self.shard, group=self.group)

    def check_ids(self, page_ids: Sequence[int]) -> None:
        """Raise LayoutError for a page that does not exist: a copy would read or write foreign memory."""
        if len(page_ids) and not (0 <= min(page_ids) and max(page_ids) < self.pages):
            raise LayoutError(f"page ids {min(page_ids)} to {max(page_ids)}: expected 0 to {self.pages - 1}")

    @classmethod
    def from_tensors(
        cls,
        layout: KVLayout,
        tensors: Sequence[Any],
        *,
        axes: Sequence[str],
        shard: Shard | None = None,
        group: int = 0,
    ) -> GroupPages:
        """Describe torch tensors or numpy arrays.

        Args:
            tensors: One for each layer of the shard. The dim or latent axis must be contiguous.
            axes: `page` and the layout's axes without `layer`, in the order of the tensors' dimensions, for instance
                `("kv", "page", "token", "head", "dim")`.

        Raises:
            LayoutError: The tensors do not fit the layout.
        """
        g = layout.groups[group]
        shard = shard or g.whole
        if g.kind == "opaque":
            raise LayoutError("opaque pages: describe them with GroupPages(...) and their byte strides")
        wanted = {"page", *(axis for axis in g.order if axis != "layer")}
        if set(axes) != wanted or len(axes) != len(wanted):
            raise LayoutError(f"axes {tuple(axes)}: expected a permutation of {tuple(sorted(wanted))}")
        if len(tensors) != shard.layers:
            raise LayoutError(f"{len(tensors)} tensors: expected one for each of the shard's {shard.layers} layers")
        strides, shape, device = _strides(tensors[0]), tuple(tensors[0].shape), _device(tensors[0])
        for tensor in tensors:
            if tuple(tensor.shape) != shape or _strides(tensor) != strides:
                raise LayoutError("layers of different shapes or strides: describe them as groups")
        at = {axis: i for i, axis in enumerate(axes)}
        extent = dict(zip(g.order, layout.shape(shard, group=group), strict=True))
        for axis in wanted - {"page"}:
            if shape[at[axis]] != extent[axis]:
                raise LayoutError(f"axis {axis} of {shape[at[axis]]}: the layout says {extent[axis]}")
        inner = "dim" if g.kind == "mha" else "latent"
        if strides[at[inner]] != DTYPE_BYTES[g.dtype]:
            raise LayoutError(f"axis {inner} is {strides[at[inner]]} bytes apart: expected {DTYPE_BYTES[g.dtype]}")
        kv = strides[at["kv"]] if "kv" in at else 0
        firsts = [_address(tensor) for tensor in tensors]
        bases = np.array([[f + k * kv for k in range(2 if "kv" in at else 1)] for f in firsts], dtype=np.uint64)
        return cls(
            layout=layout,
            group=group,
            shard=shard,
            bases=bases,
            pages=shape[at["page"]],
            page_stride=strides[at["page"]],
            token_stride=strides[at["token"]],
            head_stride=strides[at["head"]] if "head" in at else 0,
            device=device,
            owner=tuple(tensors),
        )


Pages = Sequence[GroupPages]
"""The pages of one shard of every group, in the layout's order of groups."""


def _strides(tensor: Any) -> tuple[int, ...]:
    if isinstance(tensor, np.ndarray):
        return tensor.strides
    size = tensor.element_size()
    return tuple(size * s for s in tensor.stride())


def _address(tensor: Any) -> int:
    return int(tensor.ctypes.data if isinstance(tensor, np.ndarray) else tensor.data_ptr())


def _device(tensor: Any) -> str:
    return "cpu" if isinstance(tensor, np.ndarray) else str(tensor.device)

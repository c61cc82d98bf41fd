"""Copy plans: a block as fragments that are contiguous in page and payload. The Python twin of csrc/layout/layout.h.

The host plans a GPU launch, and may lack the compiled core. The tests compare `coalesce_axes` with its C++ twin, and
run the kernels that follow these plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import gcd, prod

import numpy as np
from numpy.typing import NDArray

from kvcache.transfer.cpu import BlockAxes, Int5
from kvcache.transfer.pages import GroupPages

Axis = tuple[int, int, int]
"""Extent; step in the page, in bytes; step in the payload, in bytes."""


@dataclass(frozen=True)
class FragmentWalk:
    """Fragments of `run` bytes, numbered along `axes`, outermost first."""

    axes: tuple[Axis, ...]
    run: int

    @property
    def fragments(self) -> int:
        return prod(extent for extent, _, _ in self.axes)

    @cached_property
    def offsets(self) -> NDArray[np.int64]:
        """Offsets of each fragment in the page and in the payload, in bytes; shape (fragments, 2)."""
        offsets = np.zeros((1, 2), np.int64)
        for extent, *steps in self.axes:
            along = np.arange(extent, dtype=np.int64)[:, None] * np.array(steps, np.int64)
            offsets = (offsets[:, None] + along[None]).reshape(-1, 2)
        return offsets


def coalesce_axes(axes: Sequence[Axis], item_bytes: int) -> FragmentWalk:
    """Return the longest fragments that both sides allow, in the payload's order."""
    kept: list[Axis] = []
    for extent, page, payload in sorted((axis for axis in axes if axis[0] != 1), key=lambda axis: -axis[2]):
        if kept and kept[-1][1:] == (extent * page, extent * payload):
            kept[-1] = (kept[-1][0] * extent, page, payload)
        else:
            kept.append((extent, page, payload))
    run = item_bytes
    if kept and kept[-1][1:] == (item_bytes, item_bytes):
        run *= kept.pop()[0]
    return FragmentWalk(tuple(kept), run)


@dataclass(frozen=True)
class CopyPlan:
    """A plan to copy blocks: for each block, `walk` from each root.

    Layers (and K and V) at equal distances are axes of the walk. At unequal distances each one is a separate root.
    """

    roots: NDArray[np.int64]  # (roots, 2): address in page 0; offset in the payload
    walk: FragmentWalk
    page_step: int
    target_step: int = 0  # bytes between two targets, in copies from page to page

    @property
    def alignment(self) -> int:
        """The largest number that divides every address of the plan, apart from the payloads' addresses."""
        steps = [step for _, *steps in self.walk.axes for step in steps]
        return gcd(self.walk.run, self.page_step, self.target_step, *steps, *self.roots.flatten().tolist())


def copy_plan(pages: GroupPages, layers: tuple[int, int] | None = None) -> CopyPlan:
    """Return the plan between pages and payloads, of the shard's layers [first, end) or of all."""
    first, end = layers or (0, pages.shard.layers)
    axes = BlockAxes.of(pages)
    bases = np.ascontiguousarray(pages.bases[first:end], np.uint64)
    made = _plan(bases.tobytes(), axes.extents, axes.item_bytes, axes.page, axes.payload)
    roots = made.roots + np.array([0, first * axes.payload[0]])
    return CopyPlan(roots, made.walk, pages.page_stride)


def page_copy_plan(pages: GroupPages) -> CopyPlan:
    """Return the plan from page to page. The target page takes the payload's place, and its address is in the root."""
    axes = BlockAxes.of(pages)
    bases = np.ascontiguousarray(pages.bases, np.uint64)
    made = _plan(bases.tobytes(), axes.extents, axes.item_bytes, axes.page, None)
    return CopyPlan(made.roots, made.walk, pages.page_stride, pages.page_stride)


@lru_cache(maxsize=1024)
def _plan(addresses: bytes, extents: Int5, item_bytes: int, page: Int5, payload: Int5 | None) -> CopyPlan:
    kv = extents[1]
    bases = np.frombuffer(addresses, np.uint64).reshape(-1, kv).astype(np.int64)
    layers = len(bases)
    kv_step = int(bases[0, -1] - bases[0, 0])
    layer_step = int(bases[1, 0] - bases[0, 0]) if layers > 1 else 0
    kv_even = bool((bases[:, -1] - bases[:, 0] == kv_step).all())
    layers_even = kv_even and bool((np.diff(bases[:, 0]) == layer_step).all())
    steps = payload or (layer_step, kv_step, *page[2:])
    axes = [(layers if layers_even else 1, layer_step, steps[0]), (kv if kv_even else 1, kv_step, steps[1])]
    axes += [(extents[i], page[i], steps[i]) for i in range(2, 5)]
    roots = []
    for layer in range(1 if layers_even else layers):
        for k in range(1 if kv_even else kv):
            address = int(bases[layer, k])
            roots.append((address, layer * payload[0] + k * payload[1] if payload else address))
    return CopyPlan(np.array(roots, np.int64), coalesce_axes(axes, item_bytes), 0)

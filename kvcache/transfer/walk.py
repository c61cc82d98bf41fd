"""How a block is cut into fragments that are contiguous on both sides: the twin of csrc/layout/layout.h in Python.

A launch on a GPU is planned on the host, where nothing may have been compiled. The tests compare `collapse` with the
header's, and run the kernels that follow these plans.
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
"""Extent, bytes from one index to the next in the page, the same in the payload."""


@dataclass(frozen=True)
class FragmentWalk:
    """Fragments of `run` bytes, numbered along `axes`, outermost first."""

    axes: tuple[Axis, ...]
    run: int

    @property
    def fragments(self) -> int:
        return prod(extent for extent, _, _ in self.axes)

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """(fragments, 2): where each fragment lies in the page and in the payload."""
        places = np.zeros((1, 2), np.int64)
        for extent, *steps in self.axes:
            along = np.arange(extent, dtype=np.int64)[:, None] * np.array(steps, np.int64)
            places = (places[:, None] + along[None]).reshape(-1, 2)
        return places


def coalesce_axes(axes: Sequence[Axis], item_bytes: int) -> FragmentWalk:
    """The longest fragments that both sides allow, in the payload's order."""
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
    """How the blocks of some pages are copied: `walk` from each root, for each block.

    Where pages are equal distances apart, layers (and K and V) are axes of the walk; where they are not, each is a
    root of its own.
    """

    roots: NDArray[np.int64]  # (roots, 2): address in page 0; bytes from the payload's start
    walk: FragmentWalk
    page_step: int
    target_step: int = 0  # copies within the pool: what a target's id is multiplied by

    @property
    def alignment(self) -> int:
        """What every address that the plan makes is a multiple of, apart from those of the payloads."""
        steps = [step for _, *steps in self.walk.axes for step in steps]
        return gcd(self.walk.run, self.page_step, self.target_step, *steps, *self.roots.flatten().tolist())


def copy_plan(pages: GroupPages, layers: tuple[int, int] | None = None) -> CopyPlan:
    """Between pages and payloads; of the shard's layers from the first to the second number, all if not given."""
    first, end = layers or (0, pages.shard.layers)
    axes = BlockAxes.of(pages)
    bases = np.ascontiguousarray(pages.bases[first:end], np.uint64)
    made = _plan(bases.tobytes(), axes.extents, axes.item_bytes, axes.page, axes.payload)
    roots = made.roots + np.array([0, first * axes.payload[0]])
    return CopyPlan(roots, made.walk, pages.page_stride)


def page_copy_plan(pages: GroupPages) -> CopyPlan:
    """From page to page: what a payload is to `plan`, another page is here, whose address goes into the root."""
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

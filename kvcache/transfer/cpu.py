"""Copies on the CPU, of pages in this process's memory.

`CpuCopier` calls the compiled core. `ReferenceCopier` is the same in numpy: the reference of the tests, and the
fallback without the compiled core. Both copy within the call and return a completed copy. The result is undefined where
a page occurs twice in one scatter, or pages overlap buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache import native
from kvcache.block.layout import DTYPE_BYTES
from kvcache.errors import ConfigError, LayoutError
from kvcache.transfer.pages import GroupPages

Int5 = tuple[int, int, int, int, int]
"""One number for each of the axes layer, K or V, token, head, element."""


class CompletedCopy:
    """A copy that is already done."""

    done = True

    def wait(self, timeout_s: float | None = None) -> bool:
        return True

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        return True


class SynchronousCopier:
    """Base of copiers that finish within the call, so that marks are not needed."""

    def mark(self) -> None:
        return None


@dataclass(frozen=True, slots=True)
class BlockAxes:
    """A block of any kind as five axes, with steps in bytes. An axis that a kind lacks has extent 1.

    `page` has no steps for layer, K and V: the pages' `bases` hold their addresses.
    """

    extents: Int5
    item_bytes: int
    page: Int5
    payload: Int5

    @classmethod
    def of(cls, pages: GroupPages) -> BlockAxes:
        group, shard = pages.layout.groups[pages.group], pages.shard
        if group.kind == "opaque":
            layer_bytes = pages.block_bytes // shard.layers
            return cls((shard.layers, 1, 1, 1, layer_bytes), 1, (0, 0, 0, 0, 1), (layer_bytes, 0, 0, 0, 1))
        item = DTYPE_BYTES[group.dtype]
        step = pages.layout.strides(shard, group=pages.group)
        tokens = pages.layout.block_tokens
        page = (0, 0, pages.token_stride, pages.head_stride, item)
        if group.kind == "mla":
            extents = (shard.layers, 1, tokens, 1, group.head_dim)
            return cls(extents, item, page, (step["layer"], 0, step["token"], 0, step["latent"]))
        extents = (shard.layers, 2, tokens, shard.heads, group.head_dim)
        return cls(extents, item, page, (step["layer"], step["kv"], step["token"], step["head"], step["dim"]))


class ReferenceCopier(SynchronousCopier):
    """Copies block by block and layer by layer, in numpy."""

    def gather(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: None = None
    ) -> CompletedCopy:
        check_call(pages, page_ids, buffers, writable=True)
        for page, payload in _pairs(pages, page_ids, buffers):
            payload[...] = page
        return CompletedCopy()

    def scatter(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: None = None
    ) -> CompletedCopy:
        check_call(pages, page_ids, buffers, writable=False)
        for page, payload in _pairs(pages, page_ids, buffers):
            page[...] = payload
        return CompletedCopy()


class CpuCopier(SynchronousCopier):
    """Copies in the compiled core, on up to `threads` threads including the caller's, without the GIL."""

    def __init__(self, threads: int = 2) -> None:
        if threads < 1:
            raise ConfigError(f"threads = {threads}: expected at least 1")
        self.threads = threads

    def gather(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: None = None
    ) -> CompletedCopy:
        if not native.available():
            return ReferenceCopier().gather(pages, page_ids, buffers)
        check_call(pages, page_ids, buffers, writable=True)
        native.core.gather(*_described(pages), np.asarray(page_ids, np.int64), buffers, self.threads)
        return CompletedCopy()

    def scatter(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: None = None
    ) -> CompletedCopy:
        if not native.available():
            return ReferenceCopier().scatter(pages, page_ids, buffers)
        check_call(pages, page_ids, buffers, writable=False)
        native.core.scatter(*_described(pages), np.asarray(page_ids, np.int64), buffers, self.threads)
        return CompletedCopy()


def check_call(
    pages: GroupPages,
    page_ids: Sequence[int],
    buffers: Sequence[memoryview],
    *,
    writable: bool,
    device: str = "cpu",
    block_bytes: int | None = None,
) -> None:
    """Raise LayoutError for invalid arguments of a copy, before any copy.

    Args:
        block_bytes: Size of a buffer, where it is an encoded block; else the layout's block size.
    """
    if pages.device not in {device, f"{device}:0"}:
        raise LayoutError(f"pages on {pages.device}: expected {device}; use the copier of that device")
    if len(page_ids) != len(buffers):
        raise LayoutError(f"{len(buffers)} buffers for {len(page_ids)} pages: expected one each")
    pages.check_ids(page_ids)
    expected = pages.block_bytes if block_bytes is None else block_bytes
    for i, buffer in enumerate(buffers):
        if buffer.nbytes != expected:
            raise LayoutError(f"buffer {i} of {buffer.nbytes} bytes: expected {expected}, a block of this shard")
        if not buffer.c_contiguous or (writable and buffer.readonly):
            raise LayoutError(f"buffer {i} is not contiguous or is read-only: expected one to write whole blocks to")


def _described(pages: GroupPages) -> tuple[NDArray[np.uint64], Int5, int, int, Int5, Int5]:
    axes = BlockAxes.of(pages)
    bases = np.ascontiguousarray(pages.bases, np.uint64)
    return bases, axes.extents, axes.item_bytes, pages.page_stride, axes.page, axes.payload


@dataclass(frozen=True, slots=True)
class _ArrayView:
    """An address that numpy accepts as an array; the pages' `owner` keeps the memory alive."""

    __array_interface__: dict[str, Any]


def _pairs(
    pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview]
) -> list[tuple[NDArray[Any], NDArray[Any]]]:
    """Return (page part, payload part) for each block, layer, and K or V; both of shape (token, head, element)."""
    axes = BlockAxes.of(pages)
    kind = f"<u{axes.item_bytes}" if axes.item_bytes > 1 else "|u1"
    pairs = []
    for page, buffer in zip(page_ids, buffers, strict=True):
        payload = np.ndarray(axes.extents, kind, buffer, strides=axes.payload)
        for (layer, kv), base in np.ndenumerate(pages.bases):
            interface = {
                "data": (int(base) + int(page) * pages.page_stride, False),
                "shape": axes.extents[2:],
                "strides": axes.page[2:],
                "typestr": kind,
                "version": 3,
            }
            pairs.append((np.asarray(_ArrayView(interface)), payload[layer, kv]))
    return pairs

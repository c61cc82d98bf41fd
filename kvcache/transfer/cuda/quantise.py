"""Quantised blocks made on the GPU: the payloads of the `fp8` and `int8` codecs, byte for byte.

Half the bytes of bf16 cross the bus, and the host has nothing to encode. `docs/spec/codec.md` specifies the bytes and
their error bound. The numpy codecs (`kvcache/codec/quantised.py`) are the twins of these kernels.

A codec refuses a payload where a scale group holds infinity or NaN, or its scale is out of range. The kernel writes
such a payload all the same. `sound` detects it, and the caller then gathers that block unencoded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import LayoutError
from kvcache.transfer.cpu import BlockAxes
from kvcache.transfer.cuda.kernels import (
    DIVISION,
    MAX_BLOCKS,
    MAX_ROOTS,
    PAIR,
    THREADS,
    Direction,
    Launch,
    block_offsets,
    chunked,
    division,
)
from kvcache.transfer.pages import GroupPages

Format = Literal["fp8", "int8"]

GROUP_TOKENS = 16
MIN_SCALE = {"bf16": 2.0**-126, "fp32": 2.0**-126, "fp16": 2.0**-24}
MAX_SCALE = 2.0**100

_LANES = 32
_WIDE_BYTES = 16  # bytes of elements that one thread reads at a time
JOB = np.dtype(
    [
        ("heads", DIVISION),
        ("runs", DIVISION),
        ("tokens", "u4"),
        ("dim", "u4"),
        ("blocks", "u4"),
        ("roots", "u4"),
        ("first_root", "u4"),
        ("kv", "u4"),
        ("page_token", "i8"),
        ("page_head", "i8"),
        ("layer", "i8"),
        ("either", "i8"),
        ("token", "i8"),
        ("head", "i8"),
        ("element", "i8"),
        ("codes", "u8"),
        ("root", "u8", (MAX_ROOTS,)),
        ("block", PAIR, (MAX_BLOCKS,)),
    ],
    align=True,
)


@dataclass(frozen=True)
class QuantisedPages:
    """The blocks of pages in a quantised format. Raises LayoutError for elements that are not bf16, fp16 or fp32."""

    format: Format
    pages: GroupPages

    def __post_init__(self) -> None:
        group = self.pages.layout.groups[self.pages.group]
        if group.kind == "opaque" or group.dtype not in MIN_SCALE:
            raise LayoutError(
                f"{self.format} of {group.kind} pages of {group.dtype}: expected mha or mla of {', '.join(MIN_SCALE)}"
            )

    @property
    def dtype(self) -> str:
        return self.pages.layout.groups[self.pages.group].dtype

    @property
    def scale_bytes(self) -> int:
        layers, kv, tokens, heads, _ = BlockAxes.of(self.pages).extents
        return 4 * layers * kv * heads * -(-tokens // GROUP_TOKENS)

    @property
    def payload_bytes(self) -> int:
        return self.scale_bytes + self.pages.block_bytes // BlockAxes.of(self.pages).item_bytes

    def sound(self, payload: memoryview) -> bool:
        """Return whether the error bound holds for this payload. Where not, gather the block unencoded."""
        scales = np.frombuffer(payload[: self.scale_bytes], np.float32)
        return bool(np.all((scales == 0) | ((scales >= MIN_SCALE[self.dtype]) & (scales <= MAX_SCALE))))

    def launches(
        self, direction: Direction, page_ids: Sequence[int], payloads: NDArray[np.int64], most_blocks: int
    ) -> Iterator[Launch]:
        """Yield the launches that convert these blocks, on about `most_blocks` thread blocks at most."""
        axes, pages = BlockAxes.of(self.pages), self.pages
        _, kv, tokens, heads, dim = axes.extents
        job = np.zeros(1, JOB)
        job["heads"], job["runs"] = division(heads), division(-(-tokens // GROUP_TOKENS))
        job["tokens"], job["dim"], job["kv"], job["codes"] = tokens, dim, kv, self.scale_bytes
        job["page_token"], job["page_head"] = axes.page[2:4]
        steps = [step // axes.item_bytes for step in axes.payload]
        for name, step in zip(("layer", "either", "token", "head", "element"), steps, strict=True):
            job[name] = step
        addresses = np.ascontiguousarray(pages.bases, np.uint64).reshape(-1)
        offsets = block_offsets(page_ids, pages.page_stride, payloads)
        there = gcd(pages.page_stride, *axes.page[2:4], *addresses.tolist())
        if there % axes.item_bytes:
            raise LayoutError(f"pages of {self.dtype} at multiples of {there} bytes: expected {axes.item_bytes}")
        count = _WIDE_BYTES // axes.item_bytes
        here = gcd(self.scale_bytes, *steps[:4], *payloads.tolist())
        wide = not (dim % count or steps[4] != 1 or there % _WIDE_BYTES or here % count)
        verb = "quantise" if direction == "gather" else "restore"
        kernel = f"quantise.cu:{verb}_{self.format}_{self.dtype}_{'wide' if wide else 'one'}"
        for first, some in zip(range(0, len(addresses), MAX_ROOTS), chunked(addresses, MAX_ROOTS), strict=True):
            for these in chunked(offsets, MAX_BLOCKS):
                one = job.copy()
                one["roots"], one["first_root"], one["blocks"] = len(some), first, len(these)
                one["root"][0, : len(some)] = some
                one["block"][0, : len(these)] = these
                groups = len(some) * len(these) * heads * -(-tokens // GROUP_TOKENS)
                yield Launch(kernel, (min(most_blocks, -(-groups * _LANES // THREADS)), 1), one)

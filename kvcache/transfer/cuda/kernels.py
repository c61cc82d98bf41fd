"""The host side of the CUDA kernels: their sources, names and argument structs.

The package ships the sources, and NVRTC compiles them on first use for the device at hand. CuPy caches the result on
disk under a hash of the source. `JOB` is `Job` of csrc/cuda/copy.h. A launch passes it by value, so no array on the
device has to outlive the launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from math import gcd
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import LayoutError
from kvcache.transfer.walk import CopyPlan

Direction = Literal["gather", "scatter"]
Grid = tuple[int, int]


class Launch(NamedTuple):
    kernel: str  # file:name
    grid: Grid  # in blocks of `THREADS` threads
    job: NDArray[np.void]  # one struct, passed by value


THREADS = 256
UNROLL = 4
MAX_ROOTS, MAX_BLOCKS, MAX_AXES = 64, 128, 5
WIDTHS = (16, 8, 4, 2, 1)
OPTIONS = ("-std=c++17",)

DIVISION = np.dtype([("divisor", "u4"), ("multiplier", "u4"), ("shift", "u4")])
_STEP = np.dtype([("extent", DIVISION), ("page", "i8"), ("payload", "i8")], align=True)
PAIR = np.dtype([("page", "u8"), ("payload", "u8")], align=True)
JOB = np.dtype(
    [
        ("axes", _STEP, (MAX_AXES,)),
        ("run", DIVISION),
        ("count", "u4"),
        ("vectors", "u4"),
        ("blocks", "u4"),
        ("roots", "u4"),
        ("root", PAIR, (MAX_ROOTS,)),
        ("block", PAIR, (MAX_BLOCKS,)),
    ],
    align=True,
)

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_PACKAGE_DIR = Path(__file__).parents[2]


def source(name: str) -> str:
    """Return a file of csrc/cuda with its includes inlined.

    CuPy's cache is keyed by the text alone, so a change in a header on a path would go unnoticed.
    """
    sources = next(path for path in (_PACKAGE_DIR / "csrc", _PACKAGE_DIR.parent / "csrc") if (path / "cuda").is_dir())
    seen: set[Path] = set()

    def text(path: Path) -> str:
        if path in seen:
            return ""
        seen.add(path)
        inner = _INCLUDE.sub(lambda m: text((path.parent / m[1]).resolve()), path.read_text(encoding="utf-8"))
        return inner.replace("#pragma once\n", "")

    return text((sources / "cuda" / name).resolve())


@cache
def division(divisor: int) -> tuple[int, int, int]:
    """Return the fields of `DIVISION`. The twin of `division` in csrc/layout/division.h."""
    shift = (divisor - 1).bit_length()
    return divisor, (((1 << shift) - divisor) << 32) // divisor + 1, shift


def access_width(plan: CopyPlan, payloads: NDArray[np.int64]) -> int:
    """Return the widest access in bytes that every address of a copy allows."""
    return gcd(WIDTHS[0], plan.alignment, int(np.bitwise_or.reduce(payloads)))


def launches(
    plan: CopyPlan, direction: Direction, page_ids: Sequence[int], payloads: NDArray[np.int64], most_blocks: int
) -> Iterator[Launch]:
    """Yield the launches that copy these blocks, on about `most_blocks` thread blocks at most."""
    if not len(page_ids):
        return
    wide = access_width(plan, payloads)
    walk = plan.walk
    vectors = walk.fragments * (walk.run // wide)
    if vectors >= 1 << 31:
        raise LayoutError(f"a block of {walk.fragments} fragments of {walk.run} bytes: more than a launch counts")
    job = np.zeros(1, JOB)
    for at, (extent, page, payload) in enumerate(walk.axes, MAX_AXES - len(walk.axes)):
        job["axes"][0, at] = (division(extent), page, payload)
    job["run"] = division(walk.run // wide)
    job["count"], job["vectors"] = len(walk.axes), vectors
    offsets = block_offsets(page_ids, plan.page_step, payloads)
    roots = plan.roots.astype(np.uint64).view(PAIR)[:, 0]
    along = min(most_blocks, -(-vectors // (THREADS * UNROLL)))
    for some in chunked(roots, MAX_ROOTS):
        for these in chunked(offsets, MAX_BLOCKS):
            one = job.copy()
            one["roots"], one["blocks"] = len(some), len(these)
            one["root"][0, : len(some)] = some
            one["block"][0, : len(these)] = these
            among = min(len(some) * len(these), max(1, most_blocks // along))
            yield Launch(f"copy.cu:{direction}_{wide}", (along, among), one)


def block_offsets(page_ids: Sequence[int], page_step: int, payloads: NDArray[np.int64]) -> NDArray[np.void]:
    """Return the `Block` struct of each block: its offset in the pages, and the address of its payload."""
    offsets = np.stack([np.asarray(page_ids, np.int64) * page_step, payloads], axis=1)
    return offsets.astype(np.uint64).view(PAIR)[:, 0]


def chunked(array: NDArray[Any], most: int) -> Iterator[NDArray[Any]]:
    """Split an array into chunks of at most `most` elements, in order."""
    for first in range(0, len(array), most):
        yield array[first : first + most]

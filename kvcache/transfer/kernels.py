"""The CUDA kernels as this side of the launch sees them: their source, their names, the struct that they take.

The sources travel in the package and are compiled where they run, by NVRTC for the very device; CuPy keeps what was
compiled on disk under a hash of the source. `JOB` is `Job` of csrc/cuda/copy.h, by value: a launch has no arrays of its
own on the device that would have to outlive it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import cache
from math import gcd
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import LayoutError
from kvcache.transfer.walk import Plan

Direction = Literal["gather", "scatter"]
Grid = tuple[int, int]

THREADS = 256
UNROLL = 4
ROOTS, BLOCKS, MAX_AXES = 64, 128, 5
WIDTHS = (16, 8, 4, 2, 1)
OPTIONS = ("-std=c++17",)

DIVISION = np.dtype([("divisor", "u4"), ("multiplier", "u4"), ("shift", "u4")])
_STEP = np.dtype([("extent", DIVISION), ("page", "i8"), ("payload", "i8")], align=True)
_PAIR = np.dtype([("page", "u8"), ("payload", "u8")], align=True)
JOB = np.dtype(
    [
        ("axes", _STEP, (MAX_AXES,)),
        ("run", DIVISION),
        ("count", "u4"),
        ("vectors", "u4"),
        ("blocks", "u4"),
        ("roots", "u4"),
        ("root", _PAIR, (ROOTS,)),
        ("block", _PAIR, (BLOCKS,)),
    ],
    align=True,
)

_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
_HERE = Path(__file__).parents[1]


def source(name: str) -> str:
    """A file of csrc/cuda with what it includes put in place.

    One text, since CuPy's cache is keyed by the text alone: a header found by a path could change unseen.
    """
    sources = next(place for place in (_HERE / "csrc", _HERE.parent / "csrc") if (place / "cuda").is_dir())
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
    """The twin of `division` in csrc/layout/division.h, as `DIVISION` has it."""
    shift = (divisor - 1).bit_length()
    return divisor, (((1 << shift) - divisor) << 32) // divisor + 1, shift


def width(plan: Plan, payloads: NDArray[np.int64]) -> int:
    """Bytes of the widest access that every address of a copy allows."""
    return gcd(WIDTHS[0], plan.alignment, int(np.bitwise_or.reduce(payloads)))


def jobs(plan: Plan, page_ids: Sequence[int], payloads: NDArray[np.int64]) -> Iterator[tuple[int, NDArray[np.void]]]:
    """The launches that copy these blocks: the width of their accesses and a `JOB` each."""
    if not len(page_ids):
        return
    wide = width(plan, payloads)
    walk = plan.walk
    vectors = walk.fragments * (walk.run // wide)
    if vectors >= 1 << 31:
        raise LayoutError(f"a block of {walk.fragments} fragments of {walk.run} bytes: more than a launch counts")
    job = np.zeros(1, JOB)
    for at, (extent, page, payload) in enumerate(walk.axes, MAX_AXES - len(walk.axes)):
        job["axes"][0, at] = (division(extent), page, payload)
    job["run"] = division(walk.run // wide)
    job["count"], job["vectors"] = len(walk.axes), vectors
    places = np.stack([np.asarray(page_ids, np.int64) * plan.page_step, payloads], axis=1).astype(np.uint64)
    roots = plan.roots.astype(np.uint64)
    for first_root in range(0, len(roots), ROOTS):
        some = roots[first_root : first_root + ROOTS]
        for first in range(0, len(places), BLOCKS):
            these = places[first : first + BLOCKS]
            one = job.copy()
            one["roots"], one["blocks"] = len(some), len(these)
            one["root"][0, : len(some)] = some.view(_PAIR)[:, 0]
            one["block"][0, : len(these)] = these.view(_PAIR)[:, 0]
            yield wide, one


def grid(job: NDArray[np.void], most_blocks: int) -> Grid:
    """Blocks of threads along a piece and among the pieces, at most about `most_blocks` in all."""
    pieces = int(job["blocks"][0]) * int(job["roots"][0])
    along = min(most_blocks, -(-int(job["vectors"][0]) // (THREADS * UNROLL)))
    return along, min(pieces, 65535, max(1, most_blocks // along))

"""Buffers as a direct file wants them: on page boundaries. Those that are not take a detour through one that is."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

import numpy as np

from kvcache.block.record import ALIGNMENT

_own = threading.local()


def flat(segments: Sequence[memoryview], size_bytes: int) -> list[memoryview]:
    """The first `size_bytes` of the segments, as plain bytes."""
    pieces: list[memoryview] = []
    for segment in segments:
        piece = segment if segment.format == "B" and segment.ndim == 1 else segment.cast("B")
        pieces.append(piece[:size_bytes])
        size_bytes -= len(pieces[-1])
        if size_bytes <= 0:
            break
    return pieces


def aligned(pieces: Sequence[memoryview]) -> bool:
    return all(
        not len(piece) % ALIGNMENT and not np.frombuffer(piece, np.uint8).ctypes.data % ALIGNMENT for piece in pieces
    )


def buffer(size_bytes: int) -> memoryview:
    """This thread's own aligned buffer, good until its next call."""
    memory: mmap.mmap | None = getattr(_own, "memory", None)
    if memory is None or len(memory) < size_bytes:
        memory = _own.memory = mmap.mmap(-1, size_bytes)
    return memoryview(memory)[:size_bytes]


def gather(pieces: Sequence[memoryview], into: memoryview) -> None:
    at = 0
    for piece in pieces:
        into[at : at + len(piece)] = piece
        at += len(piece)


def scatter(source: memoryview, pieces: Sequence[memoryview]) -> None:
    at = 0
    for piece in pieces:
        piece[:] = source[at : at + len(piece)]
        at += len(piece)

"""Buffers as a direct file wants them: on page boundaries. Those that are not take a detour through one that is."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Sequence

import numpy as np

from kvcache.block.record import ALIGNMENT

_own = threading.local()


def aligned(pieces: Sequence[memoryview]) -> bool:
    return all(not len(piece) % ALIGNMENT and not _address(piece) % ALIGNMENT for piece in pieces)


def _address(piece: memoryview) -> int:
    if not len(piece) or piece.readonly:
        return int(np.frombuffer(piece, np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(piece))  # six times as quick


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

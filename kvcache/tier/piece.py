"""Bytes in several pieces, cut without copying."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.tier.tier import Segments


def flat(segments: Segments, size: int) -> list[memoryview]:
    """The first `size` bytes, as plain bytes."""
    return cut([segment.cast("B") for segment in segments], 0, size)


def cut(pieces: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """Bytes `start` to `start + size` of pieces that follow each other, or as many as are there."""
    found = []
    for piece in pieces:
        if start < len(piece) and size > 0:
            found.append(piece[start : start + size])
            size -= len(found[-1])
        start = max(0, start - len(piece))
    return found

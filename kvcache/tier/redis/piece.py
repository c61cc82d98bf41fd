"""Bytes in several pieces, cut without copying, and how many of them go out together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcache.tier.tier import Segments

IN_FLIGHT_BYTES = 16 << 20
"""On one connection; with more a server spends its time on memory."""


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


def groups(
    values: Sequence[tuple[bytes, list[memoryview]]],
) -> Iterator[list[tuple[bytes, list[memoryview]]]]:
    """As many in a row as may be in flight together."""
    group: list[tuple[bytes, list[memoryview]]] = []
    size = 0
    for value in values:
        more = sum(map(len, value[1]))
        if group and size + more > IN_FLIGHT_BYTES:
            yield group
            group, size = [], 0
        group.append(value)
        size += more
    if group:
        yield group

"""How many values go out together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

IN_FLIGHT_BYTES = 16 << 20
"""On one connection; with more a server spends its time on memory."""


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

"""How long a prefix may be for a pool beside the first, by which of its pages are there. All lengths, not the longest:
each rank holds its own shard, and SGLang takes what all of them have in common."""

from __future__ import annotations

from collections.abc import Sequence


def everywhere(here: Sequence[bool]) -> set[int]:
    """For a pool that needs every page."""
    end = next((i for i, there in enumerate(here) if not there), len(here))
    return set(range(1, end + 1))


def trailing(here: Sequence[bool], last: int) -> set[int]:
    """For a pool that needs the last pages of a prefix only: a window, or one state."""
    lengths, run = set(), 0
    for i, there in enumerate(here):
        run = run + 1 if there else 0
        if run >= min(last, i + 1):
            lengths.add(i + 1)
    return lengths

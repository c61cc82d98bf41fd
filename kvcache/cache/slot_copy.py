"""Between host slots and wherever an engine keeps its blocks: pages of this process, or another process's.

A load and a store know slots; who moves the bytes is told apart from them, so that both work alike for an engine in
this process and for one behind a socket, which maps the slots and copies by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Literal, Protocol

from kvcache.block.record import header_area
from kvcache.cache.api import PageIds
from kvcache.tier.host.arena import Slot
from kvcache.transfer.copier import CopierRegistry, CopyHandle
from kvcache.transfer.pages import Pages


class SlotView(Protocol):
    @property
    def view(self) -> memoryview:
        """All of a slot."""


CopyPart = tuple[int, int, Slot]
"""A block, counted from the first that the transfer moves; a group; where its record stands."""

CopyViewPart = tuple[int, int, SlotView]
"""The same, where only the slot's bytes are reached."""


class PeerAbortedError(Exception):
    """The other side of a transfer did not take part to its end: it left, or it did not want to."""


class SlotCopy(Protocol):
    """Raises where the bytes will not be where they belong, NotMovedError where that is no fault of ours. The caller
    has a reference to each slot until they are."""

    def gather(self, parts: Sequence[CopyPart]) -> None:
        """Fill the payloads of these slots; returns once they are filled."""

    def scatter(self, parts: Sequence[CopyPart]) -> Sequence[CopyHandle]:
        """Take the payloads out of these slots. What is still under way then: nothing, or copies to wait for."""


class PagesSlotCopy:
    """To and from pages that this process reaches. Made on the thread by which the engine gives its device work: what
    was given before comes before any copy."""

    def __init__(self, copiers: CopierRegistry, pages: Pages, page_ids: PageIds) -> None:
        self._pages, self._page_ids = pages, page_ids
        self._copiers = [copiers.of(group_pages.device) for group_pages in pages]
        self._after = [copier.mark() for copier in self._copiers]

    def gather(self, parts: Sequence[CopyViewPart]) -> None:
        wait_all(self._begin("gather", parts))

    def scatter(self, parts: Sequence[CopyViewPart]) -> Sequence[CopyHandle]:
        return self._begin("scatter", parts)

    def _begin(self, direction: Literal["gather", "scatter"], parts: Sequence[CopyViewPart]) -> list[CopyHandle]:
        copies: list[CopyHandle] = []
        try:
            for group, ids, payloads in self._groups(parts):
                copy = getattr(self._copiers[group], direction)
                copies.append(copy(self._pages[group], ids, payloads, after=self._after[group]))
        except BaseException:
            wait_all(copies)
            raise
        return copies

    def _groups(self, parts: Sequence[CopyViewPart]) -> list[tuple[int, list[int], list[memoryview]]]:
        groups = []
        for group, group_pages in enumerate(self._pages):
            group_parts = [(block, slot) for block, g, slot in parts if g == group]
            if group_parts:
                size, area = group_pages.block_bytes, header_area(group_pages.block_bytes)
                payloads = [slot.view[area : area + size] for _, slot in group_parts]
                groups.append((group, [self._page_ids[group][block] for block, _ in group_parts], payloads))
        return groups


def wait_all(copies: Sequence[CopyHandle]) -> None:
    """Until none is under way, whatever becomes of them; raises what the first that failed raised."""
    with ExitStack() as others:
        for copy in reversed(copies):
            others.callback(copy.wait)

"""Copies between host slots and an engine's blocks: pages of this process, or of another process.

A load and a store handle slots; a `SlotCopy` moves the bytes. Both therefore work alike for an engine in this process
and for one behind a socket, which maps the slots and copies by itself.
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
        """All bytes of a slot."""


CopyPart = tuple[int, int, Slot]
"""A block, counted from the first one of the transfer; a group; the record's slot."""

CopyViewPart = tuple[int, int, SlotView]
"""The same, with access to the slot's bytes only."""


class PeerAbortedError(Exception):
    """The other side of a transfer did not complete its part: it disconnected or declined."""


class SlotCopy(Protocol):
    """Moves payloads between slots and an engine.

    The caller holds a reference to each slot until the bytes are moved.

    Raises:
        PeerAbortedError: the other side did not complete the transfer.
        Exception: any other error, after which the bytes are not in place.
    """

    def gather(self, parts: Sequence[CopyPart]) -> None:
        """Fill the payloads of these slots; returns when they are filled."""

    def scatter(self, parts: Sequence[CopyPart]) -> Sequence[CopyHandle]:
        """Copy the payloads out of these slots; the copies that are still in progress, to wait for."""


class PagesSlotCopy:
    """Copies to and from pages of this process.

    Thread safety: create it on the thread that gives the engine's device work, so that earlier device work precedes
    every copy.
    """

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
    """Wait for the end of all copies, then raise the first error."""
    with ExitStack() as others:
        for copy in reversed(copies):
            others.callback(copy.wait)

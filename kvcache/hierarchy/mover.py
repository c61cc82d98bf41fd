"""Between host slots and wherever an engine keeps its blocks: pages of this process, or another process's.

A load and a store know slots; who moves the bytes is told apart from them, so that both work alike for an engine in
this process and for one behind a socket, which maps the slots and copies by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvcache.block.record import header_area
from kvcache.hierarchy.face import PageIds
from kvcache.tier.arena import Slot
from kvcache.transfer.copier import Copier
from kvcache.transfer.pages import Pages


class Place(Protocol):
    @property
    def view(self) -> memoryview:
        """All of a slot."""


Part = tuple[int, int, Slot]
"""A block, counted from the first that the transfer moves; a group; where its record stands."""

PlacedPart = tuple[int, int, Place]
"""The same, where only the slot's bytes are reached."""


class NotMovedError(Exception):
    """The other side of a transfer did not take part to its end: it left, or it did not want to."""


class Mover(Protocol):
    """Returns once the bytes are where they belong; raises where they will not be, NotMovedError where that is no
    fault of ours. The caller has a reference to each slot until then."""

    def gather(self, parts: Sequence[Part]) -> None:
        """Fill the payloads of these slots."""

    def scatter(self, parts: Sequence[Part]) -> None:
        """Take the payloads out of these slots."""


@dataclass(frozen=True, slots=True)
class PagesMover:
    """To and from pages that this process reaches."""

    copier: Copier
    pages: Pages
    page_ids: PageIds

    def gather(self, parts: Sequence[PlacedPart]) -> None:
        for group, ids, payloads in self._groups(parts):
            self.copier.gather(self.pages[group], ids, payloads).wait()

    def scatter(self, parts: Sequence[PlacedPart]) -> None:
        for group, ids, payloads in self._groups(parts):
            self.copier.scatter(self.pages[group], ids, payloads).wait()

    def _groups(self, parts: Sequence[PlacedPart]) -> list[tuple[int, list[int], list[memoryview]]]:
        groups = []
        for group, there in enumerate(self.pages):
            mine = [(block, slot) for block, g, slot in parts if g == group]
            if mine:
                size, area = there.block_bytes, header_area(there.block_bytes)
                payloads = [slot.view[area : area + size] for _, slot in mine]
                groups.append((group, [self.page_ids[group][block] for block, _ in mine], payloads))
        return groups

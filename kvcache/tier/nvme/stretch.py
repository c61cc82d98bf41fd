"""Records in neighbouring slots: one call reads or writes them all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvcache.block.record import Address
from kvcache.tier.nvme.entry import Entry
from kvcache.tier.nvme.segment import Segment
from kvcache.tier.tier import Segments

MOST_BYTES = 9 << 20
"""What one call moves: four records of 2 MiB with their headers, or more of less."""


@dataclass(slots=True, eq=False)
class Place:
    """Where a block of a batch stands, or is going to: `entry` is what the journal says of it, or will."""

    i: int  # the block's number in its ticket
    address: Address
    pieces: Sequence[memoryview]
    segment: Segment
    slot: int
    record_bytes: int
    entry: Entry
    failures: int = 0  # the segment's, when the slot was taken
    name: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.name = self.address.name


def stretches(places: Iterable[Place]) -> Iterator[list[Place]]:
    """Groups that follow each other on the drive without a gap."""
    stretch: list[Place] = []
    size = 0
    for place in sorted(places, key=lambda p: (p.segment.number, p.slot)):
        if stretch:
            last = stretch[-1]
            adjacent = last.segment is place.segment and last.slot + 1 == place.slot
            full = last.record_bytes == last.segment.slot_bytes
            if not (adjacent and full and size + place.record_bytes <= MOST_BYTES):
                yield stretch
                stretch, size = [], 0
        stretch.append(place)
        size += place.record_bytes
    if stretch:
        yield stretch


def flat(segments: Segments, size_bytes: int) -> list[memoryview]:
    """The first `size_bytes` of a block's segments, as plain bytes."""
    pieces: list[memoryview] = []
    for segment in segments:
        piece = segment if segment.format == "B" and segment.ndim == 1 else segment.cast("B")
        pieces.append(piece if len(piece) <= size_bytes else piece[:size_bytes])
        size_bytes -= len(pieces[-1])
        if size_bytes <= 0:
            break
    return pieces

"""Which records of a store end, and when: the journal says which, their own headers when."""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import numpy as np

from kvcache.block.record import ALIGNMENT, Address, RecordError, expires_ms, read_header
from kvcache.tier.nvme.entry import ENDS, PUT
from kvcache.tier.nvme.ledger import Ledger
from kvcache.tier.nvme.segment import Segment


def ending(ledger: Ledger) -> Iterator[tuple[Address, int]]:
    """With the end of each, in milliseconds since 1970. Reads a page of each of them, of no other; what cannot be read
    now is left out, and a miss when somebody asks for it."""
    with ledger.memory:
        segments = list(ledger.space.segments.values())
    for segment in segments:
        yield from _of(ledger, segment)


def _of(ledger: Ledger, segment: Segment) -> Iterator[tuple[Address, int]]:
    with ledger.memory:
        rows = segment.columns()
        slots = np.flatnonzero((rows["kind"] == PUT) & (rows["flags"] & ENDS != 0)).tolist()
        if segment.retired or not slots:
            return
        segment.users += 1
    page = memoryview(mmap.mmap(-1, ALIGNMENT))
    try:
        with ledger.files.using(segment) as file:
            for slot in slots:
                segment.read(file, slot, [page])
                try:
                    header = read_header(page)
                except RecordError:
                    continue
                yield header.address, expires_ms(header.fields)
    except OSError:
        return

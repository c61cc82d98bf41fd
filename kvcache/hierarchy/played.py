"""Part of a trace played to an index of one tier, as a cache would live through it: the plain twin of
`csrc/host/play`, and what it means.

A request counts its uses, then takes in what was not there, heads first. For that it takes the place of what is worth
less than its own blocks, or as much, and never of what it used itself; where there is no such room the rest of it is
refused, and remembered.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.hierarchy.plain_index import PlainIndex
from kvcache.hierarchy.prefix import ALL


def play(
    index: PlainIndex,
    place: bytes,
    starts: NDArray[np.int64],
    blocks: NDArray[np.int32],
    signatures: NDArray[np.uint64],
    first: int,
    end: int,
    capacity: int,
    values: NDArray[np.float64],
    hits: NDArray[np.int32],
    refuses: bool = True,
) -> None:
    """Requests `first` to `end`; `signatures` by number of a block. `hits`: how many of a request's first blocks were
    there, written from 0 on. Where nobody `refuses`, newcomers take the place of what is worth more as well."""
    for r in range(first, end):
        chain = signatures[blocks[starts[r] : starts[r + 1]]].tobytes()
        now = index.tick()
        at, _ = index.match([place], [ALL], chain)
        hits[r - first] = at
        index.touch(place, chain[: at * SIGNATURE_BYTES], now)
        classes = [index.use_class(uses) for uses in index.uses(place, chain)]
        stop, room = at, capacity - index.resident(0)
        while stop < len(classes):
            own, alike = classes[stop], 1
            while stop + alike < len(classes) and classes[stop + alike] == own:
                alike += 1
            if alike > room:
                room += len(
                    index.evict(0, values, alike - room, now, False, most=float(values[own, 0]) if refuses else np.inf)
                )
            fits = min(alike, room)
            stop, room = stop + fits, room - fits
            if fits < alike:
                break
        parent = chain[(at - 1) * SIGNATURE_BYTES : at * SIGNATURE_BYTES] or place[:SIGNATURE_BYTES]
        index.insert(place, chain[at * SIGNATURE_BYTES : stop * SIGNATURE_BYTES], parent, 0)
        index.refuse(place, chain[stop * SIGNATURE_BYTES :])

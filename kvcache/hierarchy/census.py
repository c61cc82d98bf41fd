"""What each namespace has in each tier: records and bytes, counted when asked.

To count a million records takes a good part of a second of one core, so a count stands for a while: for `STANDS_S`, and
for `REST` times what it took. So whoever asks, however often, takes a few hundredths of a core at most.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.record import record_bytes
from kvcache.index.index import Index
from kvcache.os_env import Clock
from kvcache.tier.tier import Tier

STANDS_S, REST = 5.0, 30.0


class Holding(NamedTuple):
    records: int
    bytes: int  # 0 of a tier that others share: what its server takes for them is not told


Counted = Mapping[bytes, Mapping[str, Holding]]
"""By namespace and tier."""


class Census:
    def __init__(self, index: Index, tiers: Sequence[Tier], clock: Clock, sizes: Callable[[], Mapping[bytes, int]]):
        """`tiers`: host first. `sizes`: payload bytes of a record, by its place; of whatever can be in host."""
        self._index, self._tiers, self._clock, self._sizes = index, tiers, clock, sizes
        self._counted: Counted = {}
        self._until = float("-inf")
        self._recounting = False
        self._lock = threading.Lock()

    def take(self, *, anew: bool = False) -> Counted:
        """As it was counted last; `anew`: as it is now."""
        with self._lock:
            began = self._clock.now()
            if anew or began >= self._until:
                self._counted = self._count()
                ended = self._clock.now()
                self._until = ended + max(STANDS_S, REST * (ended - began))
            return self._counted

    def lately(self, submit: Callable[[Callable[[], object]], object]) -> Counted:
        """As it was counted last, for whoever may not wait: where that stands no more it is counted anew, by what
        `submit` gives it to. Nothing before the first count is over."""
        if self._clock.now() >= self._until and not self._recounting:
            self._recounting = True
            submit(self._recount)
        return self._counted

    def _recount(self) -> None:
        try:
            self.take()
        finally:
            self._recounting = False

    def _count(self) -> Counted:
        counted: dict[bytes, dict[str, Holding]] = {}
        sizes = self._sizes()
        for tier in self._tiers:
            told = tier.holdings()
            if told is None:
                for place, records in self._index.places(tier.name).items():
                    space = counted.setdefault(place[:SIGNATURE_BYTES], {})
                    had = space.get(tier.name, Holding(0, 0))
                    size = record_bytes(sizes[place]) if place in sizes and not tier.shared else 0
                    space[tier.name] = Holding(had.records + records, had.bytes + records * size)
            else:
                for namespace, (records, size) in told.items():
                    counted.setdefault(namespace, {})[tier.name] = Holding(records, size)
        return counted

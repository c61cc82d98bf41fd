"""What was bound once and is not any more: what is known of it goes, with its last record what its records need known.

Whose a record is must be known while it is there, so that it counts for its tenant's quota and is found where that
tenant is erased. So it is looked, in the background, which of these namespaces have records still.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.erase import Erasure
from kvcache.cache.request import BoundCache
from kvcache.index.cost_classes import Kinds
from kvcache.index.index import Index
from kvcache.tier.record_codec import Coder


class Unbound:
    """`bounds`: those that there are. `binding`: held while one is made."""

    def __init__(
        self,
        index: Index,
        tiers: Sequence[str],
        coder: Coder,
        kinds: Kinds,
        erasure: Erasure,
        bounds: Callable[[], Sequence[BoundCache]],
        binding: threading.Lock,
    ) -> None:
        """`tiers`: our own."""
        self._index, self._tiers, self._coder, self._kinds, self._erasure = index, tiers, coder, kinds, erasure
        self._bounds, self._binding = bounds, binding
        self._added = 0
        self.places: set[bytes] = set()
        """Of which something is known still."""

    def add(self, gone: Collection[BoundCache]) -> None:
        """These are not bound any more: called with `binding` held. Then `look`, in the background."""
        self._added += 1
        bound = {each.id for each in self._bounds()}
        for each in gone:
            if each.id not in bound:
                self._coder.unbind(each.id)
        self.places |= {name for each in gone for name in _names(each)}

    def look(self) -> None:
        """Forget what has no record."""
        added = self._added
        held = set[bytes]().union(*(self._index.places(tier) for tier in self._tiers))
        with self._binding:
            if added != self._added:  # it may have records since: who added it looks after us
                return
            bound = {name for each in self._bounds() for name in _names(each)}
            gone = self.places - held - bound
            self.places -= gone | bound
            self._kinds.unbind(gone)
            left = {name[:SIGNATURE_BYTES] for name in held | bound}
            for namespace in {name[:SIGNATURE_BYTES] for name in gone} - left:
                self._erasure.unbind(namespace)


def _names(bound: BoundCache) -> Iterable[bytes]:
    return (place.name for place in (*bound.places, *bound.everywhere))

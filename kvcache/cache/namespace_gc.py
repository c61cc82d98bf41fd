"""What was bound once and is not any more: what is known of it goes, with its last record what its records need known.

Whose a record is must be known while it is there, so that it counts for its tenant's quota and is found where that
tenant is erased. So it is looked, in the background, which of these namespaces have records still.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.erase import Erasure
from kvcache.cache.request import CacheNamespace
from kvcache.index.cost_classes import CostClasses
from kvcache.index.index import Index
from kvcache.tier.record_codec import RecordCodec


class NamespaceGC:
    """`bounds`: those that there are. `binding`: held while one is made."""

    def __init__(
        self,
        index: Index,
        tiers: Sequence[str],
        record_codec: RecordCodec,
        cost_classes: CostClasses,
        erasure: Erasure,
        bounds: Callable[[], Sequence[CacheNamespace]],
        binding: threading.Lock,
    ) -> None:
        """`tiers`: our own."""
        self._index, self._tiers, self._record_codec, self._cost_classes, self._erasure = (
            index,
            tiers,
            record_codec,
            cost_classes,
            erasure,
        )
        self._bounds, self._bind_lock = bounds, binding
        self._added = 0
        self.places: set[bytes] = set()
        """Of which something is known still."""

    def add(self, removed: Collection[CacheNamespace]) -> None:
        """These are not bound any more: called with `binding` held. Then `look`, in the background."""
        self._added += 1
        bound = {each.id for each in self._bounds()}
        for each in removed:
            if each.id not in bound:
                self._record_codec.unbind(each.id)
        self.places |= {name for each in removed for name in _shard_names(each)}

    def collect(self) -> None:
        """Forget what has no record."""
        added = self._added
        held = set[bytes]().union(*(self._index.places(tier) for tier in self._tiers))
        with self._bind_lock:
            if added != self._added:  # it may have records since: who added it looks after us
                return
            bound = {name for each in self._bounds() for name in _shard_names(each)}
            removed = self.places - held - bound
            self.places -= removed | bound
            self._cost_classes.unbind(removed)
            remaining = {name[:SIGNATURE_BYTES] for name in held | bound}
            for namespace in {name[:SIGNATURE_BYTES] for name in removed} - remaining:
                self._erasure.unbind(namespace)


def _shard_names(bound: CacheNamespace) -> Iterable[bytes]:
    return (place.name for place in (*bound.places, *bound.all_shards))

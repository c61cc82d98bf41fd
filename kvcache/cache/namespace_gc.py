"""Garbage collection of the state of namespaces that are not bound any more.

The owner of a record must be known while the record exists. The record then counts for the tenant's quota, and an
erasure of the tenant finds it. The state of a namespace is therefore removed with its last record. A background pass
checks which unbound namespaces still have records.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Sequence

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.context import CacheContext
from kvcache.cache.erase import Erasure
from kvcache.cache.request import CacheNamespace


class NamespaceGC:
    """Collects unbound namespaces.

    Args:
        bounds: the current bindings.
        binding: the lock held while a binding is made.
    """

    def __init__(
        self,
        context: CacheContext,
        erasure: Erasure,
        handles: Callable[[], Sequence[CacheNamespace]],
        binding: threading.Lock,
    ) -> None:
        self._index, self._record_codec, self._cost_classes = context.index, context.record_codec, context.cost_classes
        self._tiers = [tier.name for tier in context.tiers if not tier.shared]
        self._erasure, self._handles, self._bind_lock = erasure, handles, binding
        self._added = 0
        self.shard_keys: set[bytes] = set()
        """Keys of shards whose state is still kept."""

    def add(self, removed: Collection[CacheNamespace]) -> None:
        """Add namespaces that are not bound any more.

        Call with `binding` held, then run `collect` in the background.
        """
        self._added += 1
        bound = {each.id for each in self._handles()}
        for each in removed:
            if each.id not in bound:
                self._record_codec.unbind(each.id)
        self.shard_keys |= {name for each in removed for name in _shard_keys_of(each)}

    def collect(self) -> None:
        """Remove the state of namespaces without a record."""
        added = self._added
        held = set[bytes]().union(*(self._index.records_by_shard(tier) for tier in self._tiers))
        with self._bind_lock:
            if added != self._added:  # the new ones may have records; the later `add` is followed by its own `collect`
                return
            bound = {name for each in self._handles() for name in _shard_keys_of(each)}
            removed = self.shard_keys - held - bound
            self.shard_keys -= removed | bound
            self._cost_classes.unbind(removed)
            remaining = {name[:SIGNATURE_BYTES] for name in held | bound}
            for namespace in {name[:SIGNATURE_BYTES] for name in removed} - remaining:
                self._erasure.unbind(namespace)


def _shard_keys_of(handle: CacheNamespace) -> Iterable[bytes]:
    return (ref.key for ref in (*handle.own_shards, *handle.all_shards))

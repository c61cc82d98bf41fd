"""Prefix lookups: how many blocks of a chain the servers hold, by probes and a cache of earlier answers.

A tail is stored behind its head, so a few rounds of sixteen probes find the end of a chain. The cache keeps an answer
while the server reports changes to the connection that asked (client tracking), or for 0.5 s without tracking.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from kvcache.block.record import Address
from kvcache.os_env import Clock
from kvcache.tier.redis.cluster import Topology
from kvcache.tier.redis.keys import KeyNames, is_head_of
from kvcache.tier.redis.pool import REDIRECT_REPLIES, ConnectionPool
from kvcache.tier.redis.store import Head, Store
from kvcache.tier.redis.wire import ErrorReply, RespConnection

MAX_CACHED_HEADS = 16_384
"""Keys cached for one server, at about 400 bytes of memory each."""
_UNTRACKED_TTL_S = 0.5


class HeadCache:
    """The first bytes of values by key, as read over one connection.

    Thread safety: none; one thread uses it.
    """

    def __init__(self, store: Store, clock: Clock, most: int = MAX_CACHED_HEADS) -> None:
        self._store, self._clock, self._most = store, clock, most
        self._wire: RespConnection | None = None
        self._heads: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heads)

    def heads(self, wire: RespConnection, names: Sequence[bytes]) -> list[Head]:
        """Return the same as `Store.heads`; reads only the heads that are not cached."""
        if wire is not self._wire:  # the server reports changes only to the connection that read the key
            self.forget()
            self._wire = wire
        wire.read_invalidations()
        self._changed(wire)
        now = self._clock.now()
        found: dict[bytes, Head] = {}
        for name in names:
            head, seen = self._heads.get(name, (b"", None))
            if seen is not None and (wire.tracked or seen > now - _UNTRACKED_TTL_S):
                found[name] = head
                self._heads.move_to_end(name)
        unknown = [name for name in names if name not in found]
        if unknown:
            heads = self._store.heads(wire, unknown)
            found.update(zip(unknown, heads, strict=True))
            self._heads.update(
                (name, (head, now))
                for name, head in zip(unknown, heads, strict=True)
                if not isinstance(head, ErrorReply)
            )
            while len(self._heads) > self._most:
                self._heads.popitem(last=False)
            self._changed(wire)  # keys that changed during the read
        return [found[name] for name in names]

    def _changed(self, wire: RespConnection) -> None:
        if wire.invalidated_keys is None:
            self._heads.clear()
        for name in wire.invalidated_keys or ():
            self._heads.pop(name, None)
        wire.invalidated_keys = []

    def forget(self) -> None:
        self._heads.clear()


class PrefixLookup:
    """Finds the end of a chain in the servers.

    Thread safety: none; one thread uses it.
    """

    def __init__(self, nodes: Topology, names: KeyNames, store: Store, clock: Clock) -> None:
        self._nodes, self._names, self._store, self._clock = nodes, names, store, clock
        self._head_caches: dict[ConnectionPool, HeadCache] = {}

    def match_prefix(self, addresses: Sequence[Address], deadline: float | None) -> int:
        """Return how many blocks of a chain the servers hold, counted from its head.

        A hole between probes shows when the blocks are read. Raises OSError where the topology cannot be read.
        """
        present, missing = 0, len(addresses)  # blocks before `present` exist; the block at `missing` does not
        while present < missing:
            step = -(-(missing - present) // 16)
            probes = sorted({present, *range(present + step - 1, missing, step)})
            probed = [addresses[at] for at in probes]
            for at, address, head in zip(probes, probed, self._heads(probed, deadline), strict=True):
                if isinstance(head, ErrorReply) or not is_head_of(head, address):
                    missing = at
                    break
                present = at + 1
        return present

    def _heads(self, addresses: Sequence[Address], deadline: float | None) -> list[Head]:
        names = self._names.records(addresses)
        heads = self._ask(names, deadline)
        moved = [i for i, head in enumerate(heads) if isinstance(head, ErrorReply) and head in REDIRECT_REPLIES]
        if moved:
            targets = [head.target for i in moved if isinstance(head := heads[i], ErrorReply)]
            redirected = self._ask([names[i] for i in moved], deadline, targets)
            for i, head in zip(moved, redirected, strict=True):
                heads[i] = head
        return heads

    def _ask(self, names: Sequence[bytes], deadline: float | None, targets: Sequence[str] = ()) -> list[Head]:
        heads: list[Head] = [b""] * len(names)
        for pool, mine, asking in self._nodes.partition(names, deadline, targets):
            head_cache = self._head_caches.get(pool)
            if head_cache is None:
                known = set(self._nodes.pools())
                self._head_caches = {pool: kept for pool, kept in self._head_caches.items() if pool in known}
                head_cache = self._head_caches[pool] = HeadCache(self._store, self._clock)
            try:
                work = partial(self._store.heads if asking else head_cache.heads, names=[names[i] for i in mine])
                found = pool.run(work, deadline, listening=not asking, asking=asking)
            except OSError:  # the heads of this server stay empty: a miss
                self._nodes.mark_stale()
                continue
            for i, head in zip(mine, found, strict=True):
                heads[i] = head
                if isinstance(head, ErrorReply) and head != "ASK":
                    self._nodes.mark_stale()
        return heads

    def forget(self) -> None:
        """Drop all cached heads."""
        for head_cache in self._head_caches.values():
            head_cache.forget()

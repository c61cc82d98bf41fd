"""How much of a chain is in the servers: by probes, and by what earlier ones saw.

A tail is not stored without its head, so the end of a chain is found by a few rounds of sixteen questions. What a
server answered is remembered for as long as it promises to tell when that changes (client tracking, of the connection
on which it was asked); without that promise, for a moment.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import partial

from kvcache.block.record import Address
from kvcache.os_env import Clock
from kvcache.tier.redis.cluster import Nodes
from kvcache.tier.redis.keys import Names, is_head_of
from kvcache.tier.redis.pool import ELSEWHERE, Pool
from kvcache.tier.redis.store import Head, Store
from kvcache.tier.redis.wire import Wire, Wrong

MOST_REMEMBERED = 16_384
"""Keys of one server, at about 400 bytes of memory each."""
_MOMENT_S = 0.5


class Memory:
    """How values begin, by key, as one connection was told. Not thread-safe."""

    def __init__(self, store: Store, clock: Clock, most: int = MOST_REMEMBERED) -> None:
        self._store, self._clock, self._most = store, clock, most
        self._wire: Wire | None = None
        self._heads: OrderedDict[bytes, tuple[bytes, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._heads)

    def heads(self, wire: Wire, names: Sequence[bytes]) -> list[Head]:
        """As `Store.heads`, asking only for what is not remembered."""
        if wire is not self._wire:  # what another connection was promised is void
            self.forget()
            self._wire = wire
        wire.hear()
        self._changed(wire)
        now = self._clock.now()
        found: dict[bytes, Head] = {}
        for name in names:
            head, seen = self._heads.get(name, (b"", None))
            if seen is not None and (wire.tracked or seen > now - _MOMENT_S):
                found[name] = head
                self._heads.move_to_end(name)
        unknown = [name for name in names if name not in found]
        if unknown:
            heads = self._store.heads(wire, unknown)
            found.update(zip(unknown, heads, strict=True))
            self._heads.update(
                (name, (head, now)) for name, head in zip(unknown, heads, strict=True) if not isinstance(head, Wrong)
            )
            while len(self._heads) > self._most:
                self._heads.popitem(last=False)
            self._changed(wire)  # while they were asked for
        return [found[name] for name in names]

    def _changed(self, wire: Wire) -> None:
        if wire.changed is None:
            self._heads.clear()
        for name in wire.changed or ():
            self._heads.pop(name, None)
        wire.changed = []

    def forget(self) -> None:
        self._heads.clear()


class Lookup:
    """Not thread-safe: one thread asks."""

    def __init__(self, nodes: Nodes, names: Names, store: Store, clock: Clock) -> None:
        self._nodes, self._names, self._store, self._clock = nodes, names, store, clock
        self._memories: dict[Pool, Memory] = {}

    def leading(self, addresses: Sequence[Address], deadline: float | None) -> int:
        """How many of a chain are there, from its head. A hole between probes shows when the blocks are read. OSError
        where that cannot be told."""
        here, missing = 0, len(addresses)  # the blocks before `here` are there; that at `missing` is not
        while here < missing:
            step = -(-(missing - here) // 16)
            probes = sorted({here, *range(here + step - 1, missing, step)})
            asked = [addresses[at] for at in probes]
            for at, address, head in zip(probes, asked, self._heads(asked, deadline), strict=True):
                if isinstance(head, Wrong) or not is_head_of(head, address):
                    missing = at
                    break
                here = at + 1
        return here

    def _heads(self, addresses: Sequence[Address], deadline: float | None) -> list[Head]:
        names = self._names.records(addresses)
        heads = self._ask(names, deadline)
        elsewhere = [i for i, head in enumerate(heads) if isinstance(head, Wrong) and head in ELSEWHERE]
        if elsewhere:
            places = [head.place for i in elsewhere if isinstance(head := heads[i], Wrong)]
            there = self._ask([names[i] for i in elsewhere], deadline, places)
            for i, head in zip(elsewhere, there, strict=True):
                heads[i] = head
        return heads

    def _ask(self, names: Sequence[bytes], deadline: float | None, places: Sequence[str] = ()) -> list[Head]:
        heads: list[Head] = [b""] * len(names)
        for pool, mine, asking in self._nodes.divide(names, deadline, places):
            memory = self._memories.get(pool)
            if memory is None:
                known = set(self._nodes.pools())
                self._memories = {pool: kept for pool, kept in self._memories.items() if pool in known}
                memory = self._memories[pool] = Memory(self._store, self._clock)
            try:
                work = partial(self._store.heads if asking else memory.heads, names=[names[i] for i in mine])
                found = pool.run(work, deadline, listening=not asking, asking=asking)
            except OSError:  # what it has is a miss
                self._nodes.doubt()
                continue
            for i, head in zip(mine, found, strict=True):
                heads[i] = head
                if isinstance(head, Wrong) and head != "ASK":
                    self._nodes.doubt()
        return heads

    def forget(self) -> None:
        """All that was remembered."""
        for memory in self._memories.values():
            memory.forget()

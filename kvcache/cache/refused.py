"""Blocks that a tier was meant to take and does not have: those that host memory still has, and a count of the others.

`flush` offers the first kind to the tier again. A block that leaves host memory first is lost, and each caller of
`flush` hears of it once. Memory is bounded: an entry belongs to a record in host memory, and counts are kept by
namespace.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from kvcache.block.record import Address
from kvcache.index.index import Index

NAMESPACES = 1 << 12
"""That are counted apart; the blocks of older ones count as anybody's."""
LEAST = 1 << 12
"""Entries that are kept without a look at host memory."""
ANY = b""
"""In place of a namespace that is not counted apart any more."""

WriteMode = Literal["write_through", "write_back", "on_second_use", "off"]
"""When a tier is meant to have a block: when it is stored, when it leaves host memory, when it is used again, never."""

Scope = Callable[[bytes], bool]
"""Whether a namespace is the caller's."""


class Tally:
    """Blocks counted up, by namespace. Not thread-safe."""

    def __init__(self) -> None:
        self.counts: dict[bytes, int] = {}

    def add(self, namespace: bytes, blocks: int) -> None:
        if namespace not in self.counts and len(self.counts) >= NAMESPACES:
            oldest = next(name for name in self.counts if name != ANY)
            self.counts[ANY] = self.counts.get(ANY, 0) + self.counts.pop(oldest)
        self.counts[namespace] = self.counts.get(namespace, 0) + blocks


def since(now: Mapping[bytes, int], before: dict[bytes, int], scope: Scope | None, *, anybodys: bool) -> int:
    """Blocks in the caller's scope that `before` does not have; it has them afterwards. `anybodys`: count those of no
    namespace as the caller's, so that a loss is reported to one caller too many and never to none."""
    blocks = 0
    for namespace, count in now.items():
        if scope is None or (anybodys if namespace == ANY else scope(namespace)):
            blocks += max(0, count - before.get(namespace, 0))
            before[namespace] = count
    return blocks


class Refused:
    """Of one tier. Thread-safe. A store pays nothing here until the tier has refused a block."""

    def __init__(self, index: Index, tier: str) -> None:
        self._index, self._number = index, index.tiers.index(tier)
        self._kept: dict[bytes, Address] = {}  # by name, what host memory still had when it was looked at last
        self._lost, self._reached = Tally(), Tally()
        self._lock = threading.Lock()

    def add(self, addresses: Sequence[Address], *, keep: bool = True) -> None:
        """The tier did not take these. `keep`: it is meant to have them while they are in host memory."""
        if not addresses:
            return
        with self._lock:  # before the look: a block that leaves meanwhile is found here, or seen to be absent
            self._kept.update((address.name, address) for address in addresses)
        masks = self._index.masks(addresses)
        with self._lock:
            for address, mask in zip(addresses, masks, strict=True):
                in_host, in_tier = mask & 1, mask >> self._number & 1
                stays = in_host and keep and not in_tier
                had = None if stays else self._kept.pop(address.name, None)
                if had is not None and not in_host and not in_tier:
                    self._lost.add(address.namespace, 1)
            full = len(self._kept) > max(LEAST, 2 * self._index.resident(self._index.tiers[0]))
        if full:
            self.kept()

    def left_host(self, names: Iterable[bytes]) -> None:
        """Host memory evicted these."""
        if not self._kept:
            return
        with self._lock:
            for address in [self._kept.pop(name) for name in names if name in self._kept]:
                self._lost.add(address.namespace, 1)

    def reached(self, addresses: Sequence[Address]) -> None:
        """The tier has these."""
        with self._lock:
            for namespace, blocks in Counter(address.namespace for address in addresses).items():
                self._reached.add(namespace, blocks)
            if self._kept:
                for address in addresses:
                    self._kept.pop(address.name, None)

    def kept(self, scope: Scope | None = None) -> list[Address]:
        """Those in the caller's scope that host memory has and the tier has not. The others are forgotten: an erased or
        expired block is no loss."""
        with self._lock:
            addresses = list(self._kept.values())
        masks = self._index.masks(addresses)
        stay = [mask & 1 and not mask >> self._number & 1 for mask in masks]
        with self._lock:
            for address, stays in zip(addresses, stay, strict=True):
                if not stays:
                    self._kept.pop(address.name, None)
        kept = [address for address, stays in zip(addresses, stay, strict=True) if stays]
        return [address for address in kept if scope is None or scope(address.namespace)]

    def counts(self) -> tuple[dict[bytes, int], dict[bytes, int]]:
        """Blocks that reached the tier, and blocks that were lost, since the cache was opened, by namespace."""
        with self._lock:
            return dict(self._reached.counts), dict(self._lost.counts)

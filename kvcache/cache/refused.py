"""Blocks that a tier was intended to take and does not have: those still in host memory, and a count of the lost ones.

`flush` offers the first kind to the tier again. A block evicted from host memory before that is lost, and each caller
of `flush` gets it reported once. Memory is bounded: an entry belongs to a record in host memory, and counts are kept by
namespace.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from kvcache.block.record import Address
from kvcache.index.index import Index

NAMESPACES = 1 << 12
"""The most namespaces with a count of their own; the counts of older ones are added under ANY."""
LEAST = 1 << 12
"""The number of entries up to which no check against host memory is made."""
ANY = b""
"""In place of a namespace without a count of its own."""

Scope = Callable[[bytes], bool]
"""Whether a namespace belongs to the caller."""


class Tally:
    """Block counts by namespace.

    Thread safety: none; callers hold a lock.
    """

    def __init__(self) -> None:
        self.counts: dict[bytes, int] = {}

    def add(self, namespace: bytes, blocks: int) -> None:
        if namespace not in self.counts and len(self.counts) >= NAMESPACES:
            oldest = next(name for name in self.counts if name != ANY)
            self.counts[ANY] = self.counts.get(ANY, 0) + self.counts.pop(oldest)
        self.counts[namespace] = self.counts.get(namespace, 0) + blocks


def since(
    now: Mapping[bytes, int], before: dict[bytes, int], scope: Scope | None, *, include_unattributed: bool
) -> int:
    """Blocks in the caller's scope that are not in `before` yet; adds them to it.

    `include_unattributed`: count those under ANY as the caller's. A loss may then be reported to more than one caller,
    but always to one.
    """
    blocks = 0
    for namespace, count in now.items():
        if scope is None or (include_unattributed if namespace == ANY else scope(namespace)):
            blocks += max(0, count - before.get(namespace, 0))
            before[namespace] = count
    return blocks


class Refused:
    """Refused blocks of one tier. A store costs nothing here until the tier has refused a block.

    Thread safety: any thread.
    """

    def __init__(self, index: Index, tier: str) -> None:
        self._index, self._number = index, index.tiers.index(tier)
        self._kept: dict[bytes, Address] = {}  # by name, blocks in host memory at the last check
        self._lost, self._reached = Tally(), Tally()
        self._lock = threading.Lock()

    def add(self, addresses: Sequence[Address], *, keep: bool = True) -> None:
        """Record that the tier did not take these. `keep`: they stay intended for it while they are in host memory."""
        if not addresses:
            return
        with self._lock:  # before the lookup: a block evicted meanwhile is found here, or seen to be absent
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
        """Record that host memory evicted these."""
        if not self._kept:
            return
        with self._lock:
            for address in [self._kept.pop(name) for name in names if name in self._kept]:
                self._lost.add(address.namespace, 1)

    def reached(self, addresses: Sequence[Address]) -> None:
        """Record that the tier has these."""
        with self._lock:
            for namespace, blocks in Counter(address.namespace for address in addresses).items():
                self._reached.add(namespace, blocks)
            if self._kept:
                for address in addresses:
                    self._kept.pop(address.name, None)

    def kept(self, scope: Scope | None = None) -> list[Address]:
        """Blocks in the caller's scope that host memory has and the tier lacks.

        Others are forgotten: erased or expired is no loss.
        """
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
        """Blocks that reached the tier and blocks that were lost, by namespace, since the cache was opened."""
        with self._lock:
            return dict(self._reached.counts), dict(self._lost.counts)

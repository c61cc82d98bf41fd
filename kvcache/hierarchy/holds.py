"""What requests keep from leaving: all together at most a quarter of each tier."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from kvcache.block.address import Address
from kvcache.block.record import record_bytes
from kvcache.hierarchy.index import Index
from kvcache.tier.tier import Tier

SHARE = 4


class Holds:
    """A claim is one list of (name, tier, bytes), taken head first as far as the share allows, given back whole."""

    Claim = list[tuple[bytes, int, int]]

    def __init__(self, index: Index, tiers: Sequence[Tier]) -> None:
        self._index, self._tiers = index, tiers
        self._held_bytes = [0] * len(tiers)
        self._lock = threading.Lock()

    def take(self, wanted: Sequence[tuple[Address, int]]) -> Claim:
        """Hold these (address, payload bytes), each counted at the nearest tier that has it."""
        names = [address.name for address, _ in wanted]
        claim: Holds.Claim = []
        with self._lock:
            for name, (_, payload_bytes), mask in zip(names, wanted, self._index.where(names), strict=True):
                if not mask:
                    break
                t = (mask & -mask).bit_length() - 1
                size = record_bytes(payload_bytes)
                if (self._held_bytes[t] + size) * SHARE > self._tiers[t].usage().capacity_bytes:
                    break
                if not self._index.hold([name]):
                    break
                self._held_bytes[t] += size
                claim.append((name, t, size))
        return claim

    def give_back(self, claim: Claim) -> None:
        with self._lock:
            for name, t, size in claim:
                self._held_bytes[t] -= size
                self._index.release([name])
        claim.clear()

    def held_bytes(self) -> dict[str, int]:
        return {tier.name: size for tier, size in zip(self._tiers, self._held_bytes, strict=True)}

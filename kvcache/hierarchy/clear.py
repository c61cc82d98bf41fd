"""Forget namespaces: every record of them, out of every tier. What is being loaded at the moment is still brought."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from kvcache.index.index import Index
from kvcache.tier.tier import Outcome, Tier

BATCH = 1024
CLEAR_S = 5.0
"""What a caller waits for stores that are on their way, at most."""


def clear(namespace: bytes, index: Index, tiers: Sequence[Tier]) -> int:
    """Records removed, counted in each tier. Last blocks first, so that no tail is ever without its head."""
    return sum(remove({namespace}, index, tier) for tier in tiers)


def remove(namespaces: Collection[bytes], index: Index, tier: Tier) -> int:
    removed = 0
    records = [address for address in tier.scan() if address.namespace in namespaces][::-1]
    for first in range(0, len(records), BATCH):
        batch = records[first : first + BATCH]
        for address in batch:
            index.discard(address, tier.name)  # before it goes: nobody is sent to where it was
        removed += tier.remove(batch).count(Outcome.DONE)
    return removed

"""Heads before tails, for tiers that tell what they have."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache.block.record import Address


def in_order(addresses: Sequence[Address]) -> list[Address]:
    """Each behind its parent, where both are here."""
    here = {(address.signature, address.group, address.shard) for address in addresses}
    children: dict[object, list[Address]] = {}
    ordered = []
    for address in addresses:
        parent = (address.parent, address.group, address.shard)
        if parent in here:
            children.setdefault(parent, []).append(address)
        else:
            ordered.append(address)
    for address in ordered:  # grows while it is walked
        ordered += children.pop((address.signature, address.group, address.shard), ())
    return ordered

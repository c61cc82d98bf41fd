"""What the plain index knows of one block at one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvcache.block.chain import SIGNATURE_BYTES

Name = tuple[bytes, bytes]  # place, signature
Standing = tuple[int, int, bytes, bytes]  # stamp, -depth, signature, place

UNKNOWN = b""
"""As a parent: it was not told."""


def names_of(place: bytes, signatures: bytes | bytearray | memoryview) -> Iterator[Name]:
    """Of packed signatures."""
    return ((place, bytes(signatures[i : i + SIGNATURE_BYTES])) for i in range(0, len(signatures), SIGNATURE_BYTES))


class Node:
    __slots__ = ("children", "depth", "holds", "known", "listed", "name", "parent", "stamp", "tiers", "uses")

    def __init__(self, name: Name, tiers: int, stamp: int) -> None:
        self.name = name
        self.parent = UNKNOWN  # signature of the block before, the namespace for the first one; while some tier has it
        self.known = False  # some tier has, or had it
        self.tiers = 0
        self.children = [0] * tiers  # how many of its children each tier has
        self.listed: list[tuple[int, int, int, int] | None] = [None] * tiers  # the order in which it stands
        self.depth = self.uses = self.holds = 0
        self.stamp = stamp

    @property
    def parent_name(self) -> Name | None:
        place, _ = self.name
        return (place, self.parent) if self.tiers and self.parent not in (UNKNOWN, place[:SIGNATURE_BYTES]) else None

    @property
    def standing(self) -> Standing:
        place, signature = self.name
        return self.stamp, -self.depth, signature, place


def descends(nodes: Mapping[Name, Node], node: Node, ancestor: Node) -> bool:
    """A chain that bites its own tail could never leave."""
    while node is not ancestor:
        if node.parent_name is None:
            return False
        node = nodes[node.parent_name]
    return True

"""What is remembered of the blocks that left last: the plain twin of `csrc/host/ghosts`, and of `csrc/host/recall`.

A name is not kept, only 48 bits of its keyed hash, which is enough for counting; so what one process remembers, another
that has its secret can."""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from kvcache.block.chain import SIGNATURE_BYTES

# What the plain index knows of one block at one place.

BlockName = tuple[bytes, bytes]  # place, signature
OrderPosition = tuple[int, int, bytes, bytes]  # stamp, -depth, signature, place

UNKNOWN_PARENT = b""
"""As a parent: it was not told."""


def block_names(place: bytes, signatures: bytes | bytearray | memoryview) -> Iterator[BlockName]:
    """Of packed signatures."""
    return ((place, bytes(signatures[i : i + SIGNATURE_BYTES])) for i in range(0, len(signatures), SIGNATURE_BYTES))


class Node:
    __slots__ = ("children", "depth", "holds", "known", "listed", "name", "parent", "stamp", "tiers", "uses")

    def __init__(self, name: BlockName, tiers: int, stamp: int) -> None:
        self.name = name
        self.parent = (
            UNKNOWN_PARENT  # signature of the block before, the namespace for the first one; while some tier has it
        )
        self.known = False  # some tier has, or had it
        self.tiers = 0
        self.children = [0] * tiers  # how many of its children each tier has
        self.listed: list[tuple[int, int, int, int] | None] = [None] * tiers  # the order in which it stands
        self.depth = self.uses = self.holds = 0
        self.stamp = stamp

    @property
    def parent_name(self) -> BlockName | None:
        place, _ = self.name
        return (
            (place, self.parent)
            if self.tiers and self.parent not in (UNKNOWN_PARENT, place[:SIGNATURE_BYTES])
            else None
        )

    @property
    def standing(self) -> OrderPosition:
        place, signature = self.name
        return self.stamp, -self.depth, signature, place


def is_descendant(nodes: Mapping[BlockName, Node], node: Node, ancestor: Node) -> bool:
    """A chain that bites its own tail could never leave."""
    while node is not ancestor:
        if node.parent_name is None:
            return False
        node = nodes[node.parent_name]
    return True


_WORD = (1 << 64) - 1


class LastUse(NamedTuple):
    stamp: int
    uses: int


def _fold(a: int, b: int) -> int:
    product = a * b
    return (product ^ product >> 64) & _WORD


def _words(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 8}Q", data)


class ReferenceGhosts:
    def __init__(self) -> None:
        self.secret = tuple(secrets.randbits(64) for _ in range(3))
        self._left: dict[int, tuple[int, LastUse]] = {}  # by print
        self._departures: deque[int] = deque()
        self._departed, self._spared = 0, 0

    def __len__(self) -> int:
        return len(self._left)

    def print(self, name: BlockName) -> int:
        """The lower 32 and above them the upper 16 bits of its hash."""
        place, signature = name
        one, two, three = self.secret
        space = _fold(_words(place[:8])[0] ^ one, _words(place[8:16])[0] ^ two)
        of_place = _fold(_words(place[-8:])[0] ^ three, _words(place[-16:-8])[0] ^ space)
        first, second = _words(signature[:16])
        hashed = _fold(first ^ one, second ^ of_place)
        return hashed & 0xFFFFFFFF | hashed >> 48 << 32

    def add(self, name: BlockName, use: LastUse) -> None:
        """The block left; it is not here."""
        self.put(self.print(name), use)

    def put(self, print_: int, use: LastUse) -> bool:
        """False where it is here already."""
        if print_ in self._left:
            return False
        self._left[print_] = self._departed, use
        self._departures.append(print_)
        self._departed += 1
        return True

    def find(self, name: BlockName) -> LastUse | None:
        entry = self._left.get(self.print(name)) if self._left else None
        return None if entry is None else entry[1]

    def take(self, name: BlockName) -> LastUse | None:
        """As `find`, and then it is here no longer."""
        entry = self._left.pop(self.print(name), None) if self._left else None
        return None if entry is None else entry[1]

    def spare(self) -> None:
        """What is here may stay, however few departures `trim` is to leave, until `press` says otherwise."""
        self._spared = len(self._departures)

    def press(self, departures: int, count: int) -> None:
        """So many of the spared, of those beyond `departures`, may stay no longer."""
        self._spared = max(0, min(self._spared, len(self._departures) - departures) - count)

    def newest(self, most: int) -> Iterator[tuple[int, LastUse]]:
        """Of the last departures, the first of them first, those that are here: print and use."""
        skipped = len(self._departures) - min(most, len(self._departures))
        for number, print_ in enumerate(islice(self._departures, skipped, None), skipped):
            entry = self._left.get(print_)
            if entry is not None and entry[0] == self._departed - len(self._departures) + number:
                yield print_, entry[1]

    def trim(self, departures: int) -> Iterator[LastUse]:
        """Forget the first to leave until at most so many departures and the spared are remembered, those that came
        back among them; each that did not."""
        while len(self._departures) > departures + self._spared:
            number = self._departed - len(self._departures)
            print_ = self._departures.popleft()
            entry = self._left.get(print_)
            if entry is not None and entry[0] == number:
                del self._left[print_]
                yield entry[1]

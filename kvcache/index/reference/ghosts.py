"""Nodes of the reference index, and ghosts: the twin of `ghost_history` and `history_snapshot` in csrc/host.

A ghost is the remembered use of an evicted block. Its name is not stored, only 48 bits of a keyed hash, which is enough
for counting. Another process that has the secret can read the ghosts of an earlier one.
"""

from __future__ import annotations

import secrets
import struct
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

from kvcache.block.chain import SIGNATURE_BYTES

# Nodes: the reference index's state of one block of one shard.

BlockName = tuple[bytes, bytes]  # shard key, signature
OrderPosition = tuple[int, int, bytes, bytes]  # stamp, -depth, signature, shard key

UNKNOWN_PARENT = b""
"""The parent of a block whose parent was not given."""


def block_names(shard_key: bytes, signatures: bytes | bytearray | memoryview) -> Iterator[BlockName]:
    """Names of packed signatures."""
    return ((shard_key, bytes(signatures[i : i + SIGNATURE_BYTES])) for i in range(0, len(signatures), SIGNATURE_BYTES))


class Node:
    __slots__ = ("children", "depth", "holds", "known", "listed", "name", "parent", "stamp", "tiers", "uses")

    def __init__(self, name: BlockName, tiers: int, stamp: int) -> None:
        self.name = name
        self.parent = (
            # the signature of the block before, or the namespace for the first; valid while some tier has the node
            UNKNOWN_PARENT
        )
        self.known = False  # some tier has it, or had it
        self.tiers = 0
        self.children = [0] * tiers  # by tier, the number of its children
        self.listed: list[tuple[int, int, int, int] | None] = [None] * tiers  # by tier, the order that contains it
        self.depth = self.uses = self.holds = 0
        self.stamp = stamp

    @property
    def parent_name(self) -> BlockName | None:
        shard_key, _ = self.name
        return (
            (shard_key, self.parent)
            if self.tiers and self.parent not in (UNKNOWN_PARENT, shard_key[:SIGNATURE_BYTES])
            else None
        )

    @property
    def standing(self) -> OrderPosition:
        shard_key, signature = self.name
        return self.stamp, -self.depth, signature, shard_key


def is_descendant(nodes: Mapping[BlockName, Node], node: Node, ancestor: Node) -> bool:
    """Whether a link would close a cycle: no block of a cycle could ever be evicted."""
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
        self._evicted: dict[int, tuple[int, LastUse]] = {}  # by hash
        self._departures: deque[int] = deque()
        self._evictions, self._spared = 0, 0

    def __len__(self) -> int:
        return len(self._evicted)

    def print(self, name: BlockName) -> int:
        """The lower 32 bits of the name's hash, and above them its upper 16 bits."""
        shard_key, signature = name
        one, two, three = self.secret
        space = _fold(_words(shard_key[:8])[0] ^ one, _words(shard_key[8:16])[0] ^ two)
        of_shard = _fold(_words(shard_key[-8:])[0] ^ three, _words(shard_key[-16:-8])[0] ^ space)
        first, second = _words(signature[:16])
        hashed = _fold(first ^ one, second ^ of_shard)
        return hashed & 0xFFFFFFFF | hashed >> 48 << 32

    def add(self, name: BlockName, use: LastUse) -> None:
        """Remember an evicted block that is not remembered yet."""
        self.put(self.print(name), use)

    def put(self, print_: int, use: LastUse) -> bool:
        """False if it is already remembered."""
        if print_ in self._evicted:
            return False
        self._evicted[print_] = self._evictions, use
        self._departures.append(print_)
        self._evictions += 1
        return True

    def find(self, name: BlockName) -> LastUse | None:
        entry = self._evicted.get(self.print(name)) if self._evicted else None
        return None if entry is None else entry[1]

    def take(self, name: BlockName) -> LastUse | None:
        """As `find`, and remove it."""
        entry = self._evicted.pop(self.print(name), None) if self._evicted else None
        return None if entry is None else entry[1]

    def spare(self) -> None:
        """Exempt the current ghosts from `trim`, whatever its limit, until `press` lowers the number."""
        self._spared = len(self._departures)

    def press(self, departures: int, count: int) -> None:
        """End the exemption of `count` ghosts, of those beyond `departures`."""
        self._spared = max(0, min(self._spared, len(self._departures) - departures) - count)

    def newest(self, most: int) -> Iterator[tuple[int, LastUse]]:
        """Hash and use of the last `most` evicted blocks that are still remembered, oldest first."""
        skipped = len(self._departures) - min(most, len(self._departures))
        for number, print_ in enumerate(islice(self._departures, skipped, None), skipped):
            entry = self._evicted.get(print_)
            if entry is not None and entry[0] == self._evictions - len(self._departures) + number:
                yield print_, entry[1]

    def trim(self, departures: int) -> Iterator[LastUse]:
        """Forget the oldest evictions beyond `departures` and the exempt ones; yields the ghosts forgotten.

        Blocks that have returned count as evictions but are not yielded.
        """
        while len(self._departures) > departures + self._spared:
            number = self._evictions - len(self._departures)
            print_ = self._departures.popleft()
            entry = self._evicted.get(print_)
            if entry is not None and entry[0] == number:
                del self._evicted[print_]
                yield entry[1]

"""With what the prompts of late begin alike: the prefixes that at least two of them share, the most valuable first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.observe.asked import Asked, shared_blocks

NAME_BYTES = 8
"""Of the last block's signature: what a person calls a prefix by, in hexadecimal."""
NEARLY = 0.9
"""A prefix is left out where a longer one is begun by nearly all of its requests: that one says more."""


@dataclass(frozen=True, slots=True)
class Prefix:
    namespace: bytes
    signature: bytes  # of its last block
    blocks: int
    block_tokens: int
    requests: int
    found_blocks: int  # of these requests together, within the prefix
    last: float  # when it was asked for last, in seconds since 1970

    @property
    def name(self) -> str:
        return self.signature[:NAME_BYTES].hex()

    @property
    def saved_blocks(self) -> int:
        """What all requests but the first need not compute."""
        return (self.requests - 1) * self.blocks


def prefixes(asked: Iterable[Asked], most: int) -> list[Prefix]:
    """At most so many, of prompts in any order."""
    ordered = sorted((a for a in asked if a.blocks), key=lambda a: (a.namespace, a.packed))
    found = [
        prefix for _, group in groupby(ordered, key=lambda a: a.namespace) for prefix in _of_namespace(list(group))
    ]
    return sorted(found, key=lambda p: (-p.saved_blocks * p.block_tokens, p.signature))[:most]


def _of_namespace(chains: Sequence[Asked]) -> Iterator[Prefix]:
    """`chains` in the order of their signatures: those that begin alike stand together. Each stretch of neighbours that
    share more blocks than it shares with those around it is one prefix."""
    open_: list[tuple[int, int, int]] = []  # blocks shared, the first of the stretch, most requests of one within it
    for i in range(1, len(chains) + 1):
        shared = shared_blocks(chains[i - 1].packed, chains[i].packed) if i < len(chains) else 0
        first, within = i - 1, 0
        while open_ and open_[-1][0] > shared:
            blocks, first, longer = open_.pop()
            requests = i - first
            if longer < NEARLY * requests:
                yield _prefix(chains[first:i], blocks)
            within = max(within, requests)
            if open_ and open_[-1][0] > shared:
                above = open_.pop()
                open_.append((above[0], above[1], max(above[2], within)))
        if open_ and open_[-1][0] == shared:
            above = open_.pop()
            open_.append((above[0], above[1], max(above[2], within)))
        elif shared:
            open_.append((shared, first, within))


def _prefix(chains: Sequence[Asked], blocks: int) -> Prefix:
    one = chains[0]
    return Prefix(
        one.namespace,
        one.signature(blocks - 1),
        blocks,
        one.block_tokens,
        len(chains),
        sum(min(blocks, each.found) for each in chains),
        max(each.time for each in chains),
    )


def named(asked: Iterable[Asked], name: str) -> tuple[Asked, int] | None:
    """The newest prompt with a block of this name, and up to which block (excluded) the prefix goes."""
    try:
        wanted = bytes.fromhex(name)
    except ValueError:
        return None
    if len(wanted) != NAME_BYTES:
        return None
    for each in asked:
        at = each.packed.find(wanted)
        while at >= 0:
            if at % SIGNATURE_BYTES == 0:
                return each, at // SIGNATURE_BYTES + 1
            at = each.packed.find(wanted, at + 1)
    return None

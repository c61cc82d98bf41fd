"""The records of a store as runs, in which each record follows its parent in the same namespace, group and shard.

A million records are restored in as many steps as there are chains. numpy handles all entries at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.block.layout import Shard
from kvcache.block.record import Address
from kvcache.tier.nvme.journal import UNKNOWN

_MAX_DOUBLINGS = 40  # ends the loop on a cycle of parents, which only damage can make

IntArray = NDArray[np.int64]


def runs(entries: NDArray[np.void], namespaces: Mapping[int, bytes]) -> Iterator[tuple[Address, bytes]]:
    """Yield put entries as runs, each after the run that holds its first record's parent.

    Yields:
        The address of the run's first record, and the signatures of all its records, concatenated.
    """
    if not len(entries):
        return
    parents = _parents(entries)
    first, position = _runs(parents)
    order = np.lexsort((position, first, _depths(parents)[first]))
    signatures = entries["signature"][order]
    starts = np.flatnonzero(position[order] == 0).tolist()
    heads = entries[order[starts]]
    shards: dict[bytes, Shard] = {}
    for row, start, end in zip(heads, starts, [*starts[1:], len(order)], strict=True):
        packed = row["shard"].tobytes()
        shard = shards.get(packed) or shards.setdefault(packed, Shard.unpack(packed))
        parent = row["parent"].tobytes()
        yield (
            Address(
                namespaces[int(row["namespace"])],
                row["signature"].tobytes(),
                b"" if parent == UNKNOWN else parent,
                int(row["group"]),
                shard,
            ),
            signatures[start:end].tobytes(),
        )


def scan(found: Iterable[tuple[Address, bytes]]) -> Iterator[Address]:
    """Yield the records of runs one by one."""
    for head, signatures in found:
        yield head
        for at in range(SIGNATURE_BYTES, len(signatures), SIGNATURE_BYTES):
            signature, parent = signatures[at : at + SIGNATURE_BYTES], signatures[at - SIGNATURE_BYTES : at]
            yield Address(head.namespace, signature, parent, head.group, head.shard)


def _parents(entries: NDArray[np.void]) -> IntArray:
    """Return the position of each record's parent among the entries; -1 where it is not here."""
    signature, parent = _words(entries["signature"]), _words(entries["parent"])
    columns = [entries["namespace"].astype(np.uint64), entries["group"].astype(np.uint64)]
    columns.append(_words(entries["shard"])[:, 0])
    mixed = columns[0] * np.uint64(0x9E3779B97F4A7C15) ^ columns[1] * np.uint64(0xC2B2AE3D27D4EB4F) ^ columns[2]
    own = signature[:, 0] ^ mixed
    order = np.argsort(own, kind="stable")
    found = order[np.minimum(np.searchsorted(own[order], parent[:, 0] ^ mixed), len(own) - 1)]
    same = (signature[found] == parent).all(axis=1)
    for column in columns:
        same &= column[found] == column
    return np.where(same, found, -1)


def _words(column: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return np.ascontiguousarray(column).view(np.uint64)


def _depths(parents: IntArray) -> IntArray:
    """Return how many ancestors of each record are here."""
    depths = (parents >= 0).astype(np.int64)
    for _ in range(_MAX_DOUBLINGS):
        reached = parents >= 0
        if not reached.any():
            break
        depths = np.where(reached, depths + depths[parents], depths)
        parents = np.where(reached, parents[parents], -1)
    return depths


def _runs(parents: IntArray) -> tuple[IntArray, IntArray]:
    """Return the first record of each record's run, and the distance to it.

    One of a parent's children continues its run.
    """
    positions = np.arange(len(parents))
    child = np.full(len(parents), -1)
    child[parents[parents >= 0]] = positions[parents >= 0]
    parents = np.where((parents >= 0) & (child[parents] == positions), parents, -1)
    first = np.where(parents >= 0, parents, positions)
    for _ in range(_MAX_DOUBLINGS):
        further = first[first]
        if (further == first).all():
            break
        first = further
    return first, _depths(parents)

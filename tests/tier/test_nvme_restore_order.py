"""Runs of records: all of them, once, heads before tails, however they hang together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvcache.block.record import Address
from kvcache.tier.nvme.journal import COLUMNS, PUT, UNKNOWN, Entry
from kvcache.tier.nvme.restore_order import runs
from tests.tier.blocks import SHARD, chain, namespace

NAMESPACES = {0: namespace(0), 7: namespace(1)}
NUMBERS = {name: number for number, name in NAMESPACES.items()}


def entries(addresses: list[Address]) -> np.ndarray:
    packed = [
        Entry(PUT, 0, a.group, a.shard.pack(), NUMBERS[a.namespace], a.signature, a.parent or UNKNOWN).pack()
        for a in addresses
    ]
    return np.frombuffer(b"".join(packed), COLUMNS)


def told(addresses: list[Address]) -> Iterator[Address]:
    for head, signatures in runs(entries(addresses), NAMESPACES):
        parent = head.parent
        for at in range(0, len(signatures), 32):
            yield replace(head, signature=signatures[at : at + 32], parent=parent)
            parent = signatures[at : at + 32]


def branch(of: Address, length: int, seed: int) -> list[Address]:
    """Records behind another one."""
    found = [replace(a, namespace=of.namespace) for a in chain(length, seed=seed)]
    return [replace(a, parent=of.signature if i == 0 else a.parent) for i, a in enumerate(found)]


def test_a_chain_is_one_run() -> None:
    blocks = chain(50)
    ((head, signatures),) = runs(entries(blocks[::-1]), NAMESPACES)
    assert head == blocks[0]
    assert signatures == b"".join(a.signature for a in blocks)
    assert list(runs(entries([]), NAMESPACES)) == []


def test_groups_shards_and_namespaces_are_separate_runs() -> None:
    """The same signatures under another group or shard; another namespace's parent is no parent."""
    blocks = chain(6)
    all_of_them = [
        *blocks,
        *(replace(a, group=3) for a in blocks),
        *(replace(a, shard=replace(SHARD, first_head=2)) for a in blocks),
        *(replace(a, namespace=namespace(1)) for a in blocks),
    ]
    found = list(runs(entries(all_of_them), NAMESPACES))
    assert [len(signatures) // 32 for _, signatures in found] == [6] * 4
    assert set(told(all_of_them)) == set(all_of_them)


@given(st.data())
def test_any_tree_is_restored_heads_first(data: st.DataObject) -> None:
    blocks = chain(data.draw(st.integers(1, 12)))
    for seed in range(1, data.draw(st.integers(1, 6))):
        stem = data.draw(st.sampled_from(blocks))
        blocks += branch(stem, data.draw(st.integers(1, 5)), seed)
    left = data.draw(st.lists(st.sampled_from(blocks), unique=True, min_size=1))
    unknown = data.draw(st.sets(st.sampled_from(left), max_size=2))
    left = [replace(a, parent=b"") if a in unknown else a for a in left]
    found = list(told(left))
    assert sorted(found, key=lambda a: a.signature) == sorted(left, key=lambda a: a.signature)
    place = {a.signature: i for i, a in enumerate(found)}
    for i, address in enumerate(found):
        assert place.get(address.parent, -1) < i
    heads = sum(1 for _ in runs(entries(left), NAMESPACES))
    here = {a.signature for a in left}
    assert heads >= len([a for a in left if a.parent not in here])

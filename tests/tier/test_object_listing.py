"""What a process learns from a store's listing: page by page, as far as it has room, and no caller waits for all."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.record import Address
from kvcache.testing.tier import chain, intact, record, write
from kvcache.tier.object import bucket, manifest, pack, store
from kvcache.tier.object.keys import PackLocation
from kvcache.tier.tier import Outcome
from tests.peer.s3_server import MISSING, shared
from tests.tier.tier_files import OpenObjects

DONE, NOT_FOUND, TIMED_OUT = Outcome.DONE, Outcome.NOT_FOUND, Outcome.TIMED_OUT


@pytest.fixture
def chains(opened: OpenObjects, monkeypatch: pytest.MonkeyPatch) -> list[list[Address]]:
    """Six packs of two records, which a listing names two at a time."""
    monkeypatch.setattr(bucket, "PAGE_OBJECTS", 2)
    made = [chain(2, seed=seed) for seed in range(6)]
    writer = opened()
    assert {outcome for each in made for outcome in write(writer, each)} == {DONE}
    return made


def tails(chains: Sequence[Sequence[Address]]) -> list[Address]:
    """What only a listing tells of: no pack bears their names."""
    return [each[1] for each in chains]


def test_listed_pages_stay_if_a_later_page_fails(
    opened: OpenObjects, chains: list[list[Address]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = opened()
    pages, heads = tier._bucket.pages, tier._bucket.heads
    come, read = [2], list[int]()

    def some(prefix: str) -> Iterator[Any]:
        for number, page in enumerate(pages(prefix)):
            if number == come[0]:
                raise TimeoutError("timeout")
            yield page

    def counted(paths: Sequence[str], *given: Any) -> Any:
        read.append(len(paths))
        return heads(paths, *given)

    monkeypatch.setattr(tier._bucket, "pages", some)
    monkeypatch.setattr(tier._bucket, "heads", counted)
    assert tier.contains(tails(chains)) == (Outcome.TIMED_OUT,) * 6  # an unlisted block is not reported absent
    assert len(tier._manifest.packs(chains[0][0].namespace)) == 4
    come[0] = 99
    assert tier.contains(tails(chains)) == (DONE,) * 6
    assert read == [2, 2, 2]


def test_a_long_listing_delays_no_caller(
    opened: OpenObjects, chains: list[list[Address]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it goes on, what came of it is known, and the rest is found by its name."""
    monkeypatch.setattr(manifest, "_DEADLINE_SHARE", 0.001)
    tier = opened()
    pages, go_on, came = tier._bucket.pages, threading.Event(), threading.Event()

    def slow(prefix: str) -> Iterator[Any]:
        for page in pages(prefix):
            yield page
            came.set()
            assert go_on.wait(60)

    monkeypatch.setattr(tier._bucket, "pages", slow)
    try:
        tier.contains(tails(chains))
        assert came.wait(60)
        assert sorted(tier.contains(tails(chains)), key=str) == sorted((TIMED_OUT,) * 4 + (DONE,) * 2, key=str)
        assert [tier.match_prefix(each).result(60) for each in chains] == [2] * 6
        assert all(intact(tier, each) for each in chains)
        assert write(tier, chain(2, seed=9)) == (DONE, DONE)
    finally:
        go_on.set()


def test_a_late_listing_makes_no_block_absent(
    opened: OpenObjects, chains: list[list[Address]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one and a later one: for a lookup, a read and a removal."""
    monkeypatch.setattr(manifest, "_DEADLINE_SHARE", 0.001)
    (block,), again = tails(chains[:1]), chain(3, seed=9)[2:]
    cold, known = opened(), opened(refresh_s=0)
    assert known.contains(again) == (NOT_FOUND,)
    go_on = threading.Event()

    def late(prefix: str) -> Iterator[Any]:
        assert go_on.wait(60)
        yield from ()

    monkeypatch.setattr(cold._bucket, "pages", late)
    monkeypatch.setattr(known._bucket, "pages", late)
    try:
        assert cold.contains([block]) == cold.remove([block]) == (TIMED_OUT,)
        assert cold.read([block], [record(block)]) == (TIMED_OUT,)
        assert known.contains(again) == (TIMED_OUT,)
        assert known.contains([block]) == (DONE,)
    finally:
        go_on.set()


def test_a_refused_listing_makes_no_block_absent(opened: OpenObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an earlier one came: what it said is too old to say that a block is not there."""
    blocks, tier = chain(3), opened(refresh_s=0)
    assert tier.contains(blocks) == (NOT_FOUND,) * 3

    def refused(prefix: str) -> Iterator[Any]:
        raise bucket.RefusedError("failed")

    monkeypatch.setattr(tier._bucket, "pages", refused)
    assert tier.contains(blocks) == (TIMED_OUT,) * 3


def test_the_manifest_is_bounded_and_the_rest_found_by_name(
    opened: OpenObjects, chains: list[list[Address]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MAX_RECORDS", 5)
    tier = opened()
    assert sorted(tier.contains(tails(chains)), key=str) == sorted((NOT_FOUND,) * 4 + (DONE,) * 2, key=str)
    for each in [*chains, *chains]:
        tier._manifest._missing.clear()
        assert tier.match_prefix(each).result(60) == 2
        assert intact(tier, each)
        assert sum(len(pack.table.rows) for pack in tier._manifest.packs(each[0].namespace)) == 4
    assert write(tier, chain(9, seed=9)) == (DONE,) * 9  # more than there is room for
    assert sorted(tier.scan(), key=str) == sorted([a for each in [*chains, chain(9, seed=9)] for a in each], key=str)
    assert tier.check() == []
    assert tier.purge(chains[0][0].namespace) == 21
    assert list(tier.scan()) == []


def folder(tmp_path: Path, namespace: bytes) -> Path:
    (found,) = tmp_path.rglob(namespace.hex())
    return found


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize("where", ["namespace", "group", "name"])
def test_a_pack_copied_to_another_key_is_ignored(
    opened: OpenObjects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, listed: bool
) -> None:
    """A sound one: asked for by its name or met in a listing, it is no hit, is counted, and takes no room."""
    blocks = chain(4)
    write(opened(), blocks)
    wrong = {
        "namespace": replace(blocks[0], namespace=b"\xff" * 32),
        "group": replace(blocks[0], group=1),
        "name": replace(blocks[0], signature=b"\xee" * 32, parent=b""),
    }[where]
    tier = opened()
    names = tier._manifest._names
    to = folder(tmp_path, blocks[0].namespace).parents[2] / names.pack(PackLocation.of(wrong), wrong.signature)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(next(folder(tmp_path, blocks[0].namespace).rglob(blocks[0].signature.hex())).read_bytes())
    monkeypatch.setattr(manifest, "MAX_RECORDS", 6)
    for times in range(1, 5):
        if listed:
            assert tier.contains([blocks[0]]) == (DONE,)
            tier._manifest.refresh(wrong.namespace, None, now=True)
            assert tier._manifest.find([wrong], None, probe=False) == [NOT_FOUND]
        else:
            assert not tier._manifest.probe(wrong, None)
            tier._manifest._missing.clear()
        assert tier.counters["foreign"] >= times
        assert tier._manifest._records == (4 if listed else 0)
    assert intact(tier, blocks)
    other = chain(4, seed=1)
    assert write(tier, other) == (DONE,) * 4  # makes room
    assert intact(tier, other)
    assert write(tier, [wrong]) == (DONE,)  # in its place, where no reader could read
    assert intact(opened(), [wrong])


def test_a_namespace_of_large_packs_evicts_no_other(opened: OpenObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound is in records, and so is who has most of them."""
    monkeypatch.setattr(manifest, "MAX_RECORDS", 24)
    tier, small = opened(), [chain(1, seed=seed) for seed in range(6)]
    other = b"\xaa" * 32
    for each in small:
        assert write(tier, each) == (DONE,)
    for seed in range(10, 16):
        assert write(tier, [replace(a, namespace=other) for a in chain(8, seed=seed)]) == (DONE,) * 8
    known = tier._manifest
    assert known.find([each[0] for each in small], None, probe=False) != [NOT_FOUND] * 6
    assert len(known.packs(small[0][0].namespace)) == 6
    assert [len(pack.table.rows) for pack in known.packs(other)] == [8, 8]
    assert known._records == sum(space.records for space in known._known.values()) == 22


@pytest.mark.parametrize("listed", [False, True])
def test_an_oversized_pack_evicts_no_other(opened: OpenObjects, monkeypatch: pytest.MonkeyPatch, listed: bool) -> None:
    """Whoever can write to the store can make one that is sound; neither its rows nor what was known go for it."""
    blocks, other, much = chain(4), chain(4, seed=1), chain(5, seed=2)
    assert write(opened(), much) == (DONE,) * 5  # by who takes so many
    monkeypatch.setattr(pack, "MAX_ROWS", 4)
    monkeypatch.setattr(store, "MAX_ROWS", 4)
    monkeypatch.setattr(manifest, "MAX_RECORDS", 8)
    tier = opened()
    assert write(tier, blocks) == write(tier, other) == (DONE,) * 4
    known = tier._manifest
    if listed:
        known.refresh(much[0].namespace, None, now=True)
    assert known.find([much[0]], None) == [NOT_FOUND]
    assert tier.counters["foreign"] > 0
    assert len(known.packs(blocks[0].namespace)) == 2
    assert intact(tier, blocks + other)
    monkeypatch.setattr(manifest, "MAX_RECORDS", 32)
    longer = chain(9, seed=3)
    assert write(tier, longer) == (DONE,) * 9
    assert sorted(len(each.table.rows) for each in known.packs(longer[0].namespace)) == [1, 4, 4, 4, 4]
    assert intact(opened(), longer)


def test_a_lookup_larger_than_the_manifest_ends(opened: OpenObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pack's new entries push out another that was asked for as well."""
    chains = [chain(4, seed=seed) for seed in range(3)]
    writer = opened()
    for each in chains:
        assert write(writer, each) == (DONE,) * 4
    monkeypatch.setattr(manifest, "MAX_RECORDS", 8)
    tier = opened()
    found = tier._manifest.find([address for each in chains for address in each], None)
    assert found.count(NOT_FOUND) == 4


@pytest.mark.parametrize(("stores", "rounds"), [(0, 1), (2, 3), (99, 3)])
def test_a_purge_repeats_while_others_store(
    opened: OpenObjects, chains: list[list[Address]], monkeypatch: pytest.MonkeyPatch, stores: int, rounds: int
) -> None:
    """What is stored while it deletes goes too, for so many rounds; who stores for longer is an error, not an end
    that never comes."""
    tier, other, left = opened(), opened(), [chain(1, seed=9 + i) for i in range(stores)]
    delete, deleted = tier._bucket.delete, list[int]()

    def meanwhile(paths: Sequence[str], deadline: float | None) -> None:
        delete(paths, deadline)
        deleted.append(len(paths))
        if left:
            assert write(other, left.pop()) == (DONE,)

    monkeypatch.setattr(tier._bucket, "delete", meanwhile)
    namespace = chains[0][0].namespace
    if stores < 3:
        assert tier.purge(namespace) == 12
        assert list(opened().scan()) == []
    else:
        with pytest.raises(bucket.RefusedError, match="stored meanwhile"):
            tier.purge(namespace)
        assert len(list(opened().scan())) == 1
    assert deleted == [6] + [1] * (rounds - 1)


@pytest.mark.skipif(bool(MISSING["seaweedfs"]), reason=MISSING["seaweedfs"])
def test_a_bucket_of_many_objects_is_listed(opened: OpenObjects) -> None:
    """More than a server names at a time: a cold process finds all of them, the next one from what the first left."""
    store = {**shared("seaweedfs").settings, "prefix": "many"}
    writer, chains = opened(**store), [chain(2, seed=seed) for seed in range(1100)]
    with ThreadPoolExecutor(8) as pool:
        assert {outcome for some in pool.map(lambda each: write(writer, each, 100), chains) for outcome in some} == {
            DONE
        }
    asked = tails(chains)
    for _ in range(2):
        cold = opened(**store)
        assert set(cold.contains(asked)) == {DONE}
    assert "catalogue_left_out" not in cold.counters
    assert len(list(cold.scan())) == 2200
    assert cold.purge(asked[0].namespace) == 2200
    assert list(opened(**store).scan()) == []

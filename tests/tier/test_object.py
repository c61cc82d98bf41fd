"""What the object tier adds to the contract: packs, what a cold process finds, two writers, and objects that others
delete, cut or replace."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest

from kvcache.block.record import Address, RecordError, expiry_field, read_header, seal
from kvcache.errors import ConfigError
from kvcache.os_env import OsEnv
from kvcache.settings.sources import load
from kvcache.testing.tier import PAYLOAD_BYTES, Clock, chain, intact, record, write
from kvcache.tier.object import ObjectTier
from kvcache.tier.object import manifest as module
from kvcache.tier.object.bucket import open_store as opened_store
from kvcache.tier.object.keys import ObjectNames, PackLocation
from kvcache.tier.object.pack import PackRecord, build_pack, read_table
from kvcache.tier.tier import Outcome
from tests.tier.tier_files import OpenObjects, objects

DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND


def test_a_chain_is_stored_in_few_objects(opened: OpenObjects, tmp_path: Path) -> None:
    tier, blocks = opened(), chain(60)
    assert set(write(tier, blocks)) == {DONE}
    assert len(objects(tmp_path)) == 1
    tier = opened(pack_bytes=10 * (PAYLOAD_BYTES + 4096))
    others = chain(60, seed=1)
    assert set(write(tier, others)) == {DONE}
    assert 6 <= len(objects(tmp_path)) - 1 <= 8
    assert intact(opened(), others)
    assert opened().check() == []


def test_unrelated_chains_are_stored_in_separate_packs(opened: OpenObjects, tmp_path: Path) -> None:
    tier = opened()
    assert set(write(tier, chain(3) + chain(3, seed=1) + chain(2, group=1))) == {DONE}
    assert len(objects(tmp_path)) == 3


def test_a_new_process_finds_any_block(opened: OpenObjects) -> None:
    blocks = chain(40)
    write(opened(), blocks)
    assert opened().contains(blocks[17:20]) == (DONE,) * 3
    assert intact(opened(), blocks[39:])
    assert list(opened().scan()) == blocks
    assert opened().match_prefix(blocks + chain(3, seed=1)).result(30) == 40


def test_later_packs_of_others_are_found_by_name(opened: OpenObjects) -> None:
    """Between two listings: a new prefix, and what goes on where a known one ends."""
    one, other, blocks = opened(), opened(), chain(12)
    assert other.match_prefix(blocks).result(30) == 0
    write(one, blocks[:5])
    other._manifest._missing.clear()  # the moment for which it is remembered is over
    assert other.match_prefix(blocks).result(30) == 5
    write(one, blocks[5:])
    other._manifest._missing.clear()
    assert other.contains(blocks) == (DONE,) * 12
    assert intact(other, blocks)


def test_blocks_inside_a_pack_are_found_by_a_listing(opened: OpenObjects) -> None:
    one, blocks, clock = opened(), chain(6), Clock()
    other = opened(os_env=OsEnv(clock=clock), refresh_s=30)
    assert other.contains(blocks[3:]) == (NOT_FOUND,) * 3
    write(one, blocks)
    assert other.contains(blocks[3:]) == (NOT_FOUND,) * 3
    clock.seconds += 31
    assert other.contains(blocks[3:]) == (DONE,) * 3


def test_concurrent_stores_leave_one_copy(opened: OpenObjects, tmp_path: Path) -> None:
    blocks = chain(30)
    tiers = [opened() for _ in range(4)]
    for tier in tiers:
        assert tier.contains(blocks[:1]) == (NOT_FOUND,)
    outcomes: list[tuple[Outcome, ...]] = []

    def store(tier: ObjectTier, at: int) -> None:
        outcomes.append(write(tier, blocks[:at]) + write(tier, blocks[at:]))

    threads = [threading.Thread(target=store, args=(tier, 7 + 4 * i)) for i, tier in enumerate(tiers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {outcome for each in outcomes for outcome in each} == {DONE}
    stored = [row.signature for path in objects(tmp_path) for row in read_table(path.read_bytes()).rows]
    assert sorted(stored) == sorted(address.signature for address in blocks)
    assert intact(opened(), blocks)


def test_a_store_without_conditional_writes_works(opened: OpenObjects, tmp_path: Path) -> None:
    tier, blocks = opened(), chain(4)
    tier._store._supports_create = False
    assert set(write(tier, blocks)) == {DONE}
    other = opened()
    other._store._supports_create = False
    assert set(write(other, blocks)) == {DONE}
    assert len(objects(tmp_path)) == 1
    assert intact(opened(), blocks)


# tables of many packs


def test_the_manifest_spares_the_next_process_reads(
    opened: OpenObjects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "COPY_AFTER_READS", 8)
    blocks = [chain(2, seed=seed) for seed in range(12)]
    for each in blocks:
        write(opened(), each)
    first, later = opened(), opened()
    assert first.contains([each[1] for each in blocks]) == (DONE,) * 12
    (copy,) = [path for path in objects(tmp_path) if path.name == "catalogue"]
    for path in {*objects(tmp_path)} - {copy}:  # a reader of a table now finds none
        stat = path.stat()
        with path.open("r+b") as file:
            file.write(b"none")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert later.contains([each[1] for each in blocks[:8]]) == (DONE,) * 8  # the writer of the ninth left the copy


@pytest.mark.parametrize("how", ["garbage", "shape", "rows", "stale"])
def test_a_wrong_manifest_never_gives_a_hit(
    opened: OpenObjects, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
) -> None:
    monkeypatch.setattr(module, "COPY_AFTER_READS", 4)
    blocks = [chain(2, seed=seed) for seed in range(6)]
    for each in blocks:
        write(opened(), each)
    assert opened().contains([each[1] for each in blocks]) == (DONE,) * 6
    (copy,) = [path for path in objects(tmp_path) if path.name == "catalogue"]
    if how != "stale":
        data = msgpack.packb({"shape": 7, "rows": [[1, 2], "xyz", None]}.get(how))
        copy.write_bytes(b"\xff" * 1000 if how == "garbage" else xxh3_64_digest(data) + data)
        assert opened().contains([each[1] for each in blocks]) == (DONE,) * 6
    else:
        opened().remove(blocks[0])
        assert opened().contains(blocks[0] + blocks[1]) == (NOT_FOUND, NOT_FOUND, DONE, DONE)
    assert intact(opened(), blocks[1])


def test_a_listing_that_fails_keeps_what_it_has_read(opened: OpenObjects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_BATCH_PACKS", 2)
    blocks = [chain(2, seed=seed) for seed in range(6)]
    for each in blocks:
        write(opened(), each)
    tier, read = opened(), list[int]()
    heads = tier._bucket.heads

    def failing(paths: Any, *given: Any) -> Any:
        read.append(len(paths))
        if len(read) == 3:
            raise TimeoutError("timeout")
        return heads(paths, *given)

    monkeypatch.setattr(tier._bucket, "heads", failing)
    assert len(list(tier.scan())) == 0  # the whole is not known
    assert len(list(tier.scan())) == 12
    assert read == [2, 2, 2, 2]


# what others do to the objects


def test_a_pack_that_a_lifecycle_rule_deletes_is_a_miss(opened: OpenObjects, tmp_path: Path) -> None:
    tier, blocks = opened(), chain(6)
    write(tier, blocks)
    objects(tmp_path)[0].unlink()
    assert tier.read(blocks, [record(address) for address in blocks]) == (NOT_FOUND,) * 6
    assert tier.contains(blocks) == (NOT_FOUND,) * 6
    tier._manifest._missing.clear()
    assert set(write(tier, blocks)) == {DONE}
    assert intact(opened(), blocks)


@pytest.mark.parametrize("how", ["cut", "empty", "other", "flipped table"])
def test_an_object_changed_by_others_is_never_a_hit(opened: OpenObjects, tmp_path: Path, how: str) -> None:
    tier, blocks = opened(), chain(6)
    write(tier, blocks)
    (path,) = objects(tmp_path)
    data = bytearray(path.read_bytes())
    if how == "flipped table":
        data[70] ^= 1
    path.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "other": b"nothing of ours" * 999}.get(how, data))
    for reader in (tier, opened()):
        assert reader.breaker == "closed"
        outcomes = reader.read(blocks, [record(address) for address in blocks])
        good = [a for a, outcome in zip(blocks, outcomes, strict=True) if outcome is DONE]
        assert intact(reader, good)
        assert len(good) < 6 or (reader is tier and how == "flipped table")  # it has read the table before
        assert Outcome.PENDING not in outcomes
    writer = opened()
    lost = [address for address in blocks if writer.contains([address]) == (NOT_FOUND,)]
    assert set(write(writer, lost)) <= {DONE}
    assert intact(opened(), blocks)


def test_a_flipped_bit_loses_one_record(opened: OpenObjects, tmp_path: Path) -> None:
    tier, blocks = opened(), chain(6)
    write(tier, blocks)
    (path,) = objects(tmp_path)
    data = bytearray(path.read_bytes())
    row = read_table(bytes(data)).rows[2]
    data[row.at + row.size - 1] ^= 4
    path.write_bytes(data)
    reader = opened()
    outcomes = reader.read(blocks, [record(address) for address in blocks])
    assert outcomes == (DONE, DONE, Outcome.DAMAGED, DONE, DONE, DONE)
    assert reader.counters["damaged_payload_sum"] == 1
    left = blocks[:2] + blocks[3:]
    assert intact(opened(), left)
    assert opened().contains(blocks[2:3]) == (NOT_FOUND,)
    assert write(reader, blocks[2:3]) == (DONE,)
    assert intact(opened(), blocks)


def test_a_removal_is_seen_by_another_reader(opened: OpenObjects, tmp_path: Path) -> None:
    one, other, blocks = opened(), opened(), chain(6)
    write(one, blocks)
    assert intact(other, blocks)
    assert one.remove(blocks[4:]) == (DONE, DONE)
    assert intact(other, blocks[:4])
    assert other.read(blocks[4:], [record(address) for address in blocks[4:]]) == (NOT_FOUND, NOT_FOUND)
    assert one.remove(blocks[:4]) == (DONE,) * 4
    assert objects(tmp_path) == []


def lasting(address: Address, end_s: float) -> list[memoryview]:
    """A record that expires then; 0: never."""
    header, body = record(address)
    fields = expiry_field(int(end_s * 1000))
    seal(header, body, address, stored_bytes=PAYLOAD_BYTES, fields=fields)
    return [header, body]


@pytest.mark.parametrize("stale", [{0}, {1}, {3}, {0, 2}, {0, 1, 2, 3}])
def test_expired_records_are_cut_from_a_pack(opened: OpenObjects, stale: set[int]) -> None:
    class Wall(Clock):
        wall_s = 1000.0

        def wall(self) -> float:
            return self.wall_s

    clock, blocks = Wall(), chain(6)
    tier, other = (opened(os_env=OsEnv(clock=clock)) for _ in range(2))
    segments = [lasting(address, 1010 if i in stale else 0) for i, address in enumerate(blocks)]
    assert set(tier.write(blocks, segments)) == {DONE}
    assert tier.contains(blocks) == (DONE,) * 6
    clock.wall_s = 1020
    assert tier.contains(blocks) == tuple(NOT_FOUND if i in stale else DONE for i in range(6))
    for writer in (tier, other):  # one knows the pack, the other meets it; the last two are somebody else's
        assert write(writer, blocks[:4]) == (DONE,) * 4
        assert tier.contains(blocks) == (DONE,) * 6
        assert intact(opened(os_env=OsEnv(clock=clock)), blocks)


# bounds and edges


@given(st.lists(st.integers(1, 9000), min_size=1, max_size=8), st.data())
def test_a_pack_table_is_read_or_refused(sizes: list[int], data: st.DataObject) -> None:
    blocks = chain(len(sizes))
    cuts = []
    for i, (address, size) in enumerate(zip(blocks, sizes, strict=True)):
        head, body = record(address, size)
        cuts.append(PackRecord(i, address, [head[: read_header(head).header_bytes], body[:size]]))
    table, pieces = build_pack(cuts)
    whole = b"".join(pieces)
    assert read_table(whole) == table
    assert table.size_bytes == len(whole)
    assert [table.address(row) for row in table.rows] == blocks
    broken = bytearray(whole)
    at = data.draw(st.integers(0, table.table_bytes - 1))
    broken[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(RecordError):
        read_table(bytes(broken))
    with pytest.raises(RecordError):
        read_table(whole[: data.draw(st.integers(0, table.table_bytes - 1))])


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_no_pack_table(data: bytes) -> None:
    with pytest.raises(RecordError):
        read_table(data)


@pytest.mark.parametrize(
    ("url", "endpoint", "config"),
    [
        ("s3://b", "http://127.0.0.1:1", {"bucket": "b", "endpoint": "http://127.0.0.1:1"}),
        ("gs://b", "http://127.0.0.1:1", {"bucket": "b", "base_url": "http://127.0.0.1:1"}),
        ("gs://b", "", {"bucket": "b"}),
        ("az://a/c", "", {"account_name": "a", "container_name": "c"}),
        ("az://a/c", "http://127.0.0.1:1/a", {"account_name": "a", "endpoint": "http://127.0.0.1:1/a"}),
    ],
)
def test_each_providers_client_gets_its_endpoint(url: str, endpoint: str, config: dict[str, str]) -> None:
    store = opened_store(url, endpoint=endpoint, region="", credentials_file="", timeout_s=1)
    assert config.items() <= dict(store.config).items()
    assert store.prefix is None


def test_pack_names_parse_to_their_namespace() -> None:
    names, (address,) = ObjectNames("a/b"), chain(1)
    path = names.pack(PackLocation.of(address), address.signature)
    assert path.startswith(f"a/b/o1r1/{address.namespace.hex()}/0-")
    assert names.namespace_of(path) == address.namespace
    assert names.is_pack(path)
    assert names.is_pack(names.pack(PackLocation.of(address), address.signature, other=True))
    assert not names.is_pack(names.manifest(address.namespace))
    assert names.namespace_of("elsewhere/x/y") is None
    with pytest.raises(ConfigError, match=r"object\.prefix"):
        ObjectNames("../up")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"url": "s3://user:secret@bucket"}, "object.url"),
        ({"url": "nowhere"}, "object.url"),
        ({"url": "file:///tmp/x", "connections": 0}, "object.connections"),
        ({"url": "s3://bucket", "credentials_file": "/nowhere/at/all"}, "object.credentials_file"),
        ({"url": "az://container"}, "az://ACCOUNT/CONTAINER"),
        ({"url": "az://account/container/folder"}, "az://ACCOUNT/CONTAINER"),
        ({"url": "gs://bucket", "region": "us-east-1"}, "region"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        ObjectTier(load(None, object=settings).object)
    assert "secret" not in str(caught.value)

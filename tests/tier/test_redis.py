"""What the Redis tier promises beyond the contract of a tier, against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from kvcache.block.layout import Shard
from kvcache.block.record import Address, read_header
from kvcache.errors import ConfigError
from kvcache.settings.sources import load
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.keys import KeyNames, part_key
from kvcache.tier.tier import Outcome
from tests.peer.redis_server import MISSING, RedisServer, empty
from tests.tier.blocks import buffer, chain, holds, record
from tests.tier.tier_files import read
from tests.vectors import generate

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
KIB = 1 << 10
LONG = 2000 * KIB
NAMES = KeyNames("kvcache")
VECTORS = json.loads((generate.HERE / "redis.json").read_text())
RECORDS = {row["name"]: row for row in json.loads((generate.HERE / "record.json").read_text())["sound"]}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> RedisServer:
    return empty(tmp_path_factory.mktemp("redis"))


@pytest.fixture
def client(server: RedisServer) -> Any:
    server.client.flushall()
    return server.client


@pytest.fixture(params=["tcp", "unix"])
def tier(request: pytest.FixtureRequest, server: RedisServer, client: Any) -> Iterator[RedisTier]:
    tier = RedisTier(RedisSettings(url=getattr(server, request.param), part_bytes=512 * KIB))
    yield tier
    tier.close()


def key(address: Address) -> bytes:
    return NAMES.record(address)


# what lies in the server


@pytest.mark.parametrize("vector", VECTORS, ids=lambda vector: str(vector["record"]))
def test_keys_and_values_equal_the_vectors(vector: dict[str, Any], server: RedisServer, client: Any) -> None:
    """What another release wrote is read, and what is written lies where the page says."""
    row = RECORDS[vector["record"]]
    body, head = generate.pattern(**row["payload"]), bytes.fromhex(row["header"])
    values = {n.encode(): head * first + body[a:b] for n, (first, a, b) in vector["values"].items()}
    given = row["address"]
    identity = (bytes.fromhex(given[name]) for name in ("namespace", "signature", "parent"))
    address = Address(*identity, given["group"], Shard(*given["shard"]))
    client.mset(values)
    tier = RedisTier(RedisSettings(url=server.unix, part_bytes=vector["part_bytes"]))
    into = buffer(row["decoded_bytes"])
    assert tier.read([address], [into]) == (DONE,)
    assert bytes(into[1][: len(body)]) == body
    client.flushall()
    assert tier.write([address], [into]) == (DONE,)
    assert {name: client.get(name) for name in client.keys("*")} == values
    tier.close()


def test_a_long_record_is_stored_in_expiring_parts(tier: RedisTier, client: Any) -> None:
    (address,) = chain(1)
    segments = record(address, LONG)
    assert tier.write([address], [segments]) == (DONE,)
    write_id = read_header(segments[0]).write_id
    assert set(client.keys()) == {key(address), *(part_key(key(address), write_id, n) for n in (1, 2, 3))}
    lives = {name: client.ttl(name) for name in client.keys("*")}
    assert all(0 < lives[key(address)] < life for name, life in lives.items() if name != key(address))
    assert read(tier, address, LONG) is DONE
    assert list(tier.scan()) == [address]
    assert tier.remove([address]) == (DONE,)
    assert client.keys() == []


def test_a_short_record_has_no_expiry_by_default(server: RedisServer, client: Any) -> None:
    one, other = chain(2)
    tier = RedisTier(RedisSettings(url=server.unix))
    tier.write([one], [record(one)])
    tier.close()
    tier = RedisTier(RedisSettings(url=server.unix, expire_s=500))
    tier.write([other], [record(other)])
    tier.close()
    assert client.ttl(key(one)) == -1
    assert 0 < client.ttl(key(other)) <= 500


def test_a_stored_record_is_not_sent_again(tier: RedisTier, client: Any) -> None:
    blocks = chain(8)
    tier.write(blocks, [record(address) for address in blocks])
    before = client.info("commandstats")["cmdstat_set"]["calls"]
    assert tier.write(blocks, [record(address) for address in blocks]) == (DONE,) * 8
    assert client.info("commandstats")["cmdstat_set"]["calls"] == before


def test_two_writers_of_one_long_record_never_mix(tier: RedisTier, client: Any) -> None:
    """The second one's parts have names of their own and go when the place turns out to be taken."""
    (address,) = chain(1)
    tickets = [tier.submit("write", [address], [record(address, LONG)]) for _ in range(6)]
    assert all(ticket.wait(20) for ticket in tickets)
    assert {ticket.outcomes for ticket in tickets} == {(DONE,)}
    assert len(client.keys()) == 4
    assert read(tier, address, LONG) is DONE


# holes and damage


def test_an_evicted_part_is_a_miss_and_frees_its_key(tier: RedisTier, client: Any) -> None:
    (address,) = chain(1)
    segments = record(address, LONG)
    for number in (1, 3):
        tier.write([address], [segments])
        client.delete(part_key(key(address), read_header(segments[0]).write_id, number))
        assert read(tier, address, LONG) is NOT_FOUND
        assert tier.contains([address]) == (NOT_FOUND,)
    assert tier.write([address], [segments]) == (DONE,)
    assert read(tier, address, LONG) is DONE


def test_a_missing_block_never_shifts_later_ones(tier: RedisTier, client: Any) -> None:
    blocks = chain(12)
    tier.write(blocks, [record(address) for address in blocks])
    client.delete(key(blocks[3]), key(blocks[7]))
    into = [buffer() for _ in blocks]
    outcomes = tier.read(blocks, into)
    assert outcomes == tuple(NOT_FOUND if i in {3, 7} else DONE for i in range(12))
    assert all(holds(into[i], blocks[i]) for i in range(12) if i not in {3, 7})


def test_an_absent_key_leaves_the_connection_usable(tier: RedisTier) -> None:
    here, other = chain(1), chain(30, seed=1)
    tier.write(here, [record(here[0])])
    assert tier.read(other, [buffer() for _ in other]) == (NOT_FOUND,) * 30
    assert read(tier, here[0]) is DONE


@pytest.mark.parametrize("size", [0, 1, 100, 136, 173, 4096, 12_000])
@pytest.mark.parametrize("what", ["cut", "zeros", "letters"])
def test_a_value_changed_by_others_is_a_miss_and_removed(tier: RedisTier, client: Any, size: int, what: str) -> None:
    blocks = chain(3)
    tier.write(blocks, [record(address) for address in blocks])
    value = {"cut": client.get(key(blocks[1]))[:size], "zeros": bytes(size), "letters": b"a" * size}[what]
    client.set(key(blocks[1]), value)
    assert [read(tier, address) for address in blocks] == [DONE, Outcome.DAMAGED, DONE]
    assert tier.counters["damaged"] == 1
    assert tier.write([blocks[1]], [record(blocks[1])]) == (DONE,)
    assert read(tier, blocks[1]) is DONE


def test_a_longer_value_is_damaged(tier: RedisTier, client: Any) -> None:
    blocks = chain(2)
    tier.write(blocks, [record(address) for address in blocks])
    client.append(key(blocks[0]), b"more")
    assert [read(tier, address) for address in blocks] == [Outcome.DAMAGED, DONE]


@pytest.mark.parametrize("at", [0, 30, 60, 100, 140, 175, 9_000])
def test_a_flipped_bit_is_damaged(tier: RedisTier, client: Any, at: int) -> None:
    blocks = chain(2)
    tier.write(blocks, [record(address) for address in blocks])
    client.setrange(key(blocks[0]), at, bytes([client.getrange(key(blocks[0]), at, at)[0] ^ 4]))
    assert read(tier, blocks[0]) in {NOT_FOUND, Outcome.DAMAGED}
    assert read(tier, blocks[1]) is DONE


def test_a_flipped_bit_in_a_part_is_damaged(tier: RedisTier, client: Any) -> None:
    (address,) = chain(1)
    segments = record(address, LONG)
    tier.write([address], [segments])
    client.setrange(part_key(key(address), read_header(segments[0]).write_id, 2), 99, b"\0\0\0\0")
    assert read(tier, address, LONG) is Outcome.DAMAGED
    assert tier.contains([address]) == (NOT_FOUND,)


def test_a_value_of_another_version_is_kept(tier: RedisTier, client: Any) -> None:
    (address,) = chain(1)
    tier.write([address], [record(address)])
    client.setrange(key(address), 4, b"\2\0")
    value = client.get(key(address))
    assert read(tier, address) is Outcome.INCOMPATIBLE
    assert tier.contains([address]) == (NOT_FOUND,)
    assert tier.write([address], [record(address)]) == (Outcome.FAILED,)
    assert client.get(key(address)) == value


def test_a_value_of_another_type_is_kept(tier: RedisTier, client: Any) -> None:
    blocks = chain(3)
    tier.write(blocks[:1], [record(blocks[0])])
    client.lpush(key(blocks[1]), "a list")
    assert [read(tier, address) for address in blocks] == [DONE, Outcome.INCOMPATIBLE, NOT_FOUND]
    assert tier.write([blocks[1]], [record(blocks[1])]) == (Outcome.INCOMPATIBLE,)
    assert client.lrange(key(blocks[1]), 0, -1) == [b"a list"]
    assert tier.counters["refused_WRONGTYPE"] > 0
    assert tier.breaker == "closed"
    assert tier.check() == [f"redis: {key(blocks[1]).decode()} holds no record"]


def test_check_reports_invalid_values(tier: RedisTier, client: Any) -> None:
    one, other = chain(2)
    tier.write([one], [record(one)])
    assert tier.check() == []
    client.copy(key(one), key(other))
    client.append(key(one), b"!")
    assert len(tier.check()) == 2


# many at once


@pytest.mark.parametrize("held", [0, 1, 2, 15, 16, 17, 99, 300, 599, 600])
def test_match_prefix_finds_a_chains_end_in_few_probes(tier: RedisTier, client: Any, held: int) -> None:
    blocks = chain(600)
    tier.write(blocks[:held], [record(address, 1) for address in blocks[:held]])
    before = client.info("commandstats")["cmdstat_getrange"]["calls"] if held else 0
    assert tier.match_prefix(blocks).result(10) == held
    after = client.info("commandstats")["cmdstat_getrange"]["calls"]
    assert after - before <= 64 or not held


def test_match_prefix_stops_at_a_missing_block(tier: RedisTier) -> None:
    blocks = chain(40)
    tier.write(blocks[1:], [record(address, 1) for address in blocks[1:]])
    assert tier.match_prefix(blocks).result(10) == 0
    assert tier.match_prefix([]).result(10) == 0


def test_contains_answers_thousands_of_keys(tier: RedisTier) -> None:
    blocks = chain(5000)
    tier.write(blocks[::7], [record(address, 1) for address in blocks[::7]])
    assert tier.contains(blocks) == tuple(DONE if i % 7 == 0 else NOT_FOUND for i in range(5000))


def test_write_and_remove_cycles_leave_no_keys(tier: RedisTier, client: Any) -> None:
    blocks = chain(4)
    for _ in range(50):
        tier.write(blocks, [record(address) for address in blocks])
        assert [read(tier, address) for address in blocks] == [DONE] * 4
        tier.remove(blocks)
    assert client.keys() == []
    assert tier.counters["connects"] <= 4


# settings


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"url": "http://here"}, "redis.url"),
        ({"url": "redis://:secret@here:port"}, "redis.url"),
        ({"part_bytes": 5}, "redis.part_bytes"),
        ({"part_bytes": 32 << 20}, "redis.part_bytes"),
        ({"prefix": "a*"}, "redis.prefix"),
        ({"connections": 0}, "redis.connections"),
        ({"timeout_s": 0}, "redis.timeout_s"),
    ],
)
def test_invalid_settings_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        RedisTier(load(None, redis={"url": "redis://localhost", **given}).redis)
    assert "secret" not in str(caught.value)


def test_prefixes_share_no_keys(server: RedisServer, client: Any) -> None:
    (address,) = chain(1)
    one, other = (
        RedisTier(RedisSettings(url=server.unix, prefix="one")),
        RedisTier(RedisSettings(url=server.unix, prefix="other")),
    )
    one.write([address], [record(address)])
    assert one.contains([address]) + other.contains([address]) == (DONE, NOT_FOUND)
    assert list(other.scan()) == []
    one.close()
    other.close()


@pytest.mark.parametrize("form", ["k0r1", "k2r1", "k1r2"])
def test_records_of_another_release_are_not_touched(tier: RedisTier, client: Any, form: str) -> None:
    """What a release with another form of key or record keeps there is not found, not counted and not touched."""
    (address,) = chain(1)
    tier.write([address], [record(address)])
    theirs = key(address).replace(b":k1r1:", f":{form}:".encode())
    client.rename(key(address), theirs)
    assert read(tier, address) is NOT_FOUND
    assert tier.match_prefix([address]).result(10) == 0
    assert list(tier.scan()) == []
    assert tier.write([address], [record(address)]) == (DONE,)
    assert tier.remove([address]) == (DONE,)
    assert client.keys("*") == [theirs]
    assert tier.check() == []


def test_two_shards_of_a_block_have_two_keys() -> None:
    (address,) = chain(1)
    shards = [Shard(0, 1, 0, 4), Shard(0, 2, 0, 40), Shard(0, 2, 0, 4)]
    others = [replace(address, group=1), *(replace(address, group=11, shard=shard) for shard in shards)]
    assert len({key(other) for other in [address, *others]}) == 5

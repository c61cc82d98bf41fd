"""Signed records: what somebody without the key wrote, or changed, is refused, counted, and makes room."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.record import KEYED_DIGEST, read_header, with_field
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.keys import KeyNames
from kvcache.tier.tier import Outcome
from tests.peer.redis_server import MISSING, RedisServer, empty
from tests.tier.blocks import buffer, chain, holds, record
from tests.tier.test_redis_cluster import read, write

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

DONE, DAMAGED = Outcome.DONE, Outcome.DAMAGED
LONG = 1 << 20


@pytest.fixture
def server(tmp_path: Path) -> RedisServer:
    return empty(tmp_path)


@pytest.fixture
def signing(server: RedisServer, tmp_path: Path) -> Iterator[Any]:
    """Opens tiers with these keys."""
    opened: list[RedisTier] = []

    def open_tier(*keys: bytes) -> RedisTier:
        file = tmp_path / f"keys-{len(opened)}"
        file.write_text("\n".join(key.hex() for key in keys))
        named = {"signing_key_file": str(file)} if keys else {}
        opened.append(RedisTier(RedisSettings(url=server.unix, part_bytes=256 << 10, **named)))  # type: ignore[arg-type]
        return opened[-1]

    yield open_tier
    for tier in opened:
        tier.close()


ONE, TWO = b"1" * 32, b"2" * 40


def test_a_signed_record_is_read(signing: Any, server: RedisServer) -> None:
    tier, blocks = signing(ONE), chain(5)
    assert write(tier, blocks) == (DONE,) * 5
    assert read(tier, blocks) == (DONE,) * 5
    value = server.client.get(KeyNames("kvcache").record(blocks[0]))
    assert len(read_header(value).fields[KEYED_DIGEST]) == 32
    (long,) = chain(1, seed=1)
    into = buffer(LONG)
    assert tier.write([long], [record(long, LONG)]) == (DONE,)
    assert tier.read([long], [into]) == (DONE,)
    assert holds(into, long, LONG)
    assert read(signing(), blocks) == (DONE,) * 5, "who has no key reads as before"
    assert read(signing(TWO, ONE), blocks) == (DONE,) * 5, "an old key is still believed"
    assert tier.check() == []


@pytest.mark.parametrize("forger", [(), (TWO,)], ids=["unsigned", "another key"])
def test_a_forged_record_is_refused_and_removed(signing: Any, forger: tuple[bytes, ...]) -> None:
    blocks = chain(4)
    write(signing(*forger), blocks)
    tier = signing(ONE)
    assert read(tier, blocks) == (DAMAGED,) * 4
    assert tier.counters["damaged_digest"] == 4
    assert write(tier, blocks) == (DONE,) * 4
    assert read(tier, blocks) == (DONE,) * 4


def test_an_exchanged_part_is_refused(signing: Any, server: RedisServer) -> None:
    """The header of one, the parts of another, each whole and sound by itself."""
    tier, (address,) = signing(ONE), chain(1)
    segments = record(address, LONG)
    tier.write([address], [segments])
    forged = record(address, LONG, data=b"\x11" * LONG)
    name = KeyNames("kvcache").record(address)
    value = server.client.get(name)
    digest = read_header(value).fields[KEYED_DIGEST]
    head = read_header(forged[0])
    cut = with_field(bytes(forged[0][: head.header_bytes]), head, KEYED_DIGEST, digest)
    server.client.set(name, cut + b"\x11" * LONG)
    assert tier.read([address], [buffer(LONG)]) == (DAMAGED,)
    assert tier.counters["damaged_digest"] == 1

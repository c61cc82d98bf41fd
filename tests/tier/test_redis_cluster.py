"""The Redis tier over a real cluster of three: keys move, nodes go, hang and come back; always a miss, never another
block, and back by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis.crc import key_slot

from kvcache.block.record import read_header
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier, pool
from kvcache.tier.redis.keys import KeyNames, part_key
from kvcache.tier.tier import Outcome
from tests.peer.redis_proxy import RedisProxy
from tests.peer.redis_server import MISSING
from tests.peer.redis_topology import Cluster, Node, until
from tests.tier.blocks import buffer, chain, holds, record

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
MISS = {NOT_FOUND, Outcome.FAILED, Outcome.TIMED_OUT}
NAMES = KeyNames("kvcache", cluster=True)
LONG = 1 << 20


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.end()


@pytest.fixture
def tier(cluster: Cluster) -> Iterator[RedisTier]:
    for node in cluster.nodes:
        node.client.flushall()
    tier = open_tier(cluster)
    yield tier
    tier.close()


@pytest.fixture(scope="module")
def alone() -> Iterator[RedisProxy]:
    """A cluster of one node that is reached, and names itself, through a proxy."""
    node = Node()
    proxy = RedisProxy(node.port)
    node.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16_383)
    node.client.config_set("cluster-announce-port", proxy.port)
    until(lambda: node.client.set("well", "yes"), "the cluster is well")
    yield proxy
    proxy.end()
    node.end()


@pytest.fixture
def behind(alone: RedisProxy) -> Iterator[RedisTier]:
    alone.clear_faults()
    tier = RedisTier(RedisSettings(url=alone.url, mode="cluster", connections=1, timeout_s=10))
    yield tier
    tier.close()


def open_tier(cluster: Cluster, **settings: Any) -> RedisTier:
    return RedisTier(
        RedisSettings(url=cluster.url, mode="cluster", part_bytes=256 << 10, **{"timeout_s": 10, **settings})
    )


def read(tier: RedisTier, blocks: list[Any]) -> tuple[Outcome, ...]:
    into = [buffer() for _ in blocks]
    outcomes = tier.read(blocks, into)
    for segments, address, outcome in zip(into, blocks, outcomes, strict=True):
        assert outcome is not DONE or holds(segments, address)
    return outcomes


def write(tier: RedisTier, blocks: list[Any]) -> tuple[Outcome, ...]:
    return tier.write(blocks, [record(address) for address in blocks])


def test_blocks_spread_over_nodes_and_are_found(cluster: Cluster, tier: RedisTier) -> None:
    blocks = chain(90)
    assert write(tier, blocks[:60]) == (DONE,) * 60
    assert [node.client.dbsize() > 5 for node in cluster.nodes] == [True] * 3
    assert read(tier, blocks) == (DONE,) * 60 + (NOT_FOUND,) * 30
    assert tier.contains(blocks) == (DONE,) * 60 + (NOT_FOUND,) * 30
    assert tier.match_prefix(blocks).result(20) == 60
    assert list(tier.scan()) == blocks[:60]
    assert tier.check() == []
    assert tier.usage().records == 60
    assert tier.free_slots(12_000) > 0
    assert tier.remove(blocks) == (DONE,) * 60 + (NOT_FOUND,) * 30
    assert len(tier.breakers) == 3


def test_parts_of_a_record_share_a_slot(cluster: Cluster, tier: RedisTier) -> None:
    blocks = chain(6)
    segments = [record(address, LONG) for address in blocks]
    assert tier.write(blocks, segments) == (DONE,) * 6
    for address, pieces in zip(blocks, segments, strict=True):
        name = NAMES.record(address)
        slots = {key_slot(name), *(key_slot(part_key(name, read_header(pieces[0]).write_id, n)) for n in (1, 2, 3))}
        assert len(slots) == 1
    into = [buffer(LONG) for _ in blocks]
    assert tier.read(blocks, into) == (DONE,) * 6
    assert tier.remove(blocks) == (DONE,) * 6
    assert [node.client.dbsize() for node in cluster.nodes] == [0] * 3


def test_slots_may_move_during_reads_and_writes(cluster: Cluster, tier: RedisTier) -> None:
    """Whatever is under way, each answer is the right block or a miss, and in the end all are where they should be."""
    here, new = chain(60), chain(60, seed=1)
    write(tier, here)
    stop = threading.Event()
    seen: set[Outcome] = set()
    faults: list[BaseException] = []

    def work(blocks: list[Any]) -> None:
        try:
            while not stop.is_set():
                seen.update(read(tier, blocks))
                seen.update(write(tier, new[:20]))
                tier.remove(new[:20])
        except BaseException as error:  # noqa: BLE001  shown at the end
            faults.append(error)

    threads = [threading.Thread(target=work, args=(here[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    try:
        slots = sorted({key_slot(NAMES.record(address)) for address in here})[:30]
        homes = {slot: next(i for i in range(3) if slot < (i + 1) * 16_384 // 3) for slot in slots}
        for slot, home in homes.items():
            cluster.move(slot, cluster.nodes[home], cluster.nodes[(home + 1) % 3])
        for slot, home in homes.items():
            cluster.move(slot, cluster.nodes[(home + 1) % 3], cluster.nodes[home])
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []
    assert DONE in seen
    until(lambda: read(tier, here) == (DONE,) * 60, "all are found again")
    assert write(tier, new) == (DONE,) * 60
    assert tier.breaker == "closed"


def test_a_migrating_key_is_found(cluster: Cluster, tier: RedisTier) -> None:
    """The old owner says ASK, the new one would say MOVED to a client that does not: each verb."""
    blocks = chain(30)
    write(tier, blocks)
    name = NAMES.record(blocks[7])
    source = cluster.owner(name)
    target = next(node for node in cluster.nodes if node is not source)
    cluster.move(key_slot(name), source, target, leave_open=True)
    try:
        assert read(tier, blocks) == (DONE,) * 30
        assert tier.counters["refused_ASK"] > 0
        assert tier.contains(blocks) == (DONE,) * 30
        assert tier.match_prefix(blocks).result(20) == 30
        held = target.client.dbsize()
        assert write(tier, blocks) == (DONE,) * 30  # they are there: nothing is written twice
        assert target.client.dbsize() == held
        assert tier.remove(blocks[7:8]) == (DONE,)
        assert read(tier, blocks[7:8]) == (NOT_FOUND,)
        assert write(tier, blocks[7:8]) == (DONE,)
        assert target.client.dbsize() == held
        assert tier.breaker == "closed"
    finally:
        cluster.move(key_slot(name), source, target)
    until(lambda: read(tier, blocks) == (DONE,) * 30, "all are found when it has moved")
    cluster.move(key_slot(name), target, source)


def test_moved_keys_are_found_at_once(cluster: Cluster, tier: RedisTier) -> None:
    """However lately the cluster was looked at: each MOVED says where."""
    blocks = chain(30)
    write(tier, blocks)
    slots = sorted({key_slot(NAMES.record(address)) for address in blocks})[:6]
    homes = {slot: next(i for i in range(3) if slot < (i + 1) * 16_384 // 3) for slot in slots}
    for step in (1, 0):
        for slot, home in homes.items():
            cluster.move(slot, cluster.nodes[(home + 1 - step) % 3], cluster.nodes[(home + step) % 3])
            assert read(tier, blocks) == (DONE,) * 30
            assert tier.match_prefix(blocks).result(20) == 30
    assert tier.breaker == "closed"


def test_a_long_record_migrates_with_all_its_parts(cluster: Cluster, tier: RedisTier) -> None:
    """Its parts lie in one slot, so they migrate together: read, written and removed where they go."""
    (address,) = chain(1, seed=3)
    slot, source = key_slot(NAMES.record(address)), cluster.owner(NAMES.record(address))
    target = next(node for node in cluster.nodes if node is not source)
    assert tier.write([address], [record(address, LONG)]) == (DONE,)
    cluster.move(slot, source, target, leave_open=True)
    try:
        into = buffer(LONG)
        assert tier.read([address], [into]) == (DONE,)
        assert holds(into, address, LONG)
        assert tier.remove([address]) == (DONE,)
        assert target.client.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 0
        assert tier.write([address], [record(address, LONG)]) == (DONE,)
        assert target.client.execute_command("CLUSTER COUNTKEYSINSLOT", slot) == 4
        assert tier.read([address], [into]) == (DONE,)
    finally:
        cluster.move(slot, source, target)
        cluster.move(slot, target, source)


def test_a_part_on_another_node_keeps_the_record(cluster: Cluster, tier: RedisTier) -> None:
    """The first part still here, the others migrating: a miss, and whole again when all have arrived."""
    (address,) = chain(1, seed=3)
    name = NAMES.record(address)
    slot, source = key_slot(name), cluster.owner(name)
    target = next(node for node in cluster.nodes if node is not source)
    assert tier.write([address], [record(address, LONG)]) == (DONE,)
    target.client.execute_command("CLUSTER SETSLOT", slot, "IMPORTING", source.id)
    source.client.execute_command("CLUSTER SETSLOT", slot, "MIGRATING", target.id)
    keys = source.client.execute_command("CLUSTER GETKEYSINSLOT", slot, 100)  # as text
    parts = [key for key in keys if key != name.decode()]
    assert len(parts) == 3
    source.client.execute_command("MIGRATE", "127.0.0.1", target.port, "", 0, 5000, "KEYS", *parts)
    try:
        assert read_long(tier, address) in MISS
        assert source.client.exists(name)
    finally:
        cluster.move(slot, source, target)
    until(lambda: read_long(tier, address) is DONE, "it is whole again")
    cluster.move(slot, target, source)


def read_long(tier: RedisTier, address: Any) -> Outcome:
    into = buffer(LONG)
    (outcome,) = tier.read([address], [into])
    assert outcome is not DONE or holds(into, address, LONG)
    return outcome


@pytest.mark.parametrize("code", ["MOVED", "ASK", "TRYAGAIN"])
def test_a_storm_of_redirections_ends(alone: RedisProxy, behind: RedisTier, code: str) -> None:
    """A node that sends us to itself for ever: a miss in few round trips, no connection more, and back by itself."""
    blocks = chain(20)
    assert write(behind, blocks) == (DONE,) * 20
    assert behind.match_prefix(blocks).result(20) == 20
    connections = alone.connections
    alone.answer = f"-{code} 1 127.0.0.1:{alone.port}\r\n".encode()
    for seed in range(1, 11):
        assert read(behind, blocks) == (Outcome.FAILED,) * 20
        assert write(behind, blocks) == (Outcome.FAILED,) * 20
        assert behind.match_prefix(chain(20, seed=seed)).result(20) == 0
    assert behind.counters[f"refused_{code}"] <= 10 * 2 * 20 * 3
    assert alone.connections == connections
    alone.clear_faults()
    until(lambda: read(behind, blocks) == (DONE,) * 20, "it serves again")


def test_redirections_to_bad_addresses_are_misses(alone: RedisProxy, behind: RedisTier) -> None:
    """Each ASK names another server, or none: a few are tried, each is a miss."""
    blocks = chain(3)
    assert write(behind, blocks) == (DONE,) * 3
    for port in range(1, 41):
        alone.answer = f"-ASK 1 127.0.0.1:{port}\r\n".encode()
        assert set(read(behind, blocks)) <= MISS
    assert 0 < len(behind._nodes._redirect_pools) <= 16  # type: ignore[attr-defined]
    for place in ("nonsense", ":6379", "h:99999", "h:-1"):
        alone.answer = f"-ASK 1 {place}\r\n".encode()
        assert set(read(behind, blocks)) <= MISS
    alone.clear_faults()
    until(lambda: read(behind, blocks) == (DONE,) * 3, "it serves again")


def lines(servers: int, began: float) -> int:
    """That a log has at most since then: of each of them one every few seconds."""
    return servers * (1 + int((time.monotonic() - began) / pool._LOG_INTERVAL_S))


@pytest.mark.parametrize("way", ["killed", "hung"])
def test_a_lost_node_is_a_miss_and_others_serve(cluster: Cluster, way: str, caplog: Any) -> None:
    for node in cluster.nodes:
        node.client.flushall()
    began, tier = time.monotonic(), open_tier(cluster, timeout_s=3)
    blocks = chain(60)
    assert write(tier, blocks) == (DONE,) * 60
    lost = cluster.nodes[1]
    gone = [i for i, address in enumerate(blocks) if cluster.owner(NAMES.record(address)) is lost]
    rest = [i for i in range(60) if i not in gone]
    lost.pause() if way == "hung" else lost.stop()
    try:
        for _ in range(5):
            outcomes = read(tier, blocks)
            assert {outcomes[i] for i in gone} <= MISS
            assert {outcomes[i] for i in rest} == {DONE}
        written = write(tier, chain(60, seed=1))
        assert {DONE} < set(written) <= {DONE, *MISS}
        assert tier.match_prefix(blocks).result(20) <= 60
        until(lambda: tier.breaker == "open", "it is left alone") if way == "killed" else None
    finally:
        lost.go_on() if way == "hung" else lost.start()
    until(lambda: set(write(tier, blocks)) == {DONE}, "it takes blocks again")
    until(lambda: read(tier, blocks) == (DONE,) * 60, "it serves again")
    assert len(caplog.records) <= lines(3, began)
    tier.close()


def test_a_replica_takes_over() -> None:
    cluster = Cluster(replicas=True)
    tier = open_tier(cluster)
    try:
        blocks = chain(60)
        until(lambda: write(tier, blocks) == (DONE,) * 60, "the cluster takes them")
        for node in cluster.masters:
            until(lambda n=node: n.client.execute_command("WAIT", 1, 100), "the replica has what was written")
        cluster.masters[0].stop()
        until(lambda: read(tier, blocks).count(DONE) >= 58, "what was stored is found at the replica")
        until(lambda: set(write(tier, chain(30, seed=2))) == {DONE}, "the replica takes blocks")
        assert tier.match_prefix(blocks).result(20) >= 1
    finally:
        tier.close()
        cluster.end()


def test_an_unreachable_cluster_is_a_miss() -> None:
    tier = RedisTier(RedisSettings(url="redis://127.0.0.1:1,127.0.0.1:2/0", mode="cluster", timeout_s=0.2))
    blocks = chain(3)
    for _ in range(6):
        assert set(read(tier, blocks)) <= MISS
        assert tier.match_prefix(blocks).result(10) == 0
    assert tier.usage().records == 0
    assert tier.check()
    tier.close()

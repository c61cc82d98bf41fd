"""The Redis tier under real sentinels: the master goes, another takes its place, and hits come back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import Outcome
from tests.peer.redis_server import MISSING
from tests.peer.redis_topology import Sentinels, until
from tests.tier.blocks import chain, record
from tests.tier.test_redis_cluster import MISS, lines, read, write

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

DONE = Outcome.DONE


@pytest.fixture(scope="module")
def sentinels() -> Iterator[Sentinels]:
    """For tests that leave the master where it is, and last for one that does not."""
    sentinels = Sentinels()
    yield sentinels
    sentinels.end()


@pytest.fixture
def others(request: pytest.FixtureRequest) -> Iterator[Sentinels]:
    """Of its own: they take seconds to know each other."""
    if not request.config.getoption("--long"):
        pytest.skip("more ways to lose a master: --long")
    sentinels = Sentinels()
    yield sentinels
    sentinels.end()


def open_tier(sentinels: Sentinels, **settings: Any) -> RedisTier:
    return RedisTier(
        RedisSettings(url=sentinels.url, mode="sentinel", master=Sentinels.NAME, **{"timeout_s": 10, **settings})
    )


def test_unreachable_sentinels_are_skipped(sentinels: Sentinels) -> None:
    url = f"redis://127.0.0.1:1,127.0.0.1:2,127.0.0.1:{sentinels.ports[0]}/0"
    tier = RedisTier(RedisSettings(url=url, mode="sentinel", master=Sentinels.NAME, timeout_s=20))
    assert write(tier, chain(3)) == (DONE,) * 3
    assert read(tier, chain(3)) == (DONE,) * 3
    tier.close()


def test_a_master_unknown_to_the_sentinels_is_a_miss(sentinels: Sentinels) -> None:
    tier = RedisTier(RedisSettings(url=sentinels.url, mode="sentinel", master="another", timeout_s=20))
    for _ in range(4):
        assert set(read(tier, chain(2))) <= MISS
    assert tier.breaker == "open"
    assert tier.counters["faults_sentinels"] >= 3
    tier.close()


def test_concurrent_writers_survive_a_failover(others: Sentinels) -> None:
    """Nothing raises, nothing hangs, no block is another."""
    tier = open_tier(others)
    stop = threading.Event()
    faults: list[BaseException] = []

    def work(seed: int) -> None:
        blocks = chain(30, seed=seed)
        try:
            while not stop.is_set():
                assert set(tier.write(blocks, [record(a) for a in blocks])) <= {DONE, *MISS, Outcome.NO_CAPACITY}
                read(tier, blocks)
        except BaseException as error:  # noqa: BLE001  shown at the end
            faults.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    try:
        others.master.stop()
        until(lambda: others.says() == others.replica.port, "another master")
        until(lambda: others.replica.client.dbsize() >= 90, "all has been written there")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        tier.close()
    assert faults == []


def test_sentinels_and_servers_have_separate_passwords(tmp_path: Path) -> None:
    """Each is entered with its own; a wrong one is a miss, and a file that is mended is read again."""
    ours, theirs = tmp_path / "server", tmp_path / "sentinel"
    guarded = Sentinels(password="of the sentinels", master_password="of the servers")
    ours.write_text("of the servers\n")
    theirs.write_text("of the servers\n")
    tier = open_tier(guarded, password_file=str(ours), sentinel_password_file=str(theirs))
    try:
        assert set(read(tier, chain(2))) <= MISS
        assert tier.counters["faults_sentinels"] > 0
        theirs.write_text("of the sentinels\n")
        assert write(tier, chain(3)) == (DONE,) * 3
        assert read(tier, chain(3)) == (DONE,) * 3
        assert "of the" not in repr(tier) + repr(tier._nodes.pools()[0]._endpoint) + str(tier.counters)
    finally:
        tier.close()
        guarded.end()


def failover(sentinels: Sentinels, way: str, caplog: Any) -> None:
    sentinels.master.client.flushall()
    began, tier = time.monotonic(), open_tier(sentinels)
    blocks = chain(40)
    assert write(tier, blocks) == (DONE,) * 40
    assert tier.match_prefix(blocks).result(10) == 40
    sentinels.master.client.execute_command("WAIT", 1, 2000)
    if way == "killed":
        sentinels.master.stop()
    elif way == "hung":
        sentinels.master.pause()
    else:
        sentinels.clients[0].execute_command("SENTINEL", "FAILOVER", Sentinels.NAME)
    try:
        outcomes = set(read(tier, blocks))
        assert outcomes <= {DONE, *MISS}
        until(lambda: sentinels.says() == sentinels.replica.port, "the sentinels agree on another master")
        new, client = chain(20, seed=1), sentinels.replica.client
        until(lambda: set(write(tier, new)) == {DONE} and client.dbsize() == 60, "writes go to the new master")
        until(lambda: read(tier, blocks) == (DONE,) * 40, "what was stored is found again")
        assert tier.match_prefix(blocks).result(10) == 40
        assert len(caplog.records) <= lines(3, began)  # of a server each, and of who looks for the master
    finally:
        sentinels.master.go_on() if way == "hung" else None
        tier.close()


def test_hits_resume_after_the_master_is_killed(sentinels: Sentinels, caplog: Any) -> None:
    failover(sentinels, "killed", caplog)


@pytest.mark.parametrize("way", ["hung", "told"])
def test_a_replaced_master_is_followed(others: Sentinels, way: str, caplog: Any) -> None:
    failover(others, way, caplog)

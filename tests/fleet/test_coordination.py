"""Notes in a real server: by a user who may do no more than the page says, and in a cluster whose slots move."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import pytest
from redis.crc import key_slot

from kvcache.fleet.coordination import Coordination, LeaseResult, PromptLease
from kvcache.fleet.popularity import Popularity
from kvcache.settings.tiers import RedisSettings
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.redis_topology import Cluster

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

PAGE = Path(__file__).parents[2] / "docs" / "operations.md"


@pytest.mark.parametrize("lines", [1, 2], ids=["a user for records", "and for warming up"])
def test_the_documented_acl_is_enough(server: RedisServer, tmp_path: Path, lines: int) -> None:
    rights = [line.split() for line in re.findall(r"^ *ACL SETUSER engine (.*)$", PAGE.read_text(), re.MULTILINE)]
    assert len(rights) == 2
    (tmp_path / "password").write_text("PASSWORD")
    for words in rights[:lines]:
        server.client.execute_command("ACL", "SETUSER", "engine", *words)
    coordination = Coordination(
        RedisSettings(
            enabled=True, url=server.tcp, username="engine", password_file=str(tmp_path / "password"), timeout_s=20
        )
    )
    try:
        lease, popularity = PromptLease(coordination, "d"), Popularity(coordination, chains=1)
        if lines == 1:
            with pytest.raises(OSError, match=r"ERR|NOPERM"):
                lease.acquire()
            return
        assert lease.acquire() is LeaseResult.ACQUIRED
        assert lease.renew()
        assert lease.mark_stored()
        for number in (1, 2, 2):  # one goes for want of room
            popularity.add(b"n" * 32, bytes([number]) * 32, 1, 1_800_000_000.0)
        assert popularity.hottest(b"n" * 32, 3) == [b"\2" * 32]
    finally:
        coordination.close()
        server.client.execute_command("ACL", "DELUSER", "engine")


def test_a_moved_slot_is_followed_and_a_migrating_one_fails() -> None:
    cluster = Cluster()
    coordination = Coordination(RedisSettings(enabled=True, url=cluster.url, mode="cluster", timeout_s=20))
    try:
        first, second = PromptLease(coordination, "d"), PromptLease(coordination, "d")
        assert first.acquire() is LeaseResult.ACQUIRED
        name = b"kvcache:w1:{d}:lease"
        source = cluster.owner(name)
        target = next(node for node in cluster.nodes if node is not source)
        cluster.move(key_slot(name), source, target)
        assert first.renew()
        assert second.acquire() is LeaseResult.HELD_ELSEWHERE
        cluster.move(key_slot(name), target, source, leave_open=True)
        with suppress(OSError):  # some of its keys are here and some there
            assert second.acquire() is LeaseResult.HELD_ELSEWHERE
        cluster.move(key_slot(name), target, source)
        assert first.mark_stored()
        assert second.acquire() is LeaseResult.STORED
    finally:
        coordination.close()
        cluster.end()

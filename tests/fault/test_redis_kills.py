"""Two processes that write the same long records are killed at any moment: what can be found is whole, what is left
over expires, and the next writer is not in its way."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from kvcache.tier.redis.keys import KeyNames
from kvcache.tier.tier import Outcome
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.redis_topology import until
from tests.tier.blocks import buffer, chain, holds, record

pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING)

ROOT = Path(__file__).parents[2]
DONE, NOT_FOUND = Outcome.DONE, Outcome.NOT_FOUND
LONG = 1 << 20
BLOCKS = 12

WRITER = f"""
import sys
from kvcache.settings.tiers import RedisSettings
from kvcache.tier.redis import RedisTier
from tests.tier.blocks import chain, record
tier = RedisTier(RedisSettings(url=sys.argv[1], part_bytes=256 << 10))
blocks = chain({BLOCKS})
records = [record(address, {LONG}) for address in blocks]
print("ready", flush=True)
sys.stdin.readline()
while True:
    tier.write(blocks, records)
    tier.remove(blocks[::2])
"""


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.end()


def killed(server: RedisServer, after_s: float) -> None:
    """Two writers at once, killed so many seconds after the first key is there."""
    command = [sys.executable, "-c", WRITER, server.unix]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    writers = [subprocess.Popen(command, env=environment, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            writer.stdin.write("go\n")
            writer.stdin.flush()
        until(server.client.dbsize, "something was written")
        threading.Event().wait(after_s)
    finally:
        for writer in writers:
            writer.kill()
        for writer in writers:
            writer.wait()
            writer.stdin.close()
            writer.stdout.close()


def test_killed_writers_leave_no_torn_record(server: RedisServer, request: pytest.FixtureRequest) -> None:
    names, chance = KeyNames("kvcache"), random.Random(1)
    blocks = chain(BLOCKS)
    tier = RedisTier(RedisSettings(url=server.unix, part_bytes=256 << 10, timeout_s=60))
    found = 0
    for _ in range(20 if request.config.getoption("--long") else 2):
        killed(server, chance.uniform(0.01, 0.2))
        into = [buffer(LONG) for _ in blocks]
        outcomes = tier.read(blocks, into)
        assert set(outcomes) <= {DONE, NOT_FOUND}
        assert all(holds(s, a, LONG) for s, a, o in zip(into, blocks, outcomes, strict=True) if o is DONE)
        assert tier.check() == []
        keys = server.client.keys("*")
        found += len(keys)
        assert all(server.client.ttl(key) > 0 for key in keys if not names.is_record(key)), "a part that never goes"
        assert tier.write(blocks, [record(address, LONG) for address in blocks]) == (DONE,) * BLOCKS
        into = [buffer(LONG) for _ in blocks]
        assert tier.read(blocks, into) == (DONE,) * BLOCKS
        server.client.flushall()
    assert found
    tier.close()

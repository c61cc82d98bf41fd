"""What clients of a daemon give an end has it there."""

from __future__ import annotations

import pytest

from tests.daemon.daemon_process import LAYOUT, store
from tests.daemon.in_process_daemon import InProcessDaemon


def test_ttls_of_requests_and_namespaces_are_kept(in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = in_process.cache.os_env.clock
    began = clock.wall()

    def later(seconds: float) -> None:
        monkeypatch.setattr(type(clock), "wall", lambda self: began + seconds)

    later(0)  # it stands still until it is turned
    cache = in_process.open()
    long = cache.namespace(LAYOUT, model="m", revision="1", ttl_s=600)
    store(long, list(range(32)), 1)
    short = cache.namespace(LAYOUT, model="m", revision="2")
    with short.request(ttl_s=60) as r:
        assert r.ttl_s == 60
    store(cache.namespace(LAYOUT, model="m", revision="2", ttl_s=60), list(range(32)), 2)
    for seconds, blocks in ((59, [8, 8]), (61, [8, 0]), (601, [0, 0])):
        later(seconds)
        found = []
        for handle in (long, short):
            with handle.request() as r:
                found.append(r.match(list(range(32))).blocks)
        assert found == blocks

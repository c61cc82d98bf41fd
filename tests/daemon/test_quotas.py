"""Bytes of tenants: what each may take of a full tier, and what a greedy one cannot take from another."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.block.record import record_bytes
from kvcache.evict.quotas import UNLIMITED, Quota
from tests.daemon.daemon_process import LAYOUT, DaemonProcess, bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon
from tests.daemon.test_tenant import ACME, BETA, came_in, everybody

SLOT = record_bytes(LAYOUT.block_bytes())
Make = Callable[..., InProcessDaemon]


def limited(path: Path, **tenants: Any) -> str:
    return str(everybody(path, **tenants))


@pytest.mark.parametrize("policy", ["lru", "hazard"])
@pytest.mark.parametrize("share", ["map", "copy"])
def test_a_greedy_tenant_leaves_others_their_share(
    make_in_process: Make, tmp_path: Path, policy: str, share: str
) -> None:
    file = limited(tmp_path / "t", acme={"host_guaranteed_bytes": 16 * SLOT, "share": share}, beta={"share": share})
    in_process = make_in_process(daemon__tenants_file=file, evict__policy=policy)  # room for 64 records
    acme, beta = (bound_to(came_in(in_process, token, tmp_path)) for token in (ACME, BETA))
    mine = [store(acme, list(range(100 * i, 100 * i + 16)), i) for i in range(4)]
    rng = random.Random(1)
    for i in range(60):
        theirs = list(range(10_000 + 100 * i, 10_000 + 100 * i + 32))
        store(beta, theirs, 100 + i)
        for _ in range(rng.randrange(3)):  # and uses what it has more than the other does
            load(beta, theirs)
        held = in_process.cache.cost_classes.used_bytes("host")
        assert held["acme"] >= 16 * SLOT
    assert in_process.cache.cost_classes.used_bytes("host")["beta"] > 32 * SLOT, "the rest is anybody's"
    assert [load(acme, list(range(100 * i, 100 * i + 16))) for i in range(4)] == mine


def test_a_quota_holds_without_cost_to_others(make_in_process: Make, tmp_path: Path) -> None:
    in_process = make_in_process(daemon__tenants_file=limited(tmp_path / "t", beta={"host_quota_bytes": 8 * SLOT}))
    acme, beta = (bound_to(came_in(in_process, token, tmp_path)) for token in (ACME, BETA))
    mine = store(acme, list(range(64)), 1)
    for i in range(10):
        store(beta, list(range(1000 * i, 1000 * i + 16)), i)
        assert in_process.cache.cost_classes.used_bytes("host").get("beta", 0) <= 8 * SLOT
    assert load(acme, list(range(64))) == mine


def test_limits_are_reloaded_and_removed_with_their_tenant(make_in_process: Make, tmp_path: Path) -> None:
    path = tmp_path / "t"
    in_process = make_in_process(
        daemon__tenants_file=limited(path, acme={"host_quota_bytes": 5 * SLOT}),
        evict__tenants={"beta": {"host_guaranteed_bytes": SLOT}},
    )
    quotas, daemon = in_process.cache.quotas, in_process.daemon
    assert quotas.of("acme", "host") == Quota(5 * SLOT, 0)
    assert quotas.of("beta", "host") == Quota(UNLIMITED, SLOT)
    limited(path, beta={"host_guaranteed_bytes": 2 * SLOT, "host_quota_bytes": "1MiB"})
    daemon._reload()
    assert quotas.of("acme", "host") == Quota()
    assert quotas.of("beta", "host") == Quota(1 << 20, 2 * SLOT)
    limited(path, beta={"host_guaranteed_bytes": "1GiB"})
    daemon._reload()
    assert quotas.of("beta", "host") == Quota(1 << 20, 2 * SLOT)


def test_shares_beyond_the_capacity_are_refused_at_start(
    make_daemon: Callable[..., DaemonProcess], tmp_path: Path
) -> None:
    file = limited(tmp_path / "t", acme={"host_guaranteed_bytes": "20MiB"}, beta={"host_guaranteed_bytes": "20MiB"})
    done = make_daemon(DAEMON__TENANTS_FILE=file).run()
    assert done.returncode == 2
    assert "host_guaranteed_bytes of all tenants" in done.stderr

"""A client's flush reports what its daemon's tiers hold of its blocks; an earlier daemon's bare answer still does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcache.cache.api import FlushReport, TierFlush
from kvcache.daemon.protocol import describe_report, read_report
from kvcache.daemon.server import slot_lease
from kvcache.errors import KVCacheError
from kvcache.tier.tier import Outcome, Ticket
from tests.daemon.daemon_process import bound_to, store


def refusing(monkeypatch: pytest.MonkeyPatch, cache: Any) -> None:
    (nvme,) = cache.lower_tiers
    submit: Callable[..., Ticket] = nvme.submit

    def refuses(op: str, addresses: Any, *arguments: Any, **more: Any) -> Ticket:
        if op != "write":
            return submit(op, addresses, *arguments, **more)
        ticket = Ticket(len(addresses))
        ticket.settle_many(0, [Outcome.FAILED] * len(addresses))
        return ticket

    monkeypatch.setattr(nvme, "submit", refuses)


@pytest.fixture
def nvme_daemon(make_in_process: Any, tmp_path: Path) -> Any:
    drive = {"path": tmp_path / "nvme", "capacity_bytes": "64MiB", "min_free_bytes": 0}
    return make_in_process(nvme=drive, nvme__enabled=True)


def test_a_clients_flush_reports_refused_blocks(nvme_daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, other = nvme_daemon.open(), nvme_daemon.open()
    with monkeypatch.context() as patch:
        refusing(patch, nvme_daemon.cache)
        store(bound_to(cache), list(range(32)), 1)
        for client in (cache, other):
            report = client.flush(30)
            assert report.tiers == {"nvme": TierFlush(refused=8)}
            assert not report
    assert cache.flush(30).tiers == {"nvme": TierFlush(reached=8)}
    assert other.close()
    assert cache.close()


def test_a_flush_answer_of_an_earlier_daemon_is_read(nvme_daemon: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = nvme_daemon.open()
    for done in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(slot_lease, "_execute", lambda *_, done=done: {"done": done})
            assert bool(cache.flush(1)) is done
    assert cache.flush(30)


def test_a_flush_report_round_trips_over_the_socket() -> None:
    report = FlushReport({"nvme": TierFlush(1, 2, 3, 1, synced=False)}, "why")
    assert read_report({"done": False, "report": describe_report(report)}) == report
    newer = {"tiers": {"nvme": {"reached": 1, "another": 2}}, "fault": ""}
    assert read_report({"done": True, "report": newer}).tiers == {"nvme": TierFlush(reached=1)}
    with pytest.raises(KVCacheError, match="is invalid"):
        read_report({"done": True, "report": {"tiers": 3, "fault": ""}})


def test_blocks_lost_by_a_daemon_are_reported_once(make_daemon: Any) -> None:
    daemon = make_daemon().start()
    with daemon.open() as cache:
        store(bound_to(cache), list(range(32)), 1)
        daemon.kill()
        assert not cache.flush(5)
        daemon.start()
        assert cache.wait_reachable(60)
        assert "are lost" in cache.flush(60).fault
        assert cache.flush(60)

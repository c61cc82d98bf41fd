"""What an operator asks of running caches: ps, stats, events, check, bypass."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.cache.api import FlushReport, TierFlush
from kvcache.transfer.pages import GroupPages

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=256, dtype="fp32", block_tokens=4)


@pytest.fixture(autouse=True)
def wide(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def cache() -> Iterator[Any]:
    """A cache that served two requests: 10 blocks requested and stored, then requested again with one block more."""
    with closing(kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)) as made:
        tensor = np.zeros((1, 2, 16, 4, 1, 256), np.float32)
        pages = [GroupPages.from_tensors(LAYOUT, tensor, axes=("kv", "page", "token", "head", "dim"))]
        for tokens in (40, 44):
            with made.namespace(LAYOUT, model="org/model", revision="r").request(id=f"of {tokens}") as r:
                hit = r.match(range(tokens))
                r.admit()
                assert r.store(pages, [list(range(hit.blocks, 10))], first_block=hit.blocks).wait(30)
        yield made


@pytest.fixture
def address() -> str:
    return f"{os.getpid()}-1"


def test_stats_shows_the_miss_ratio_curve(kv: Any, cache: Any) -> None:
    code, said, _ = kv("stats", "--curve")
    assert code == 0
    assert "host, 1 MiB" in said
    assert "4 times" in said
    assert "from a sample of 2 requests" in said
    code, said, _ = kv("stats", "--by", "tenant")
    assert code == 0
    row = next(line for line in said.splitlines() if "default" in line).split()
    assert row[:3] == ["host", "default", "84"]
    told = json.loads(kv("stats", "--curve", "--json")[1])
    assert told == cache.curve()
    assert [point["times"] for point in told["tiers"]["host"]["points"]] == told["times"]


def test_ps_lists_running_caches(cache: Any, kv: Any, address: str, runtime: Path) -> None:
    code, out, _ = kv("ps")
    assert code == 0
    assert out.split()[:2] == ["address", "program"]
    for text in (address, "org/model", "120 KiB of 1 MiB", "off"):
        assert text in out
    code, out, _ = kv("ps", "--json")
    (row,) = json.loads(out)
    assert (row["address"], row["socket"], row["fault"]) == (address, str(runtime / f"{address}.sock"), "")
    assert row["models"] == ["org/model"]


def test_ps_is_empty_without_running_caches(kv: Any) -> None:
    assert json.loads(kv("ps", "-o", "json")[1]) == []
    assert kv("ps")[0] == 0


def test_ps_shows_a_cache_that_does_not_answer(runtime: Path, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcache.daemon.client import control as client
    from kvcache.daemon.server import control as server

    with closing(kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False)):
        monkeypatch.setattr(server.ControlServer, "_info", lambda *_: {"pid": 2**70})  # msgpack has no such number
        code, out, _ = kv("ps")
        assert (code, "does not answer" in out) == (1, True)
        assert kv("ps", "-o", "json")[0] == 1
        monkeypatch.undo()
    assert client.COMMAND_TIMEOUT_S < 10


def test_stats_shows_tokens_and_reasons(cache: Any, kv: Any) -> None:
    code, out, _ = kv("stats")
    assert code == 0
    for text in ("requested", "84", "in 2 requests", "found in host", "47.6%", "cold", "never stored", "120 KiB"):
        assert text in out
    assert json.loads(kv("stats", "-o", "json")[1]) == cache.stats()
    assert json.loads(kv("stats", "--json")[1]) == cache.stats()
    assert 'kvcache_hit_tokens_total{tier="host"} 40.0' in kv("stats", "-o", "prometheus")[1]


def test_events_shows_the_last_events(cache: Any, kv: Any) -> None:
    code, out, _ = kv("events")
    assert code == 0
    assert all(text in out for text in ("stored", "host", "of 40", "10", "80 KiB"))
    (event,) = json.loads(kv("events", "-n", "5", "--json")[1])
    assert (event["kind"], event["blocks"], event["request"]) == ("stored", 10, "of 40")
    assert json.loads(kv("events", "--tail", "0", "--json")[1]) == []


def test_check_exits_by_the_caches_faults(cache: Any, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv("check")[:2] == (0, "sound\n")
    with monkeypatch.context() as patch:
        patch.setattr(cache, "check", lambda: [f"fault {i}" for i in range(1002)])
        code, out, _ = kv("check")
        assert (code, "fault 999" in out, "and 2 more" in out) == (1, True, True)
        code, out, _ = kv("check", "-o", "json")
        assert (code, json.loads(out)["count"]) == (1, 1002)


def test_bypass_turns_a_cache_off_and_on(cache: Any, kv: Any, address: str) -> None:
    code, out, _ = kv("bypass", "on", "--json")
    assert (code, json.loads(out)) == (0, [{"address": address, "mode": "on", "was": "off"}])
    assert cache.stats()["bypass"] == {"loads": True, "stores": True}
    assert "bypassed: loads, stores" in kv("stats")[1]
    assert 'kvcache_bypass{path="loads"} 1.0' in kv("stats", "-o", "prometheus")[1]
    assert json.loads(kv("bypass", "--json")[1]) == [{"address": address, "mode": "on", "was": "on"}]
    assert kv("bypass", "stores")[0] == 0
    assert cache.stats()["bypass"] == {"loads": False, "stores": True}
    assert kv("bypass", "off", "--address", address)[0] == 0
    assert cache.stats()["bypass"] == {"loads": False, "stores": False}


def test_sync_waits_for_all_tiers(cache: Any, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kv("sync")[:2] == (0, "all of it is there\n")
    assert json.loads(kv("sync", "--json")[1]) == {"done": True, "tiers": {}, "fault": ""}
    report = FlushReport(
        {"nvme": TierFlush(7, 5, 3, 2), "redis": TierFlush(9, synced=False)}, "2 stores have not ended"
    )
    monkeypatch.setattr(cache.tier_manager, "flush", lambda *_, **__: report)
    code, out, _ = kv("sync", "--timeout-s", "1")
    assert code == 1
    rows = [line.split() for line in out.splitlines()]
    assert rows[0] == ["tier", "reached", "refused", "waiting"]
    assert rows[1:3] == [["nvme", "7", "5", "3"], ["redis", "9", "0", "0", "not", "durable"]]
    assert out.splitlines()[3:] == ["2 stores have not ended", "not all of it is there after at most 1 s"]
    code, out, _ = kv("sync", "--json")
    assert (code, json.loads(out)["tiers"]["nvme"]["lost"]) == (1, 2)
    monkeypatch.undo()


def test_a_running_cache_of_an_earlier_version_is_synced(cache: Any, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvcache.daemon.server import control as server

    for flushed in (True, False):
        monkeypatch.setattr(server.ControlServer, "_flush", lambda *_, said=flushed: {"flushed": said})
        assert kv("sync")[0] == (0 if flushed else 1)


def test_several_caches_need_an_address(cache: Any, kv: Any, address: str, runtime: Path) -> None:
    with closing(kvcache.open(host__capacity_bytes="2MiB", nvme__enabled=False)) as other:
        second = f"{os.getpid()}-2"
        code, _, err = kv("stats")
        assert (code, err.count("\n")) == (2, 1)
        assert address in err
        assert second in err
        assert "--address" in err
        assert kv("bypass", "on")[0] == 2
        assert other.stats()["bypass"]["loads"] is False
        assert json.loads(kv("stats", "-a", second, "--json")[1]) == other.stats()
        assert json.loads(kv("stats", "-a", str(runtime / f"{second}.sock"), "--json")[1]) == other.stats()
        assert [row["address"] for row in json.loads(kv("bypass", "loads", "--all", "--json")[1])] == [address, second]
        assert cache.bypass.mode == other.bypass.mode == "loads"
        assert kv("bypass", "off", "--all", "-a", second)[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [("stats",), ("check",), ("events",), ("bypass", "on"), ("bypass", "on", "--all"), ("stats", "-a", "4711-1")],
)
def test_an_absent_daemon_exits_with_3_and_one_line(kv: Any, arguments: tuple[str, ...]) -> None:
    code, out, err = kv(*arguments)
    assert (code, out, err.count("\n")) == (3, "", 1)
    assert err.startswith("kvcache: ")


def test_an_invalid_argument_exits_with_2(cache: Any, kv: Any) -> None:
    assert kv("bypass", "maybe")[0] == 2
    assert kv("stats", "-o", "yaml")[0] == 2
    assert cache.bypass.mode == "off"

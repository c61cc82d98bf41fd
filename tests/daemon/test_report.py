"""What a cache says of itself: all to its operator, to a tenant what is his own."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from typing import Any

import pytest

from kvcache.cache.cache import Cache
from kvcache.daemon.server.report import Report
from kvcache.errors import ConfigError
from kvcache.settings.sources import load as load_settings
from tests.contract.fake_engine import Engine
from tests.daemon.daemon_process import LAYOUT, bound_to, load, store
from tests.daemon.in_process_daemon import until


@pytest.fixture
def cache() -> Iterator[Cache]:
    """Both tenants keep one prompt, and asked for more; acme asked for what only zeta has."""
    settings = load_settings(None, host={"capacity_bytes": "4MiB", "slab_bytes": "1MiB"}, nvme__enabled=False)
    with Cache(settings) as made:
        for tenant, first in (("acme", 0), ("zeta", 500)):
            handle = bound_to(made, tenant=tenant)
            store(handle, list(range(first, first + 32)), first)
            for n in range(2):
                ask(handle, [*range(first, first + 32), *range(900 + n * 100, 904 + n * 100)], f"{tenant}-{n}")
        ask(bound_to(made, tenant="acme"), list(range(500, 532)), "acme-spies")
        made.namespace_usage.take()
        made.curve()  # plays what waits, so that statistics stay as they are
        yield made


def ask(handle: Any, ids: list[int], id: str) -> None:
    with handle.request(id=id, agent=id.partition("-")[0]) as r:
        r.match(ids)
        r.admit()


def every(report: Report) -> dict[str, Any]:
    return {
        "stats": report.stats(),
        "namespaces": report.namespaces(),
        "tenants": report.tenants(),
        "agents": report.agents(),
        "prefixes": report.prefixes(),
        "events": report.events(),
        "explain": report.explain({"count": 10}),
        "curve": report.curve(),
    }


def test_an_operator_sees_all_tenants(cache: Cache) -> None:
    told = every(Report(cache))
    assert told["stats"] == cache.stats()
    assert told["curve"] == cache.curve()
    assert {row["tenant"]: (row["requests"], row["tiers"]) for row in told["tenants"]} == {
        "acme": (3, {"host": {"records": 8, "bytes": 8 * 12_288}}),
        "zeta": (2, {"host": {"records": 8, "bytes": 8 * 12_288}}),
    }
    assert {row["agent"]: row["requests"] for row in told["agents"]} == {"acme": 3, "zeta": 2}
    assert {row["tokens"] for row in told["prefixes"]} == {32}
    assert len(told["prefixes"]) == 2
    assert len(told["explain"]) == 5
    assert told["explain"][0]["reason"] == "apart"
    assert {event["kind"] for event in told["events"]} == {"stored"}


def test_a_tenants_report_shows_no_other_tenant(cache: Cache) -> None:
    acme, zeta = (bound_to(cache, tenant=tenant) for tenant in ("acme", "zeta"))
    told = every(Report(cache, "acme"))
    said = repr(told)
    assert "zeta" not in said
    assert zeta.id.hex()[:8] not in said
    assert told["stats"] == {
        "tiers": {"host": {"records": 8, "used_bytes": 8 * 12_288}},
        "counters": {"requests": 3, "asked_tokens": 3 * 36 - 4, "hit_tokens": {"host": 64}},
    }
    assert [row["id"] for row in told["namespaces"]] == [acme.id.hex()]
    (host,) = told["curve"]["tiers"].values()
    whole = cache.curve()["tiers"]["host"]["by"]["tenant"]["acme"]["hit_rates"]
    assert [point["hit_rate"] for point in host["points"]] == whole
    assert [row["tenant"] for row in told["tenants"]] == ["acme"]
    assert [row["agent"] for row in told["agents"]] == ["acme"]
    assert [row["namespace"] for row in told["prefixes"]] == [acme.id.hex()]
    assert {story["request"] for story in told["explain"]} == {"acme-0", "acme-1", "acme-spies"}
    spied = next(story for story in told["explain"] if story["request"] == "acme-spies")
    assert (spied["reason"], "other" in spied, "differs" in spied) == ("cold", False, False)


def test_another_tenants_block_looks_absent(cache: Cache) -> None:
    report = Report(cache, "acme")
    ask(bound_to(cache, tenant="acme"), list(range(7000, 7032)), "acme-spies")
    theirs, nobodys = (
        report.explain({"ids": array("I", range(first, first + 32)).tobytes()})[0] for first in (500, 7000)
    )
    for story in (theirs, nobodys):
        for name in ("time", "ago_s", "ids"):
            story.pop(name)
        other = story.pop("other")
        assert other["request"] == "acme-spies", "its own, which asked in vain"
    assert theirs == nobodys
    assert report.explain({"request": "zeta-0"}) == []
    with pytest.raises(ConfigError, match="no engine has bound"):
        report.explain({"ids": bytes(4), "namespace": bound_to(cache, tenant="zeta").id.hex()})


@pytest.mark.parametrize("left", [False, True])
def test_divergence_uses_only_the_tenants_own_prompts(cache: Cache, left: bool) -> None:
    acme, zeta, told = bound_to(cache, tenant="acme"), bound_to(cache, tenant="zeta"), []
    for n, kept in enumerate((True, False)):
        guess = list(range(2000 + 100 * n, 2016 + 100 * n))
        decoy = [*guess[:4], *range(5000, 5012)]
        ask(acme, decoy, "acme-decoy")
        store(acme, decoy, 1)
        if kept:
            store(zeta, guess, 2)
            ask(zeta, [*guess, *range(4)], "zeta-kept")
        ask(acme, guess, f"acme-guess-{kept}")
        if left:
            zeta.clear()
        asked = ({"request": f"acme-guess-{kept}"}, {"ids": array("I", guess).tobytes()})
        told.append([Report(cache, "acme").explain(question)[0] for question in asked])
        if kept and not left:
            assert Report(cache).explain(asked[0])[0]["reason"] == "apart"
    for theirs, nobodys in zip(*told, strict=True):
        assert theirs.keys() == nobodys.keys()
        assert theirs["other"]["request"] == nobodys["other"]["request"] == "acme-decoy"
        for name in ("reason", "block", "token", "ours", "theirs"):
            ours = [each - 100 if each < 5000 else each for each in nobodys[name]] if name == "ours" else nobodys[name]
            assert theirs[name] == ours, name
        assert theirs["reason"] == "diverged"


def test_an_eviction_hides_the_other_tenants_request() -> None:
    settings = load_settings(None, host={"capacity_bytes": "768KiB", "slab_bytes": "192KiB"}, nvme__enabled=False)
    with Cache(settings) as made:
        for tenant, first in (("acme", 0), ("zeta", 1000)):
            handle, engine = bound_to(made, tenant=tenant), Engine(LAYOUT)
            with handle.request(id=f"engine-of-{tenant}/1") as r:
                r.match(list(range(first, first + 4 * 64)))
                r.admit()
                assert r.store(engine.described, engine.ids(list(range(64)))).wait(60)
        told = Report(made, "acme").events()
        assert "zeta" in {event["request"][10:14] for event in Report(made).events() if event["kind"] == "evicted"}
        evicted = [event for event in told if event["kind"] == "evicted"]
        assert [(event["request"], event["agent"], event["session"]) for event in evicted] == [("", "", "")]
        assert {event["request"] for event in told if event["kind"] == "stored"} == {"engine-of-acme/1"}


def test_a_tenants_statistics_do_not_wait_for_counts(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    def records() -> int:
        return int(Report(cache, "acme").stats()["tiers"].get("host", {}).get("records", 0))

    until(lambda: records() == 8)
    counting, count, go, threads = threading.Event(), cache.namespace_usage._count, threading.Event(), []

    def slow() -> Any:
        threads.append(threading.current_thread())
        counting.set()
        assert go.wait(60)
        return count()

    monkeypatch.setattr(cache.namespace_usage, "_count", slow)
    cache.namespace_usage._counted, cache.namespace_usage._until = {}, 0.0
    assert Report(cache, "acme").stats()["tiers"] == {}, "the first count is waited for no more than another"
    go.set()
    until(lambda: records() == 8)
    go.clear()
    counting.clear()
    store(bound_to(cache, tenant="acme"), list(range(3000, 3004)), 1)
    cache.namespace_usage._until = 0.0
    until(lambda: records() == 8 and counting.is_set())
    assert records() == 8, "while it is counted"
    go.set()
    until(lambda: records() == 9)
    assert threading.current_thread() not in threads


def test_a_tenant_without_blocks_sees_an_empty_report(cache: Cache) -> None:
    told = every(Report(cache, "nobody"))
    assert all(tier["points"] == [] for tier in told.pop("curve")["tiers"].values())
    assert told.pop("stats") == {"tiers": {}, "counters": {"requests": 0, "asked_tokens": 0, "hit_tokens": {}}}
    assert set(map(len, told.values())) == {0}


def test_count_arguments_are_checked(cache: Cache) -> None:
    report = Report(cache)
    assert len(report.events(1)) == 1
    assert report.events(0) == []
    assert len(report.prefixes(1)) == 1
    for call in (report.events, report.prefixes):
        for count in (-1, "3", True):
            with pytest.raises(ConfigError, match="expected a number"):
                call(count)  # type: ignore[arg-type]


def test_reports_change_no_state(cache: Cache) -> None:
    before, clock = cache.stats(), cache.index.clock
    every(Report(cache))
    every(Report(cache, "acme"))
    assert (cache.stats(), cache.index.clock) == (before, clock)
    assert len(load(bound_to(cache, tenant="zeta"), list(range(500, 532)))) == 8

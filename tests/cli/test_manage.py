"""What an operator orders: ls, prune, pin, unpin, on a running cache."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cache.cache import Cache
from tests.daemon.daemon_process import bound_to, load, store

DAY = 86_400.0


@pytest.fixture(autouse=True)
def wide(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def cache() -> Iterator[Cache]:
    """Two tenants: acme's planner and critic began a prompt alike, a request of zeta's was stored and not asked for."""
    with kvcache.open(host__capacity_bytes="4MiB", host__slab_bytes="1MiB", nvme__enabled=False) as made:
        assert isinstance(made, Cache)
        acme, zeta = bound_to(made, tenant="acme", model="org/large"), bound_to(made, tenant="zeta", model="org/small")
        for agent, ids in (("planner", list(range(32))), ("critic", [*range(16), *range(900, 916)])):
            store(acme, ids, 1)
            with acme.request(id=f"of {agent}", agent=agent) as r:
                r.match(ids)
                r.admit()
        store(zeta, list(range(50, 62)), 2)
        yield made
        assert made.check() == []


def later(cache: Cache, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """So much later, by the cache's own clock."""
    now = cache.os_env.clock.wall()
    monkeypatch.setattr(type(cache.os_env.clock), "wall", lambda self: now + seconds)


def test_ls_lists_bytes_and_last_use(cache: Cache, kv: Any) -> None:
    code, out, _ = kv("ls")
    assert code == 0
    for text in ("org/large", "acme", "org/small", "zeta", "host", "144 KiB", "36 KiB", "100.0%", " s ago"):
        assert text in out, out
    rows = json.loads(kv("ls", "--json")[1])
    assert {row["tenant"]: row["tiers"] for row in rows} == {
        "acme": {"host": {"records": 12, "bytes": 12 * 12_288}},
        "zeta": {"host": {"records": 3, "bytes": 3 * 12_288}},
    }
    assert {row["tenant"]: (row["requests"], row["asked_tokens"]) for row in rows} == {"acme": (2, 64), "zeta": (0, 0)}
    assert [row["model"] for row in json.loads(kv("ls", "--tenant", "zeta", "-o", "json")[1])] == ["org/small"]


def test_prune_removes_namespaces_unused_for_that_time(cache: Cache, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    acme, zeta = bound_to(cache, tenant="acme", model="org/large"), bound_to(cache, tenant="zeta", model="org/small")
    with monkeypatch.context() as patch:
        later(cache, patch, 8 * DAY)
        store(acme, list(range(700, 704)), 3)
        code, out, _ = kv("prune", "--unused", "7d", "--dry-run", "--json")
        assert code == 0
        (row,) = json.loads(out)["pruned"]
        assert (row["id"], row["model"], row["records"], row["bytes"]) == (zeta.id.hex(), "org/small", 3, 3 * 12_288)
        assert len(load(zeta, list(range(50, 62)))) == 3
    with monkeypatch.context() as patch:  # it was used meanwhile, by its load
        later(cache, patch, 7 * DAY - 60)
        assert json.loads(kv("prune", "--unused", "7d", "--json")[1])["pruned"] == []
    later(cache, monkeypatch, 20 * DAY)
    assert len(load(acme, list(range(32)))) == 8
    code, out, _ = kv("prune", "--unused", "11d")
    assert (code, "org/small" in out, "org/large" in out) == (0, True, False)
    assert (load(zeta, list(range(50, 62))), len(load(acme, list(range(32))))) == ([], 8)
    assert [row["tenant"] for row in json.loads(kv("ls", "--json")[1]) if row["tiers"]] == ["acme"]


def test_a_restart_does_not_count_as_use(kv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened() -> Any:
        return kvcache.open(
            host__capacity_bytes="4MiB",
            host__slab_bytes="1MiB",
            nvme={"path": tmp_path / "nvme", "capacity_bytes": "16MiB", "min_free_bytes": 0},
        )

    with opened() as cache:
        store(bound_to(cache, tenant="acme"), list(range(32)), 1)
    with opened() as cache:
        later(cache, monkeypatch, 2 * DAY)
    with opened() as cache:
        ((_, use),) = cache.usage_log.namespaces().items()
        assert cache.usage_log.since - use.last > DAY, "it began two days later"
        (row,) = json.loads(kv("prune", "--unused", "1d", "--dry-run", "--json")[1])["pruned"]
        assert row["last"] == use.last
        assert json.loads(kv("ls", "--json")[1])[0]["last"] == use.last


@pytest.mark.parametrize(
    "arguments", [("prune",), ("prune", "--unused", "soon"), ("prune", "--unused", "0d"), ("pin", "x", "--for", "1")]
)
def test_invalid_arguments_exit_with_2(cache: Cache, kv: Any, arguments: tuple[str, ...]) -> None:
    assert kv(*arguments)[0] == 2


def test_pin_accepts_a_name_a_request_or_tokens(cache: Cache, kv: Any) -> None:
    from kvcache.daemon.server.report import Report

    (shared,) = Report(cache).prefixes()
    assert (shared["tokens"], shared["requests"], shared["found_tokens"]) == (16, 2, 32)
    for argument, tokens in ((shared["prefix"], 16), ("of critic", 32), (json.dumps(list(range(32))), 32)):
        code, out, _ = kv("pin", argument, "--for", "3h", "--json")
        assert code == 0, out
        made = json.loads(out)["made"]
        assert (made["tokens"], made["wanted_tokens"], made["by_tier"]) == (tokens, tokens, {"host": tokens})
    assert cache.stats()["tiers"]["host"]["pinned_bytes"] == (4 + 8 + 8) * 12_288
    code, out, _ = kv("pin")
    assert (code, out.count("in 3 h"), "32 in host" in out) == (0, 3, True)
    assert json.loads(kv("unpin", "2", "--json")[1])["ended"] == [2]
    assert kv("unpin", "2")[0] == 1
    assert json.loads(kv("unpin", "all", "--json")[1]) == {"ended": [1, 3], "pins": []}
    assert cache.stats()["tiers"]["host"]["pinned_bytes"] == 0


def test_an_unknown_prefix_is_refused(cache: Cache, kv: Any) -> None:
    for argument, expected, says in (
        ("00" * 8, 1, "no recent prompt"),
        ("[1, 2]", 2, "no block of this prefix"),
        ("a prompt", 2, "--model"),
    ):
        code, _, err = kv("pin", argument)
        assert (code, says in err) == (expected, True), err
    assert json.loads(kv("pin", "--json")[1]) == {"made": None, "pins": []}


@pytest.mark.parametrize("tier", ["nvme", "object"])
def test_pin_promotes_up_to_the_pin_budget(kv: Any, tmp_path: Path, tier: str) -> None:
    """From wherever this process has never read it; what others need of host memory stays theirs."""
    below = {
        "nvme": {"path": tmp_path / "nvme", "capacity_bytes": "64MiB", "min_free_bytes": 0},
        "object": {"enabled": True, "url": f"file://{tmp_path}/objects"},
    }
    given = {"nvme": {"enabled": False}, tier: below[tier], "host": {"capacity_bytes": "1536KiB"}}  # 128 records
    tokens = list(range(20 * 4))
    with kvcache.open(**given) as made:
        store(bound_to(made), tokens, 1)
        assert made.flush(60)
    with kvcache.open(**given) as made:
        assert isinstance(made, Cache)
        handle = bound_to(made)
        code, out, _ = kv("pin", json.dumps(tokens), "--json")
        assert code == 0
        pin = json.loads(out)["made"]
        assert (pin["tokens"], pin["wanted_tokens"]) == (20 * 4, 20 * 4)
        assert pin["by_tier"] == {"host": 16 * 4, tier: 4 * 4}, "the rest stays below, and is kept there"
        assert made.stats()["tiers"]["host"]["pinned_bytes"] == 16 * 12_288  # an eighth
        for turn in range(40):
            store(handle, [1000 * turn + t for t in range(9_000, 9_064)], turn)
        assert made.flush(60)
        with handle.request() as r:
            assert r.match(tokens[: 16 * 4]).by_tier == {"host": 16}
        assert kv("unpin", "all")[0] == 0
        assert made.check() == []

"""`kvcache clear` over a running cache, and over a daemon."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cache.cache import Cache
from tests.daemon.daemon_process import bound_to, store


@pytest.fixture(autouse=True)
def wide(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "400")


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Cache]:
    with kvcache.open(
        host__capacity_bytes="4MiB",
        host__slab_bytes="1MiB",
        nvme={"path": tmp_path / "nvme", "capacity_bytes": "64MiB", "min_free_bytes": 0},
    ) as made:
        assert isinstance(made, Cache)
        for tenant in ("acme", "zeta"):
            store(bound_to(made, tenant=tenant), list(range(32)), 1)
        assert made.flush(30)
        yield made
        assert made.check() == []


def held(cache: Cache, tenant: str) -> set[str]:
    own = bound_to(cache, tenant=tenant).id
    return {
        tier.name for tier in (cache.host, *cache.lower_tiers) for address in tier.scan() if address.namespace == own
    }


def test_clear_erases_a_tenant_and_reports_it(cache: Cache, kv: Any) -> None:
    code, out, _ = kv("clear", "--tenant", "acme", "--dry-run")
    assert code == 0
    assert "nothing was removed" in out
    assert held(cache, "acme") == {"host", "nvme"}
    code, out, _ = kv("clear", "--tenant", "acme")
    assert code == 0
    assert "removed: no record of 1 namespaces remains" in out
    assert (held(cache, "acme"), held(cache, "zeta")) == (set(), {"host", "nvme"})


def test_clear_accepts_a_prefix_of_a_namespace_id(cache: Cache, kv: Any) -> None:
    given = bound_to(cache, tenant="zeta").id.hex()[:8]
    code, out, _ = kv("clear", "--namespace", given, "--json")
    assert code == 0
    (told,) = json.loads(out).values()
    assert told["left"] == {}
    assert set(told["records"]) == {"host", "nvme"}
    assert held(cache, "zeta") == set()


def test_clear_fails_if_a_tier_does_not_finish(cache: Cache, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache.lower_tiers[0], "wipe", lambda: False)
    code, out, _ = kv("clear", "--tenant", "acme")
    assert code == 1
    assert "nvme" in out
    assert "removed: no record" not in out


@pytest.mark.parametrize(
    "arguments", [(), ("--namespace", "00"), ("--namespace", "0" * 12), ("--tenant", "a", "--all", "-a", "x")]
)
def test_invalid_arguments_remove_nothing(cache: Cache, kv: Any, arguments: tuple[str, ...]) -> None:
    code, _, said = kv("clear", *arguments)
    assert code != 0
    assert said
    assert held(cache, "acme") == held(cache, "zeta") == {"host", "nvme"}


def test_an_unknown_name_exits_with_1_and_suggestions(cache: Cache, kv: Any) -> None:
    zeta = bound_to(cache, tenant="zeta").id.hex()
    typo = zeta[:7] + ("0" if zeta[7] != "0" else "1")
    for arguments, near in (
        (("clear", "--tenant", "acm"), "'acme'"),
        (("clear", "--tenant", "acm", "--dry-run"), "'acme'"),
        (("clear", "--tenant", "acm", "--all"), "'acme'"),
        (("clear", "--namespace", typo), zeta[:8]),
        (("clear", "--cache-salt", "nobody's"), "cache salt"),
        (("ls", "--tenant", "acm"), "'acme'"),
        (("pin", "[1, 2, 3, 4]", "--namespace", typo), zeta[:8]),
    ):
        code, _, said = kv(*arguments)
        assert (code, near in said) == (1, True), said
    assert held(cache, "acme") == held(cache, "zeta") == {"host", "nvme"}


def test_an_unknown_salt_error_shows_no_salt(cache: Cache, kv: Any) -> None:
    bound_to(cache, tenant="zeta", cache_salt="secret-salt")
    code, _, said = kv("clear", "--cache-salt", "secret-sal")
    assert (code, "secret-salt" in said) == (1, False)


def test_known_names_without_common_namespace_exit_with_1(cache: Cache, kv: Any) -> None:
    bound_to(cache, tenant="zeta", cache_salt="pepper")
    assert kv("clear", "--tenant", "zeta", "--cache-salt", "pepper")[0] == 0
    code, _, said = kv("clear", "--tenant", "acme", "--cache-salt", "pepper")
    assert (code, "no namespace" in said) == (1, True), said

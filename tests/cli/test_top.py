"""`kvcache top` and `quota`: the figures of a cache, in a terminal, by its socket or by a daemon's page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvcache
from kvcache.cache.cache import Cache
from kvcache.cli import top
from kvcache.daemon.client.control import fetch_json
from kvcache.daemon.http.app import HttpApi
from kvcache.daemon.http.server import bind_listener, start
from kvcache.errors import AccessError, ConfigError, UnreachableError
from kvcache.settings.service import HttpSettings
from kvcache.settings.types import show_bytes
from tests.daemon.daemon_process import bound_to, load, store
from tests.daemon.test_http import OWNERS


@pytest.fixture(autouse=True)
def wide(runtime: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "dumb")


@pytest.fixture
def cache() -> Iterator[Cache]:
    with kvcache.open(
        host__capacity_bytes="4MiB",
        host__slab_bytes="1MiB",
        nvme__enabled=False,
        evict__tenants={"acme": {"host_quota_bytes": "2MiB", "host_guaranteed_bytes": "1MiB"}},
    ) as made:
        assert isinstance(made, Cache)
        handle = bound_to(made, tenant="acme", model="org/large")
        store(handle, list(range(64)), 1)
        for n in range(3):
            with handle.request(id=f"r{n}", agent="planner") as r:
                r.match([*range(64), *range(900 + 4 * n, 904 + 4 * n)])
                r.admit()
        load(handle, list(range(64)))
        made.curve()  # plays what waits, so that statistics stay as they are
        yield made


@pytest.fixture
def serve(cache: Cache) -> Iterator[Callable[..., str]]:
    ends: list[Callable[[], None]] = []

    def make(**more: Any) -> str:
        settings = HttpSettings(enabled=True, port=0)
        listener = bind_listener(settings)
        port = listener.getsockname()[1]
        ends.append(start(HttpApi(cache, **more).application(), listener, settings))
        return f"http://127.0.0.1:{port}"

    yield make
    for end in ends:
        end()


def words(cache: Cache) -> list[str]:
    """What must be seen of this cache."""
    stats = cache.stats()
    counters, tier = stats["counters"], stats["tiers"]["host"]
    hits, asked = sum(counters["hit_tokens"].values()), counters["asked_tokens"]
    return [
        f"hit rate {hits / asked:.1%}",
        f"{hits:,} of {asked:,} tokens in {counters['requests']:,} requests",
        show_bytes(tier["used_bytes"]),
        show_bytes(tier["capacity_bytes"]),
        "cold",
        "planner",
        "org/large",
        f"{show_bytes(tier['used_bytes'])} of 2 MiB",  # acme's
        "loaded",
        "stored",
    ]


def test_top_reads_the_socket_or_the_http_page(cache: Cache, kv: Any, serve: Callable[..., str]) -> None:
    for arguments in (("top", "--once"), ("top", "--once", "--url", serve())):
        code, out, err = kv(*arguments)
        assert (code, err) == (0, "")
        assert [word for word in words(cache) if word not in out] == [], out


def test_json_is_the_same_from_both(cache: Cache, kv: Any, serve: Callable[..., str]) -> None:
    local, remote = (json.loads(kv("top", *more, "--json")[1]) for more in ((), ("--url", serve())))
    assert local.keys() == remote.keys() == {"time", *top.SNAPSHOT_PARTS}
    assert local["stats"] == remote["stats"] == json.loads(json.dumps(cache.stats()))
    assert local["events"] == remote["events"]
    assert len(local["prefixes"]) == 1


def test_top_shows_rates_between_two_polls(cache: Cache, kv: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    handle, looks = bound_to(cache, tenant="acme", model="org/large"), iter(range(3))

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if next(looks) == 2:
            raise KeyboardInterrupt
        with handle.request() as r:
            r.match([*range(64), *range(500, 564)])
            r.admit()

    monkeypatch.setattr("kvcache.cli.top.time.sleep", sleep)
    seen: list[str] = []
    plain = top.render
    monkeypatch.setattr(top, "render", lambda before, now: seen.append(text(plain(before, now))) or plain(before, now))
    code, _, err = kv("top", "--every", "0.5")
    assert (code, err, len(seen)) == (0, "", 3)
    assert "now)" not in seen[0]
    assert "(50.0% now)" in seen[1]
    assert "(50.0% now)" in seen[2]


def text(picture: Any) -> str:
    from io import StringIO

    from rich.console import Console

    out = StringIO()
    Console(file=out, width=200).print(picture)
    return out.getvalue()


def test_a_restarted_cache_has_no_negative_rates(cache: Cache) -> None:
    now = {"time": 10.0, "stats": {"counters": {"asked_tokens": 5, "hit_tokens": {"host": 3}}, "tiers": {}}}
    before = {"time": 8.0, "stats": {"counters": {"asked_tokens": 500, "hit_tokens": {"host": 300}}, "tiers": {}}}
    assert top.counter_delta(before, now, "asked_tokens") == top.counter_delta(before, now, "hit_tokens", "host") == 0
    assert top.counter_delta(now, before, "hit_tokens") == 297


def test_a_bypass_is_shown_first(cache: Cache, kv: Any) -> None:
    cache.bypass.set("on")
    assert kv("top", "--once")[1].startswith("bypassed: loads, stores")


def test_top_works_on_an_empty_cache(kv: Any) -> None:
    with closing(kvcache.open(host__capacity_bytes="4MiB", nvme__enabled=False)):
        code, out, err = kv("top", "--once")
        assert (code, "no requests yet" in out, err) == (0, True, "")


def test_quota_lists_usage_and_limits_of_each_tenant(cache: Cache, kv: Any) -> None:
    code, out, _ = kv("quota")
    used = cache.stats()["tiers"]["host"]["used_bytes"]
    assert code == 0
    for word in ("acme", "host", show_bytes(used), "2 MiB", f"{used / (2 << 20):.0%}", "1 MiB"):
        assert word in out, out
    (row,) = json.loads(kv("quota", "--json")[1])
    assert (row["tenant"], row["quotas"], row["least"]) == ("acme", {"host": 2 << 20}, {"host": 1 << 20})


def test_quota_lists_rate_limits_of_a_daemon(cache: Cache, kv: Any) -> None:
    rates = {
        "acme": {"bandwidth": 3 << 20, "operations": 1500.0, "moved_bytes": 5 << 20, "refused": 7},
        "new": {"bandwidth": None, "operations": None, "moved_bytes": 0, "refused": 0},
    }
    cache.control_handlers["rates"] = lambda _: {"rates": rates}
    _, out, _ = kv("quota")
    for word in ("3 MiB/s", "1,500/s", "5 MiB", "7", "new", "any"):
        assert word in out, out
    told = {row["tenant"]: row["rates"] for row in json.loads(kv("quota", "--json")[1])}
    assert told == rates


def test_top_sends_its_token_to_the_page(kv: Any, serve: Callable[..., str], tmp_path: Path) -> None:
    url = serve(owner=OWNERS.get)
    file = tmp_path / "token"
    file.write_text("acme-token\n")
    assert kv("top", "--once", "--url", url)[0] != 0
    code, out, _ = kv("top", "--once", "--url", url, "--token-file", str(file))
    assert (code, "org/large" in out) == (0, True)
    assert fetch_json(url, "api/info", environ={"KVCACHE_TOKEN": "zeta-token"})["info"]["tenant"] == "zeta"
    with pytest.raises(AccessError, match="expected a token"):
        fetch_json(url, "api/info", environ={"KVCACHE_TOKEN": "nobody"})


def test_a_url_without_the_api_is_refused(serve: Callable[..., str]) -> None:
    url = serve()
    for path in ("healthz", "page.css", "api/nothing", "nothing"):
        with pytest.raises(UnreachableError):
            fetch_json(url, path, environ={})
    with pytest.raises(UnreachableError):
        fetch_json("http://127.0.0.1:1/", "api/info", environ={})
    with pytest.raises(ConfigError, match="expected http"):
        fetch_json("file:///etc/passwd", "", environ={})

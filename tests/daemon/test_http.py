"""What the daemon answers over HTTP, and to whom."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvcache.cache.cache import Cache
from kvcache.daemon.http.app import PAGE_FILES, SECURITY_HEADERS, HttpApi, StatsHistory, token_from_header
from kvcache.daemon.server.admission import RateLimit
from kvcache.daemon.server.auth import Tenant
from kvcache.observe.exporter import exposition
from kvcache.settings.sources import load as load_settings
from tests.daemon.daemon_process import bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon, until
from tests.daemon.test_rate_limit import Turned

API = ("stats", "namespaces", "tenants", "agents", "prefixes", "events", "curve", "history", "info")
OPEN = ("/metrics", "/healthz", "/readyz")
OWNERS = {"acme-token": "acme", "zeta-token": "zeta", "operator-token": "*"}


@pytest.fixture
def cache() -> Iterator[Cache]:
    settings = load_settings(None, host={"capacity_bytes": "4MiB", "slab_bytes": "1MiB"}, nvme__enabled=False)
    with Cache(settings) as made:
        for tenant, first in (("acme", 0), ("zeta", 500)):
            handle = bound_to(made, tenant=tenant, model=f"org/{tenant}")
            store(handle, list(range(first, first + 32)), first)
            with handle.request(id=f"of {tenant}", agent=f"{tenant}-agent") as r:
                r.match([*range(first, first + 32), 1, 2, 3, 4])
                r.admit()
            load(handle, list(range(first, first + 32)))
        made.namespace_usage.take()
        made.curve()  # plays what waits, so that statistics stay as they are
        yield made


@pytest.fixture
def visit(cache: Cache) -> Iterator[Callable[..., TestClient]]:
    """A client of a site that is made with these arguments."""
    opened: list[TestClient] = []

    def make(host: str = "127.0.0.1", **more: Any) -> TestClient:
        client = TestClient(HttpApi(cache, version="1.2", **more).application(), base_url=f"http://{host}:9475")
        opened.append(client.__enter__())
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


@pytest.fixture
def site(visit: Callable[..., TestClient]) -> TestClient:
    return visit()


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def test_metrics_equal_the_table(site: TestClient, cache: Cache) -> None:
    answer = site.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=")
    assert answer.text == exposition(cache.stats())
    assert 'kvcache_hit_tokens_total{tier="host"} 128.0' in answer.text


def test_api_figures_equal_the_caches(site: TestClient, cache: Cache) -> None:
    told = {name: site.get(f"/api/{name}").json() for name in API}
    assert all(isinstance(answer["time"], float) for answer in told.values())
    assert told["stats"]["stats"] == json.loads(json.dumps(cache.stats()))
    assert {row["tenant"]: row["requests"] for row in told["tenants"]["tenants"]} == {"acme": 2, "zeta": 2}
    assert {row["model"] for row in told["namespaces"]["namespaces"]} == {"org/acme", "org/zeta"}
    assert {row["agent"] for row in told["agents"]["agents"]} == {"acme-agent", "zeta-agent"}
    assert {row["tokens"] for row in told["prefixes"]["prefixes"]} == {32}
    assert [event["kind"] for event in told["events"]["events"]] == ["stored", "loaded", "stored", "loaded"]
    assert told["info"]["info"] == {"version": "1.2", "since": cache.usage_log.since, "tenant": None}


def test_query_parameters_are_checked(site: TestClient) -> None:
    assert len(site.get("/api/events?count=1").json()["events"]) == 1
    assert site.get("/api/prefixes?count=1").json()["prefixes"] != []
    for count in ("-1", "x", "1e3", "9" * 30):
        answer = site.get(f"/api/events?count={count}")
        assert (answer.status_code, "expected a number" in answer.json()["error"]) == (400, True)


def test_explain_gives_reasons_and_no_prompt_text(site: TestClient) -> None:
    asked = (
        site.get("/api/explain?request=of acme"),
        site.get("/api/explain"),
        site.post("/api/explain", json={"ids": [*range(32), 1, 2, 3, 4]}),
    )
    for answer in asked:
        (story, *_) = answer.json()["stories"]
        assert story["reason"] in {"cold", "diverged"}
        assert not {"ids", "before", "ours", "theirs"} & set(story)
    assert asked[2].json()["stories"][0]["found_blocks"] == 8
    assert site.get("/api/explain?request=unknown").json()["stories"] == []


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"ids": 5}', b'{"ids": [-1]}', b'{"ids": ["a"]}', b'{"ids": []}', b"\xff", b"[" * 9999],
)
def test_an_invalid_query_is_400(site: TestClient, body: bytes) -> None:
    answer = site.post("/api/explain", content=body)
    assert (answer.status_code, set(answer.json())) == (400, {"error"})


def test_a_body_has_a_size_limit(site: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.daemon.http.app.MAX_BODY_BYTES", 100)
    assert site.post("/api/explain", json={"ids": list(range(100))}).status_code == 413


def test_http_cannot_change_state(site: TestClient) -> None:
    for path in (*(f"/api/{name}" for name in API), *OPEN, "/"):
        for method in ("POST", "PUT", "DELETE", "PATCH"):
            assert site.request(method, path).status_code == 405


def test_health_and_readiness(visit: Callable[..., TestClient]) -> None:
    reasons = ["starting", ""]
    for path, site in (("/readyz", visit(not_ready=lambda: reasons)), ("/healthz", visit(unhealthy=lambda: reasons))):
        reasons[:] = ["starting", ""]
        assert (site.get(path).status_code, site.get(path).text) == (503, "starting\n")
        reasons.clear()
        assert (site.get(path).status_code, site.get(path).text) == (200, "ok\n")


def test_every_response_has_security_headers(site: TestClient) -> None:
    for path in (
        "/",
        "/page.js",
        "/api/stats",
        "/api/nothing",
        "/metrics",
        "/api/events?count=x",
        "/../pyproject.toml",
    ):
        headers = site.get(path).headers
        assert {name: headers[name] for name in SECURITY_HEADERS} == dict(SECURITY_HEADERS)
    assert "unsafe" not in SECURITY_HEADERS["Content-Security-Policy"]


def test_only_the_pages_files_are_served(site: TestClient) -> None:
    for name, kind in PAGE_FILES.items():
        answer = site.get(f"/{name}")
        assert (answer.status_code, answer.headers["content-type"].partition(";")[0]) == (200, kind)
    assert site.get("/").content == site.get("/index.html").content
    for name in ("app.py", "..%2Fapp.py", "page/page.js", ".%2e/app.py"):
        assert site.get(f"/{name}").status_code == 404


# who may ask


def test_remote_peers_without_tokens_see_three_paths(visit: Callable[..., TestClient]) -> None:
    site = visit("10.0.0.5", local=False)
    assert [site.get(path).status_code for path in OPEN] == [200] * 3
    for path in ("/", "/page.js", *(f"/api/{name}" for name in API), "/api/explain"):
        answer = site.get(path, headers=bearer("anything"))
        assert (answer.status_code, "daemon.tenants_file" in answer.json()["error"]) == (403, True)


@pytest.mark.parametrize("local", [True, False])
def test_configured_tokens_are_required(visit: Callable[..., TestClient], local: bool) -> None:
    site = visit(owner=OWNERS.get, local=local)
    assert [site.get(path).status_code for path in OPEN] == [200] * 3
    wrong = ({}, bearer(""), bearer("nobody"), {"Authorization": "Basic !"}, {"Authorization": "Digest acme-token"})
    for path in ("/", "/page.js", *(f"/api/{name}" for name in API), "/api/explain"):
        for headers in wrong:
            answer = site.get(path, headers=headers)
            assert (answer.status_code, "Basic" in answer.headers["www-authenticate"]) == (401, True)
        assert site.get(path, headers=bearer("operator-token")).status_code == 200
        assert site.get(path, auth=("whoever", "operator-token")).status_code == 200


def test_a_tenant_sees_only_its_own_figures(visit: Callable[..., TestClient], cache: Cache) -> None:
    site = visit(owner=OWNERS.get, local=False)
    zeta = bound_to(cache, tenant="zeta", model="org/zeta").id.hex()
    for path in (*(f"/api/{name}" for name in API), "/api/explain", "/api/explain?request=of zeta"):
        text = site.get(path, headers=bearer("acme-token")).text
        assert "zeta" not in text
        assert zeta[:8] not in text
    posted = site.post("/api/explain", json={"ids": list(range(500, 532))}, headers=bearer("acme-token")).json()
    assert [(story["found_blocks"], story["reason"]) for story in posted["stories"]] == [(0, "cold")]
    assert site.get("/api/history", headers=bearer("acme-token")).json()["history"] == []
    assert site.get("/api/info", headers=bearer("acme-token")).json()["info"]["tenant"] == "acme"
    assert site.get("/api/stats", headers=bearer("operator-token")).json()["stats"]["counters"]["requests"] == 4


@pytest.mark.parametrize("name", ["evil.example:9475", "10.0.0.5", "127.0.0.1.evil.example"])
def test_a_foreign_host_header_is_refused(site: TestClient, name: str) -> None:
    assert site.get("/api/stats", headers={"Host": name}).status_code == 421


@pytest.mark.parametrize("name", ["localhost:9475", "127.0.0.1", "[::1]:9475", "127.0.0.2"])
def test_names_of_this_host_are_accepted(site: TestClient, name: str) -> None:
    assert site.get("/api/stats", headers={"Host": name}).status_code == 200


def test_a_bearer_header_is_parsed() -> None:
    assert token_from_header("Bearer abc") == token_from_header("bearer  abc ") == "abc"
    assert token_from_header("Basic " + base64.b64encode(b"me:a:b").decode()) == "a:b"
    for header in ("", "Bearer", "Bearer ", "Basic", "Basic ???", "Basic " + base64.b64encode(b"\xff:a").decode()):
        assert token_from_header(header) is None


# history


def test_history_is_sampled_and_bounded(site: TestClient, cache: Cache) -> None:
    (first, *_) = site.get("/api/history").json()["history"]
    counters = cache.stats()["counters"]
    assert first["asked_tokens"] == counters["asked_tokens"]
    assert first["hit_tokens"] == counters["hit_tokens"]
    assert first["used_bytes"] == {"host": cache.stats()["tiers"]["host"]["used_bytes"]}
    history = StatsHistory(samples=3)
    for time in range(5):
        history.add(cache.stats(), float(time))
    assert [sample["time"] for sample in history.all()] == [2.0, 3.0, 4.0]


def test_a_hung_event_loop_is_unhealthy(in_process: InProcessDaemon) -> None:
    daemon, blocker = in_process.daemon, threading.Event()
    assert daemon.health_issue() == ""
    daemon._loop.call_soon_threadsafe(blocker.wait)
    try:
        assert "event loop did not run for 0.1 s" in daemon.health_issue(0.1)
    finally:
        blocker.set()
    assert daemon.health_issue() == ""
    daemon.stop()
    until(lambda: daemon.not_ready_reason() == "ending")
    assert daemon.health_issue() == "", "an ending daemon is not replaced"


def test_readiness_follows_serving_and_warming(in_process: InProcessDaemon) -> None:
    assert in_process.daemon.not_ready_reason() == ""
    in_process.cache.readiness_checks.append(lambda: False)
    assert "still being loaded" in in_process.daemon.not_ready_reason()
    in_process.cache.readiness_checks.clear()
    in_process.daemon.stop()
    until(lambda: in_process.daemon.not_ready_reason() == "ending")


def test_explanations_count_against_the_rate_limit(visit: Callable[..., TestClient]) -> None:
    limits = {"acme": Tenant(name="acme", operations=2, bandwidth=1000), "zeta": Tenant(name="zeta")}
    rate_limits = {name: RateLimit(tenant, Turned()) for name, tenant in limits.items()}
    site = visit(owner=OWNERS.get, rate_limit=rate_limits.get)

    def ask(token: str, ids: int = 4) -> int:
        return site.post("/api/explain", headers=bearer(token), json={"ids": list(range(ids))}).status_code

    assert ask("acme-token") == 200
    assert rate_limits["acme"].moved_bytes > 0
    assert ask("acme-token", ids=1000) == 200, "what goes beyond is let through once"
    assert ask("acme-token") == 429
    assert site.get("/api/explain", headers=bearer("acme-token")).headers["Retry-After"] == "1"
    assert ask("zeta-token", ids=1000) == ask("operator-token") == 200
    assert site.get("/api/stats", headers=bearer("acme-token")).status_code == 200

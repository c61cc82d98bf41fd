"""The daemon's HTTP API. It is read-only; commands that change the cache use the control socket.

`/metrics` serves Prometheus, `/healthz` and `/readyz` serve probes, `/api/` serves JSON, and `/` is a page that uses
the API. No prompt content appears here: text, tokens and token ids are shown by `kvcache explain` only.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import threading
from array import array
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib.resources import files
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from kvcache.cache.cache import Cache
from kvcache.daemon.server.admission import RateLimit
from kvcache.daemon.server.report import Report
from kvcache.daemon.server.tcp import is_loopback
from kvcache.errors import ConfigError
from kvcache.log import logger
from kvcache.observe.exporter import exposition

# Authentication of HTTP requests. `/metrics`, `/healthz` and `/readyz` are open. Every other path needs a token, where
# the tenants file has any. Without tokens, clients of this host may read every path where the daemon listens on
# loopback only; otherwise those paths are closed.

OPERATOR = "*"
"""The owner of a token that sees every tenant."""
OPEN_PATHS = frozenset({"/metrics", "/healthz", "/readyz"})

TokenOwner = Callable[[str], "str | None"]
"""Returns the owner of a token: a tenant, `OPERATOR`, or None."""

_CHALLENGE = {"WWW-Authenticate": 'Basic realm="kvcache: any name, the token as password", charset="UTF-8"'}


class HttpAuth:
    """Authenticates requests.

    `owner` is None where the daemon has no tokens. `local`: the daemon listens on loopback only.
    """

    def __init__(self, owner: TokenOwner | None, *, local: bool) -> None:
        self._owner, self._local = owner, local

    def tenant(self, request: Request) -> str | None:
        """Return the tenant whose data the client may see, None for all; HTTPException where it may see none."""
        if self._local and not is_loopback(request.url.hostname or ""):
            # DNS rebinding: a foreign page whose host name resolves to this address could otherwise read the API.
            raise HTTPException(421, "the Host header names another host; use 127.0.0.1 or localhost")
        if self._owner is None:
            if self._local:
                return None
            raise HTTPException(
                403,
                f"no tenant has a token (daemon.tenants_file); only {', '.join(sorted(OPEN_PATHS))} are open",
            )
        token = token_from_header(request.headers.get("authorization", ""))
        owner = None if token is None else self._owner(token)
        if owner is None:
            raise HTTPException(401, "expected a token: `Authorization: Bearer TOKEN`, or as the password", _CHALLENGE)
        return None if owner == OPERATOR else owner


def token_from_header(header: str) -> str | None:
    """Return the token in an `Authorization` header: a bearer token, or the password of basic authentication."""
    scheme, _, value = header.partition(" ")
    value = value.strip()
    if scheme.lower() == "bearer":
        return value or None
    if scheme.lower() != "basic":
        return None
    try:
        return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2] or None
    except (binascii.Error, UnicodeDecodeError):
        return None


# Samples of the last hour, so that a page that opens now shows the past.

SAMPLE_INTERVAL_S = 5.0
MAX_SAMPLES = 720

_TOTALS = ("requests", "asked_tokens", "stored_bytes")
_BY_LABEL = ("hit_tokens", "loaded_bytes", "misses")


def sample(stats: Mapping[str, Any], time: float) -> dict[str, Any]:
    """Return the statistics that change by the second. Counters are totals; the reader takes differences."""
    counters = stats.get("counters", {})
    return {
        "time": time,
        **{name: counters.get(name, 0) for name in _TOTALS},
        **{name: dict(counters.get(name, {})) for name in _BY_LABEL},
        "used_bytes": {tier: usage["used_bytes"] for tier, usage in stats["tiers"].items()},
    }


class StatsHistory:
    """The last samples; the oldest is dropped. Thread-safe."""

    def __init__(self, samples: int = MAX_SAMPLES) -> None:
        self._samples: deque[dict[str, Any]] = deque(maxlen=samples)
        self._lock = threading.Lock()

    def add(self, stats: Mapping[str, Any], time: float) -> None:
        with self._lock:
            self._samples.append(sample(stats, time))

    def all(self) -> list[dict[str, Any]]:
        """Return the samples, oldest first."""
        with self._lock:
            return list(self._samples)


MAX_BODY_BYTES, BODY_TIMEOUT_S = 8 << 20, 10.0
SECURITY_HEADERS: Mapping[str, str] = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
PAGE_FILES: Mapping[str, str] = {
    "index.html": "text/html",
    "page.css": "text/css",
    "page.js": "text/javascript",
    "chart.js": "text/javascript",
    "table.js": "text/javascript",
    "words.js": "text/javascript",
    "icon.svg": "image/svg+xml",
}
"""Files of the page, and their media types."""
_TOKEN_FIELDS = ("ids", "before", "ours", "theirs")

ReportEndpoint = Callable[[Report, Request], Any]

_log = logger("kvcache.daemon.http")


class HttpApi:
    """The routes of the API.

    `rate_limit` returns a tenant's limits. `not_ready` returns the reasons why the daemon cannot serve engines now, and
    `unhealthy` those for which its process should be replaced.
    """

    def __init__(
        self,
        cache: Cache,
        *,
        version: str = "",
        owner: TokenOwner | None = None,
        rate_limit: Callable[[str], RateLimit | None] = lambda _: None,
        local: bool = True,
        not_ready: Callable[[], Iterable[str]] = tuple,
        unhealthy: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._cache, self._version, self._not_ready, self._unhealthy = cache, version, not_ready, unhealthy
        self._entry, self._rate_limit_of = HttpAuth(owner, local=local), rate_limit
        self.history = StatsHistory()

    def application(self) -> Starlette:
        endpoints: dict[str, ReportEndpoint] = {
            "stats": lambda report, _: report.stats(),
            "namespaces": lambda report, _: report.namespaces(),
            "tenants": lambda report, _: report.tenants(),
            "agents": lambda report, _: report.agents(),
            "prefixes": lambda report, request: report.prefixes(_count(request, 10)),
            "events": lambda report, request: report.events(_count(request, 100)),
            "curve": lambda report, _: report.curve(),
        }
        routes = [Route(f"/api/{name}", self._api(name, call), methods=["GET"]) for name, call in endpoints.items()]
        routes += [
            Route("/api/explain", self._explain, methods=["GET", "POST"]),
            Route("/api/history", self._history, methods=["GET"]),
            Route("/api/info", self._info, methods=["GET"]),
            Route("/metrics", self._metrics, methods=["GET"]),
            Route("/healthz", self._health, methods=["GET"]),
            Route("/readyz", self._ready, methods=["GET"]),
            Route("/", self._page, methods=["GET"]),
            Route("/{file}", self._page, methods=["GET"]),
        ]
        site = Starlette(
            routes=routes,
            exception_handlers={HTTPException: _http_error, ConfigError: _bad_request, Exception: _internal_error},
            lifespan=self._lifespan,
        )
        site.add_middleware(_SecurityHeaders)
        return site

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        await run_in_threadpool(self.record_sample)  # so that the first request finds a sample
        sampling = asyncio.ensure_future(self._sample())
        yield
        sampling.cancel()
        with suppress(asyncio.CancelledError):
            await sampling

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            await run_in_threadpool(self.record_sample)

    def record_sample(self) -> None:
        """Add a sample to the history."""
        self.history.add(self._cache.stats(), self._cache.os_env.clock.wall())

    # Open paths.

    def _metrics(self, _: Request) -> Response:
        return Response(exposition(self._cache.stats()), headers={"Content-Type": CONTENT_TYPE_LATEST})

    def _health(self, _: Request) -> Response:
        return _probe(self._unhealthy())

    def _ready(self, _: Request) -> Response:
        return _probe(self._not_ready())

    # Paths that need authentication.

    def _api(self, name: str, call: ReportEndpoint) -> Callable[[Request], Response]:
        def answer(request: Request) -> Response:
            return self._answer(name, call(Report(self._cache, self._entry.tenant(request)), request))

        return answer

    def _answer(self, name: str, content: Any) -> Response:
        return JSONResponse({"time": self._cache.os_env.clock.wall(), name: content})

    def _info(self, request: Request) -> Response:
        tenant = self._entry.tenant(request)
        since = self._cache.usage_log.since
        return self._answer("info", {"version": self._version, "since": since, "tenant": tenant})

    def _history(self, request: Request) -> Response:
        """Return the samples to an operator; they sum over all tenants, so that a tenant receives none."""
        return self._answer("history", self.history.all() if self._entry.tenant(request) is None else [])

    async def _explain(self, request: Request) -> Response:
        tenant = self._entry.tenant(request)
        rate_limit = None if tenant is None else self._rate_limit_of(tenant)
        if rate_limit is not None and not rate_limit.count_operation(moves=True):
            raise HTTPException(429, "the tenant exceeds its operations a second", {"Retry-After": "1"})
        report, (arguments, size) = Report(self._cache, tenant), await _parse_explain_arguments(request)
        if rate_limit is not None:
            rate_limit.count_bytes(size)
        stories = await run_in_threadpool(report.explain, arguments)
        return self._answer("stories", [_without_ids(story) for story in stories])

    def _page(self, request: Request) -> Response:
        self._entry.tenant(request)
        name = request.path_params.get("file", "index.html")
        if name not in PAGE_FILES:
            raise HTTPException(404, f"no {name[:80]!r} here")
        return Response((files(__package__) / "page" / name).read_bytes(), media_type=PAGE_FILES[name])


class _SecurityHeaders:
    """Adds `SECURITY_HEADERS` to every response."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._headers = [(name.lower().encode(), value.encode()) for name, value in SECURITY_HEADERS.items()]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def answered(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *self._headers]}
            await send(message)

        await self._app(scope, receive, answered)


def _count(request: Request, default: int) -> int:
    given = request.query_params.get("count", str(default))
    if not given.isdecimal() or len(given) > 9:
        raise ConfigError(f"count = {given!r:.40}: expected a number")
    return int(given)


async def _parse_explain_arguments(request: Request) -> tuple[dict[str, Any], int]:
    """Return the question and the number of posted bytes.

    The arguments are `request` or `count` in the URL, or a posted map with `ids` (a list) and optionally `namespace`.
    """
    if request.method == "GET":
        named = request.query_params.get("request")
        return ({"count": _count(request, 10)} if named is None else {"request": named}), 0
    try:
        body = await asyncio.wait_for(_body(request), BODY_TIMEOUT_S)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    try:
        document = json.loads(body)
        return {"ids": array("I", document["ids"]).tobytes(), "namespace": str(document.get("namespace", ""))}, len(
            body
        )
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise ConfigError(
            'expected {"ids": [...]}, token ids, and optionally "namespace", the first digits of its id'
        ) from None


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _without_ids(story: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in story.items() if name not in _TOKEN_FIELDS}


def _probe(reasons: Iterable[str]) -> Response:
    """The answer to a probe: 503 with the reasons, or `ok` without any."""
    given = [reason for reason in reasons if reason]
    return PlainTextResponse("\n".join(given or ["ok"]) + "\n", status_code=503 if given else 200)


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code, headers=error.headers)


async def _bad_request(_: Request, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status_code=400)


async def _internal_error(_: Request, error: Exception) -> Response:
    _log.error("HTTP request failed", exc_info=error)
    return JSONResponse({"error": "internal error of the daemon; see its log"}, status_code=500)

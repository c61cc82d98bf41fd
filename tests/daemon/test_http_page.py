"""The daemon's page in a real browser: figures that are the API's, keys, narrow screens, and a daemon that is gone."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from kvcache.cache.cache import Cache
from kvcache.daemon.http.app import HttpApi
from kvcache.daemon.http.server import bind_listener, start
from kvcache.daemon.server.report import Report
from kvcache.settings.service import HttpSettings
from kvcache.settings.sources import load as load_settings
from kvcache.settings.types import show_bytes
from tests.daemon.browser import CHROMIUM, MISSING, Browser
from tests.daemon.daemon_process import bound_to, load, store
from tests.daemon.test_http import OWNERS

pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason=MISSING)]

EVIL = "<img src=x onerror=alert(1)>"


class Served:
    """A site on a port of its own, which can end and begin again."""

    def __init__(self, cache: Cache, **more: Any) -> None:
        self.cache, self._more, self._end, self.port = cache, more, None, 0
        self.begin()

    def begin(self) -> None:
        settings = HttpSettings(enabled=True, port=self.port)
        listener: socket.socket = bind_listener(settings)
        self.port = listener.getsockname()[1]
        self.site = HttpApi(self.cache, version="1.2", **self._more)
        self._end = start(self.site.application(), listener, settings)

    def end(self) -> None:
        if self._end is not None:
            self._end()
            self._end = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@pytest.fixture(scope="module")
def cache() -> Iterator[Cache]:
    settings = load_settings(
        None,
        host={"capacity_bytes": "4MiB", "slab_bytes": "1MiB"},
        nvme__enabled=False,
        evict__tenants={"acme": {"host_quota_bytes": "2MiB"}},
    )
    with Cache(settings) as made:
        for tenant, first in (("acme", 0), ("zeta", 5000)):
            handle = bound_to(made, tenant=tenant, model=f"org/{tenant}")
            store(handle, list(range(first, first + 128)), first)
            for n in range(5):
                with handle.request(id=f"{tenant}-{n}", agent=f"{tenant} {EVIL}") as r:
                    r.match([*range(first, first + 128), *range(9000 + n, 9004 + n)])
                    r.admit()
            load(handle, list(range(first, first + 128)))
        yield made


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@pytest.fixture
def serve(cache: Cache) -> Iterator[Callable[..., Served]]:
    with ExitStack() as ends:

        def make(**more: Any) -> Served:
            served = Served(cache, **more)
            ends.callback(served.end)
            return served

        yield make


@pytest.fixture
def page(chromium: Browser, serve: Callable[..., Served]) -> Iterator[Browser]:
    """Open, and full of figures."""
    chromium.said.clear()
    chromium.size(1240, 900)
    served = serve()
    chromium.open(served.address)
    chromium.until("document.body.dataset.state === 'live'")
    chromium.served = served  # type: ignore[attr-defined]  # of a stand-in
    yield chromium
    chromium.open("about:blank")


def api(page: Browser, name: str) -> Any:
    with TestClient(page.served.site.application(), base_url="http://localhost") as client:  # type: ignore[attr-defined]  # of a stand-in
        return client.get(f"/api/{name}").json()[name]


def figures(page: Browser) -> dict[str, tuple[str, str]]:
    """By what of the API each shows: the text, and the value behind it."""
    script = (
        "[...document.querySelectorAll('[data-figure]')].map(e => [e.dataset.figure, e.textContent, e.dataset.value])"
    )
    return {name: (text, value) for name, text, value in page.run(script)}


def text(page: Browser, place: str) -> str:
    return str(page.run(f"document.querySelector({place!r}).innerText"))


def test_figures_on_the_page_equal_the_api(page: Browser) -> None:
    shown, stats = figures(page), api(page, "stats")
    tier, counters = stats["tiers"]["host"], stats["counters"]
    hits, asked = sum(counters["hit_tokens"].values()), counters["asked_tokens"]
    expected = {
        "tiers.host.used_bytes": (show_bytes(tier["used_bytes"]), tier["used_bytes"]),
        "tiers.host.capacity_bytes": (show_bytes(tier["capacity_bytes"]), tier["capacity_bytes"]),
        "tiers.host.records": (f"{tier['records']:,}", tier["records"]),
        "hit_rate": (f"{100 * hits / asked:.1f} %", hits / asked),
        "hit_rate.host": (f"{100 * hits / asked:.1f} %", hits / asked),
        "requests": (f"{counters['requests']:,}", counters["requests"]),
        "loaded_bytes": ("0 GB/s", sum(counters["loaded_bytes"].values())),
        "stored_bytes": ("0 GB/s", counters["stored_bytes"]),
    }
    for reason, times in counters["misses"].items():
        expected[f"misses.{reason}"] = (f"{times:,}", times)
    for row in api(page, "tenants"):
        expected[f"tenant.{row['tenant']}.host"] = (
            show_bytes(row["tiers"]["host"]["bytes"]),
            row["tiers"]["host"]["bytes"],
        )
    for row in api(page, "prefixes"):
        expected[f"prefix.{row['prefix']}.tokens"] = (f"{row['tokens']:,}", row["tokens"])
        expected[f"prefix.{row['prefix']}.requests"] = (f"{row['requests']:,}", row["requests"])
    for row in api(page, "agents"):
        expected[f"agent.{row['agent']}.requests"] = (f"{row['requests']:,}", row["requests"])
    assert len(expected) >= 14
    assert {name: (shown[name][0], float(shown[name][1])) for name in expected} == {
        name: (words, float(value)) for name, (words, value) in expected.items()
    }
    assert "2 MiB of host" in text(page, "#tenants")
    assert text(page, "#events").count("stored") == 2
    assert page.said == []


def test_the_curve_on_the_page_equals_the_api(page: Browser) -> None:
    page.until("document.querySelector('#curve svg') !== null")
    points = {point["times"]: point for point in api(page, "curve")["tiers"]["host"]["points"]}
    page.run("document.querySelector('#curve svg').focus()")
    for key, code, times in (("Home", 36, 0.25), ("End", 35, 4.0), ("ArrowLeft", 37, 2.0)):
        page.press(key, code)
        size, rate = points[times]["capacity_bytes"], points[times]["hit_rate"]
        assert text(page, "#curve .said") == f"{times:g}x: {100 * rate:.1f} % with {show_bytes(size)} of host"


def test_the_page_refreshes_itself(page: Browser, cache: Cache) -> None:
    before = int(figures(page)["requests"][1])
    handle = bound_to(cache, tenant="acme", model="org/acme")
    with handle.request(id="later") as r:
        r.match(list(range(128)))
        r.admit()
    page.until(f"document.querySelector('[data-figure=requests]').dataset.value === '{before + 1}'")
    page.until("document.querySelector('#rate svg') !== null")  # something was asked for while it looked
    page.run("document.getElementById('pause').click(); document.querySelector('#rate svg').focus()")
    said = [text(page, "#rate .said")]
    for _ in range(60):  # it may be that a new span has begun since, in which no requests yet
        page.press("ArrowLeft", 37)
        said.append(text(page, "#rate .said"))
    assert any("100.0 % in host" in each for each in said), said
    assert page.said == []


def test_client_chosen_names_are_escaped(page: Browser) -> None:
    assert EVIL in text(page, "#agents")
    assert page.run("document.images.length") == 0
    assert page.said == []


def test_tab_reaches_every_control_in_reading_order(page: Browser) -> None:
    reached = []
    for _ in range(12):
        page.press("Tab", 9)
        reached.append(
            page.run(
                "(e => e.id || e.className.baseVal || e.className || e.getAttribute('href') || e.closest('.chart')?.id)"
                "(document.activeElement)"
            )
        )
        visible = page.run(
            "(e => e === document.body || getComputedStyle(e).outlineStyle !== 'none')(document.activeElement)"
        )
        assert visible, reached
    assert reached[:3] == ["skip", "pause", "theme"]
    assert reached.index("kind") < reached.index("scroll") < reached.index("metrics") < reached.index("readyz")
    page.run("document.querySelector('.skip').focus()")
    page.press("Enter", 13, text="\r")
    assert page.run("document.activeElement.id") == "main"


def test_keyboard_shortcuts_work(page: Browser) -> None:
    for expected in ("light", "dark", None):
        page.press("t", 84, text="t")
        assert page.run("document.documentElement.dataset.theme ?? null") == expected
    page.press("p", 80, text="p")
    assert page.run("[document.getElementById('pause').ariaPressed, document.body.dataset.state]") == ["true", "paused"]
    page.press("p", 80, text="p")
    page.until("document.body.dataset.state === 'live'")


def test_arrow_keys_read_the_chart(page: Browser, cache: Cache) -> None:
    for _ in range(3):
        page.served.site.record_sample()  # type: ignore[attr-defined]  # of a stand-in
        load(bound_to(cache, tenant="acme", model="org/acme"), list(range(128)))
    page.until("document.querySelector('#rate svg') !== null")
    page.run("document.getElementById('pause').click(); document.querySelector('#rate svg').focus()")
    page.press("Home", 36)
    at = page.run("document.querySelector('#rate .cursor').getAttribute('x1')")
    said = text(page, "#rate .said")
    page.press("ArrowLeft", 37)
    assert page.run("document.querySelector('#rate .cursor').getAttribute('x1')") == at
    assert text(page, "#rate .said") == said
    assert page.run("document.querySelector('#rate .said').ariaLive") == "polite"
    assert page.run("document.activeElement === document.querySelector('#rate svg')")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [360, 760, 1140, 1240])
def test_no_width_needs_horizontal_scrolling(page: Browser, width: int, dark: bool) -> None:
    page.size(width, 800, dark=dark)
    page.settle()
    assert beyond(page) == []
    ground = page.run("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(18, 21, 27)") is dark


def test_large_figures_and_long_names_fit_a_narrow_screen(
    chromium: Browser, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = ("host", "nvme", "redis", "object")
    name = "meta-llama/Llama-3.1-405B-Instruct-with-a-name-longer-than-any-screen-is-wide"
    monkeypatch.setattr(
        Report,
        "stats",
        lambda self: {
            "tiers": {
                t: {
                    "records": 123_456_789,
                    "used_bytes": 1_098_000_000_000,
                    "capacity_bytes": 1_099_000_000_000,
                    "held_bytes": 1 << 33,
                    "pinned_bytes": 1 << 33,
                    "troubles": [name],
                }
                for t in tiers
            },
            "counters": {
                "requests": 123_456_789,
                "asked_tokens": 10**13,
                "hit_tokens": dict.fromkeys(tiers, 2 * 10**12),
                "loaded_bytes": dict.fromkeys(tiers, 10**15),
                "stored_bytes": 10**15,
                "misses": {"store_dropped": 123_456_789},
                "missed_tokens": {"store_dropped": 10**12},
            },
            "bypass": {},
        },
    )
    held = {t: {"records": 10**8, "bytes": 1_098_000_000_000} for t in tiers}
    use = {
        "tenant": name,
        "requests": 10**8,
        "asked_tokens": 10**13,
        "hit_tokens": dict.fromkeys(tiers, 10**12),
        "tiers": held,
        "last": 1.0,
        "since": 1.0,
    }
    monkeypatch.setattr(Report, "tenants", lambda self: [{**use, "quotas": dict.fromkeys(tiers, 1 << 42)}])
    monkeypatch.setattr(Report, "agents", lambda self: [{**use, "agent": name}])
    monkeypatch.setattr(Report, "namespaces", lambda self: [{**use, "id": "f" * 64, "model": name, "adapter": name}])
    served = serve()
    chromium.size(360, 800)
    chromium.open(served.address)
    chromium.until("document.body.dataset.state === 'live'")
    for width in (360, 780, 1180):
        chromium.size(width, 800)
        chromium.settle()
        assert beyond(chromium) == [], width
    chromium.open("about:blank")


def beyond(page: Browser) -> list[str]:
    """What stands to the right of the screen, or of the inside of its card."""
    root = "document.documentElement"
    found: list[str] = page.run(
        "room = e => { const card = e.parentElement.closest('section');"
        f" return card ? card.getBoundingClientRect().right - 8 : {root}.clientWidth + 0.5 }};"
        "[...document.querySelectorAll('body *')].filter(e => e.getClientRects().length && !e.closest('svg')"
        f" && e.getBoundingClientRect().right > room(e)).map(e => e.outerHTML.slice(0, 80))"
    )
    return found + (["the page"] if page.run(f"{root}.scrollWidth > {root}.clientWidth") else [])


def test_colours_have_enough_contrast(page: Browser) -> None:
    """Text against what it stands on: 4.5 to 1 at least, as WCAG wants."""
    script = """[...document.querySelectorAll('main *, header *')].filter(e => e.children.length === 0
        && e.textContent.trim() && e.getClientRects().length && !e.closest('svg')).map(e => {
      let ground = e;
      while (ground && getComputedStyle(ground).backgroundColor === 'rgba(0, 0, 0, 0)') ground = ground.parentElement;
      return [getComputedStyle(e).color, getComputedStyle(ground ?? document.body).backgroundColor, e.textContent];
    })"""
    for dark in (False, True):
        page.size(1240, 900, dark=dark)
        pairs = page.run(script)
        assert len(pairs) > 50
        low = [pair for pair in pairs if contrast(pair[0], pair[1]) < 4.5]
        assert low == []


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_the_page_shows_a_lost_daemon_and_its_return(page: Browser) -> None:
    served: Served = page.served  # type: ignore[attr-defined]  # of a stand-in
    served.end()
    page.until("document.body.dataset.state === 'lost'")
    assert "no answer since" in text(page, "#state")
    served.begin()
    page.until("document.body.dataset.state === 'live'")
    assert all("Failed to" in line or "ERR_" in line for line in page.said), page.said


def test_a_bypass_is_shown_prominently(page: Browser, cache: Cache) -> None:
    cache.bypass.set("loads")
    try:
        page.until("!document.getElementById('bypass').hidden")
        assert "kvcache bypass off" in text(page, "#bypass")
    finally:
        cache.bypass.set("off")
    page.until("document.getElementById('bypass').hidden")


def test_a_tenant_sees_its_own_page(chromium: Browser, serve: Callable[..., Served]) -> None:
    chromium.said.clear()
    served = serve(owner=OWNERS.get)
    try:
        chromium.open(served.address, token="acme-token")
        chromium.until("document.body.dataset.state === 'live'")
        said = chromium.run("document.body.innerText")
        assert "tenant acme" in said
        assert "zeta" not in said
        assert chromium.said == []
    finally:
        chromium.open("about:blank")
        chromium._call("Network.setExtraHTTPHeaders", headers={})


def test_the_page_loads_nothing_from_other_hosts(page: Browser) -> None:
    asked = {address for address in page.answers if not address.startswith(("about:", "data:"))}
    served: Served = page.served  # type: ignore[attr-defined]  # of a stand-in
    assert {a for a in asked if a.startswith(served.address)}
    assert all(address.startswith("http://127.0.0.1:") for address in asked)

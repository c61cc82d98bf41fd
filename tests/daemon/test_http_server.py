"""`kvcache daemon --http`, as an operator meets it: a process, its port, its end."""

from __future__ import annotations

import http.client
import re
import signal
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest

from kvcache.daemon.http.app import HttpApi
from kvcache.daemon.http.server import bind_listener, start
from kvcache.daemon.server.auth import new_token, token_hash
from kvcache.observe.metrics import METRICS
from kvcache.settings.service import HttpSettings
from tests.daemon.daemon_process import DaemonProcess, bound_to, load, store
from tests.daemon.in_process_daemon import InProcessDaemon
from tests.peer.certificates import OPENSSL, authority, certificate

MakeDaemon = Callable[..., DaemonProcess]


class Web(DaemonProcess):
    """With a page, on a port that the system gives."""

    words: tuple[str, ...] = ()

    def __init__(self, directory: Path, **variables: object) -> None:
        super().__init__(directory, **{"HTTP__ENABLED": "true", "HTTP__PORT": 0, **variables})

    def command(self, *words: str) -> list[str]:
        return super().command(*self.words, *words)

    @property
    def port(self) -> int:
        found = re.search(r"https?://[^/]+:(\d+)/", self.serving)
        assert found, self.output
        return int(found[1])

    @property
    def serving(self) -> str:
        return next(line for line in self.output if "serving" in line)

    def get(self, path: str, token: str = "", context: ssl.SSLContext | None = None) -> tuple[int, str]:
        if context is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        else:
            connection = http.client.HTTPSConnection("localhost", self.port, timeout=60, context=context)
        try:
            connection.request("GET", path, headers={"Authorization": f"Bearer {token}"} if token else {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()


@pytest.fixture
def make_web(make_daemon: MakeDaemon, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Web]:
    """As `make_daemon`, which ends them."""
    monkeypatch.setattr("tests.daemon.conftest.DaemonProcess", Web)
    return make_daemon  # type: ignore[return-value]


def test_the_http_server_shows_engine_activity(make_web: Callable[..., Web]) -> None:
    web = make_web().start()
    with web.open() as cache:
        handle = bound_to(cache)
        store(handle, list(range(64)), 1)
        assert len(load(handle, list(range(64)))) == 16
        with handle.request(agent="planner") as r:
            r.match(list(range(64)))
            r.admit()
    status, text = web.get("/metrics")
    assert (status, "kvcache_stored_blocks_total 16.0" in text) == (200, True)
    assert all(f"# TYPE kvcache_{name}" in text for name in METRICS)
    assert web.get("/healthz") == (200, "ok\n")
    assert web.get("/readyz") == (200, "ok\n")
    assert '"agent":"planner"' in web.get("/api/agents")[1]
    code, said = web.terminate()
    assert (code, "ending" in said) == (0, True)


def test_no_http_port_is_open_by_default(daemon: DaemonProcess) -> None:
    assert "http" not in daemon.output[0]


def test_an_occupied_port_is_reported_in_one_line(make_web: Callable[..., Web]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = make_web(HTTP__PORT=port).run()
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert f"http.port = {port}" in done.stderr
        # one that an engine waits for goes without
        web = make_web(HTTP__PORT=port)
        web.words = ("--linger-s", "60")
        web.start()
        assert "http" not in web.serving
        with web.open() as cache:
            assert cache.check() == []


def test_check_config_shows_the_pages_url(make_web: Callable[..., Web]) -> None:
    done = make_web(HTTP__PORT=9475).run("--check-config")
    assert (done.returncode, "http://127.0.0.1:9475/" in done.stdout) == (0, True), done


@pytest.mark.parametrize("key", ["HTTP__TLS_CERT_FILE", "HTTP__TLS_KEY_FILE"])
def test_an_invalid_certificate_is_reported_in_one_line(make_web: Callable[..., Web], tmp_path: Path, key: str) -> None:
    file = tmp_path / "file.pem"
    file.write_text("no certificate")
    done = make_web(**{key: file}).run()
    assert (done.returncode, done.stderr.count("\n"), "http.tls_" in done.stderr) == (2, 1, True)


@pytest.mark.skipif(OPENSSL is None, reason="no openssl command to make certificates with")
def test_the_page_is_served_over_tls(make_web: Callable[..., Web], tmp_path: Path) -> None:
    by = authority(tmp_path / "ca")
    cert, key = certificate(by, "localhost", host="DNS:localhost")
    web = make_web(HTTP__TLS_CERT_FILE=cert, HTTP__TLS_KEY_FILE=key).start()
    assert "https://" in web.serving
    context = ssl.create_default_context(cafile=str(by))
    assert web.get("/healthz", context=context) == (200, "ok\n")
    with pytest.raises(ssl.SSLCertVerificationError):
        web.get("/healthz", context=ssl.create_default_context())


def test_tenant_tokens_are_accepted_and_never_logged(make_web: Callable[..., Web], tmp_path: Path) -> None:
    mine, operators = new_token(), new_token()
    file = tmp_path / "tenants.toml"
    file.write_text(f'[acme]\ntokens = ["{token_hash(mine)}"]\n["*"]\ntokens = ["{token_hash(operators)}"]\n')
    web = make_web(DAEMON__TENANTS_FILE=file, LOG__FORMAT="text", LOG__LEVEL="debug").start()
    assert web.get("/api/info")[0] == 401
    assert web.get("/api/info", new_token())[0] == 401
    assert '"tenant":"acme"' in web.get("/api/info", mine)[1]
    assert '"tenant":null' in web.get("/api/info", operators)[1]
    assert web.get("/metrics")[0] == 200
    _, said = web.terminate()
    assert mine not in said
    assert operators not in said


def test_an_open_client_does_not_delay_shutdown(make_web: Callable[..., Web]) -> None:
    web = make_web().start()
    with (
        socket.create_connection(("127.0.0.1", web.port)) as idle,
        socket.create_connection(("127.0.0.1", web.port)) as half,
    ):
        half.sendall(b"GET /api/stats HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ")
        assert web.get("/healthz")[0] == 200
        assert web.process is not None
        web.process.send_signal(signal.SIGTERM)
        assert web.process.wait(60) == 0
        assert idle.recv(1) == b""


def test_bytes_that_are_not_http_do_no_harm(make_web: Callable[..., Web]) -> None:
    web = make_web().start()
    for nonsense in (b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 4096, b"GET " + b"/" * 100_000):
        with socket.create_connection(("127.0.0.1", web.port), timeout=60) as connection:
            connection.sendall(nonsense)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass
    assert web.get("/healthz") == (200, "ok\n")


def test_connections_beyond_the_limit_are_closed(in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.daemon.http.server.HEADER_TIMEOUT_S", 600.0)
    monkeypatch.setattr("kvcache.daemon.http.server.MAX_HTTP_CONNECTIONS", 3)
    settings = HttpSettings(enabled=True, port=0)
    listener = bind_listener(settings)
    port = listener.getsockname()[1]
    end = start(HttpApi(in_process.cache).application(), listener, settings)
    try:
        with ExitStack() as stack:
            first, *_ = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(3)]
            for _ in range(8):
                with socket.create_connection(("127.0.0.1", port), timeout=60) as more, suppress(ConnectionResetError):
                    assert more.recv(1) == b""
            first.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert first.recv(1 << 16).startswith(b"HTTP/1.1 200")
    finally:
        end()


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", b""),
        (b"GET /api/stats HTTP/1.1\r\nHost: 127", b""),
        (b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\nGET /hea", b"HTTP/1.1 200"),
        (b"POST /api/explain HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{", b"HTTP/1.1 408"),
    ],
    ids=["nothing", "half a head", "half a second head", "half a body"],
)
def test_slow_clients_are_disconnected(
    in_process: InProcessDaemon, monkeypatch: pytest.MonkeyPatch, sent: bytes, answered: bytes
) -> None:
    # who is answered first has the time to ask
    monkeypatch.setattr("kvcache.daemon.http.server.HEADER_TIMEOUT_S", 5.0 if answered else 0.2)
    monkeypatch.setattr("kvcache.daemon.http.app.BODY_TIMEOUT_S", 0.2)
    settings = HttpSettings(enabled=True, port=0)
    listener = bind_listener(settings)
    port = listener.getsockname()[1]
    end = start(HttpApi(in_process.cache).application(), listener, settings)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
            connection.sendall(sent)
            said = b""
            while piece := connection.recv(1 << 16):
                said += piece
        assert said.startswith(answered)
        assert bool(said) is bool(answered)
    finally:
        end()

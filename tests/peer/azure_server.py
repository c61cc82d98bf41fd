"""Microsoft's object store as Azurite plays it, on loopback. `npm install azurite` brings it; nothing else does."""

from __future__ import annotations

import atexit
import base64
import hashlib
import hmac
import http.client
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from email.utils import formatdate
from functools import lru_cache
from pathlib import Path

from tests.peer.ports import free_port
from tests.peer.s3_server import BUCKET

_SCRIPT = os.environ.get("AZURITE") or shutil.which("azurite") or ""
_NODE = shutil.which("node") or ""
MISSING = "" if _SCRIPT and _NODE else "no Azurite: npm install azurite, and AZURITE=.../node_modules/.bin/azurite"

ACCOUNT = "tests"


def key(seed: bytes) -> str:
    return base64.b64encode(hashlib.sha512(seed).digest()).decode()


def credentials(place: Path, seed: bytes) -> str:
    """A file that names an account's key."""
    (place / "credentials").write_text(f"account_key = {key(seed)}\n")
    return str(place / "credentials")


SEED = b"a key of the tests"
KEY = key(SEED)


class AzureServer:
    """With an empty container."""

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvcache-az-")
        place = Path(self._directory.name)
        self.port = free_port()
        self.settings = {
            "url": f"az://{ACCOUNT}/{BUCKET}",
            "endpoint": f"http://127.0.0.1:{self.port}/{ACCOUNT}",
            "credentials_file": credentials(place, SEED),
        }
        command = [_NODE, _SCRIPT, "--silent", "--disableTelemetry", "--skipApiVersionCheck", "--location", str(place)]
        for service, port in (("blob", self.port), ("queue", free_port()), ("table", free_port())):
            command += [f"--{service}Host", "127.0.0.1", f"--{service}Port", str(port)]
        with (place / "log").open("wb") as log:
            environment = {**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=place, env=environment)
        while not self._made():
            if (status := self._process.poll()) is not None:
                last = (place / "log").read_text(errors="replace")[-2000:]
                self.end()
                raise RuntimeError(f"Azurite ended with status {status}:\n{last}")

    def _made(self) -> bool:
        with suppress(OSError, http.client.HTTPException):
            status = self._make()
            if status in {201, 409}:
                return True
            self._process.kill()
            raise RuntimeError(f"Azurite made no container: {status}")
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.05)  # it starts
        return False

    def _make(self) -> int:
        """Make the container, signed by the account's key: the store's own interface has no simpler way."""
        path = f"/{ACCOUNT}/{BUCKET}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed = [f"{name}:{value}" for name, value in sorted(headers.items())]
        words = "\n".join(["PUT", *[""] * 11, *signed, f"/{ACCOUNT}{path}", "restype:container"])
        mac = hmac.new(base64.b64decode(KEY), words.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("PUT", f"{path}?restype=container", headers={**headers, "Content-Length": "0"})
            return connection.getresponse().status
        finally:
            connection.close()

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._directory.cleanup()


@lru_cache
def shared() -> AzureServer:
    """One for the whole run; tests stand apart by their prefix."""
    made = AzureServer()
    atexit.register(made.end)
    return made

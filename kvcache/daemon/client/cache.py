"""`RemoteCache`: the `KVCache` API of `kvcache.cache.api` for a cache in a daemon.

A fault of the daemon never fails a request. While the daemon does not answer, a match finds no block, a load is a miss
and a store is dropped, all at once; a thread reconnects. The end of the daemon shows as the end of the connection. No
heartbeat is needed, and a client that is silent for a day stays connected.
"""

from __future__ import annotations

import inspect
import os
import threading
import time
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcache.block.layout import KVLayout
from kvcache.cache.api import FlushReport, NamespaceFields, NamespaceHandle, NamespaceSpec, TierFlush
from kvcache.daemon.client.connection import Connection, Endpoint, TokenSource, UnixEndpoint
from kvcache.daemon.client.request import RemoteNamespace
from kvcache.daemon.client.transfer import StagingPool
from kvcache.daemon.discovery import parse_unix_address
from kvcache.daemon.protocol import MAX_FLUSH_S, ProtocolError, parse_reply, read_report
from kvcache.daemon.server.tcp import TcpEndpoint
from kvcache.daemon.shm import SlabMappings
from kvcache.errors import ClosedError, ConfigError, KVCacheError, UnreachableError
from kvcache.index.kv_events import EventBatch, KVEvent
from kvcache.log import logger
from kvcache.os_env import OsEnv
from kvcache.transfer.copier import CopierRegistry

if TYPE_CHECKING:
    from typing_extensions import Unpack

CONTROL_TIMEOUT_S = 1.0
"""For a reply on the control connection, which an engine's scheduler waits for."""
ANNOUNCE_TIMEOUT_S = 0.005
"""Each wait of an engine's thread to announce a store."""
CLOSE_TIMEOUT_S = 30.0
"""For the flush when an engine ends."""
MIN_RECONNECT_PAUSE_S, MAX_RECONNECT_PAUSE_S = 0.01, 1.0
"""Least and most time between attempts to reconnect."""

DEFAULT_TENANT = "default"
"""Stands for the tenant as which the daemon authenticated this client."""

_log = logger("kvcache.daemon")


class RemoteCache:
    """A cache in a daemon, made by `kvcache.open("unix:...")`."""

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        engine: str = "",
        deadline_s: float = 2.0,
        patience_s: float = CONTROL_TIMEOUT_S,
        threads: int = 2,
        os_env: OsEnv | None = None,
    ) -> None:
        """Connect.

        Args:
            endpoint: The daemon.
            engine: The engine that this process is a part of. Its ranks join each other's requests by id, and no other
                engine's.
            deadline_s: Default deadline of a request.
            patience_s: Longest wait for a daemon that hangs.
            threads: Threads that transfer blocks, each with a connection.
            os_env: Clock and threads.

        Raises:
            UnreachableError: No daemon listens.
            AccessError: The daemon refuses this client.
        """
        if "/" in engine or len(engine) > 256:
            raise ConfigError(f"engine = {engine!r:.60}: expected a name of at most 256 characters without '/'")
        self.endpoint, self.engine, self.deadline_s, self.patience_s = endpoint, engine, deadline_s, patience_s
        self.os_env = os_env or OsEnv()
        self.executor = self.os_env.executor(threads, "copy")
        self._background = self.os_env.executor(1, "map")
        self.copiers = CopierRegistry(self._background.submit)
        self.staging_pool = StagingPool(self.copiers)
        self.prefix = uuid.uuid4().hex[:8]  # of generated request ids
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._flushed = FlushReport(fault="the cache is being closed")  # what `flush` returns once `close` has run
        self._pid = os.getpid()
        self._retrying = False
        self._transfers_running = 0
        self._transfers_changed = threading.Condition()
        self._announced = self._flushed_stores = 0  # stores announced, and those that a complete flush covered
        self._ttl, self._doubt = "", ""  # the daemon's `life`, and why stored blocks may be lost
        self._facts: dict[str, Any] = {}  # that the daemon adds to a namespace's own facts
        self._tenant = ""  # as the daemon authenticated this client
        self.isolates_tenants = False
        """Whether the daemon isolates tenants, and so binds signatures to the namespace."""
        self.connection: Connection | None = self._connect()
        self._ttl = self.connection.life
        self.numbers = iter(range(1, 1 << 62))
        _OPEN.add(self)

    # The KVCache API.

    def namespace(
        self,
        spec: KVLayout | NamespaceSpec,
        **fields: Unpack[NamespaceFields],
    ) -> RemoteNamespace:
        self.check_open()
        spec = NamespaceSpec.of(spec, fields)
        if self._tenant and spec.tenant == DEFAULT_TENANT:
            spec = replace(spec, tenant=self._tenant)
        handle = RemoteNamespace(self, spec, spec.namespace(self._facts))
        try:
            with self.connected() as connection:
                handle.number(connection)
        except UnreachableError as error:  # the next use binds it, once the daemon answers
            _log.debug("namespace is not bound yet: %s", error)
        return handle

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        if self._closed.is_set():
            return self._flushed
        end = None if timeout_s is None else time.monotonic() + timeout_s
        with self._transfers_changed:
            if not self._transfers_changed.wait_for(lambda: self._transfers_running == 0, timeout_s):
                return FlushReport(fault=f"{self._transfers_running} transfers of this process have not ended")
        report, announced = FlushReport(), self._announced
        try:
            while True:
                began = time.monotonic()
                remaining_s = MAX_FLUSH_S if end is None else max(0.0, min(MAX_FLUSH_S, end - began))
                answered = read_report(self.long_call("flush", remaining_s, {"timeout_s": remaining_s}))
                report = _after(report, answered)
                waits = answered.fault or any(tier.waiting or not tier.synced for tier in answered.tiers.values())
                if not waits or remaining_s < MAX_FLUSH_S or time.monotonic() - began < MAX_FLUSH_S:
                    break
        except KVCacheError as error:
            return replace(report, fault=str(error))
        with self._lock:
            doubt, self._doubt = self._doubt, ""
            if report and not doubt:
                self._flushed_stores = announced
        return replace(report, fault=doubt) if report and doubt else report

    def stats(self) -> dict[str, Any]:
        """Return the daemon's statistics; `unreachable` has the reason where it does not answer."""
        try:
            with self.connected() as connection:
                return connection.call("stats")
        except KVCacheError as error:
            return {"tiers": {}, "unreachable": str(error)}

    def kv_events(self, after: int | None, handles: Sequence[NamespaceHandle]) -> EventBatch:
        """Return KV events; none where the daemon does not answer. The next reply then reports what was lost."""
        try:
            with self.connected() as connection:
                numbers = [handle.number(connection) for handle in handles if isinstance(handle, RemoteNamespace)]
            reply = self.long_call("changes", self.patience_s, {"after": after, "namespaces": numbers})
        except KVCacheError as error:
            _log.debug("no changes: %s", error)
            return EventBatch(-1 if after is None else after, lost=False, kv_events=())
        kv_events = [
            KVEvent(kind, tier, namespace, group, tuple(shard), parent, signatures)
            for kind, tier, namespace, group, shard, parent, signatures in reply["changes"]
        ]
        return EventBatch(reply["next"], reply["lost"], kv_events)

    def check(self) -> list[str]:
        """Return the faults of the daemon's audit of the whole cache."""
        if self._closed.is_set():
            return []
        try:
            return [str(fault) for fault in self.long_call("check", None, {})["faults"]]
        except KVCacheError as error:
            return [f"the daemon does not answer: {error}"]

    def close(self) -> FlushReport:
        """Flush and disconnect; the daemon and its blocks remain."""
        if self._closed.is_set():
            return self._flushed
        self.executor.close()
        self._flushed = self.flush(CLOSE_TIMEOUT_S)
        self._closed.set()
        self._background.close()
        self.copiers.close()
        with self._lock:
            connection, self.connection = self.connection, None
        if connection is not None:
            connection.close()
        return self._flushed

    def __enter__(self) -> RemoteCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # The connection.

    def wait_reachable(self, timeout_s: float | None = None) -> bool:
        """Wait until the daemon answers, for programs that prefer waiting to computing; return whether it does."""
        with suppress(UnreachableError), self.connected():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self.connection is not None, timeout_s)

    def check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("this cache was closed; open another one")

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """Yield the control connection for a few messages, under the lock.

        Where the daemon does not answer, UnreachableError follows at once, until a thread has reconnected.
        """
        with self._lock:
            connection = self.connection
            if (
                connection is not None and connection.wire.hung_up
            ):  # perhaps restarted since the last call: then reconnect at once
                self.mark_lost(connection, UnreachableError("the connection ended"))
                with suppress(KVCacheError):
                    self._set_connection(self._connect())
                connection = self.connection
            if connection is None:
                self._start_reconnecting()
                raise UnreachableError(f"{self.endpoint}: the daemon does not answer")
            try:
                yield connection
            except (UnreachableError, ProtocolError) as error:
                self.mark_lost(connection, error)
                raise

    def announce_store(self, store: int) -> bool:
        """Announce a store to the daemon; return whether that succeeded.

        An engine's thread calls this. It therefore sends only where the connection is up and accepts the message at
        once.
        """
        self._announced += self.connection is not None
        if not self._lock.acquire(timeout=ANNOUNCE_TIMEOUT_S):
            return False
        try:
            connection = self.connection
            if (
                connection is None
                or not connection.accepts_store_notices
                or connection.wire.hung_up
                or not connection.wire.writable(ANNOUNCE_TIMEOUT_S)
            ):
                return False
            try:
                connection.post("storing", store=store)
            except (UnreachableError, ProtocolError) as error:
                self.mark_lost(connection, error)
                return False
            return True
        finally:
            self._lock.release()

    def mark_lost(self, connection: Connection, error: KVCacheError) -> None:
        """Drop the connection and reconnect in the background."""
        with self._lock:
            if self.connection is not connection or self._closed.is_set():
                return
            _log.warning(
                "lost the daemon: address=%s cause=%s; until it answers, each match is empty and stores are dropped",
                self.endpoint,
                error,
            )
            self.connection = None
            connection.close()
            self._start_reconnecting()

    def _start_reconnecting(self) -> None:
        """Start the thread that reconnects. Where the system gives no thread, the next call tries again."""
        if self._retrying or self._closed.is_set():
            return
        self._retrying = True
        try:
            threading.Thread(target=self._reconnect, name="kvcache-reconnect", daemon=True).start()
        except RuntimeError:
            self._retrying = False

    def transfer_started(self) -> None:
        """Count a running transfer; `flush` waits until `transfer_ended`."""
        with self._transfers_changed:
            self._transfers_running += 1

    def transfer_ended(self) -> None:
        with self._transfers_changed:
            self._transfers_running -= 1
            self._transfers_changed.notify_all()

    def _connect(self) -> Connection:
        connection = Connection(
            self.endpoint, self.engine, self.patience_s, SlabMappings(self.copiers, self._background.submit)
        )
        self._facts, self._tenant, self.isolates_tenants = (
            connection.facts,
            connection.tenant,
            connection.isolates_tenants,
        )
        return connection

    def _reconnect(self) -> None:
        pause = MIN_RECONNECT_PAUSE_S
        while not self._closed.wait(pause):
            try:
                connection = self._connect()
            except Exception as error:  # noqa: BLE001  worker thread that must survive: the next attempt may succeed
                _log.debug("reconnect failed: %r", error)
                pause = min(2 * pause, MAX_RECONNECT_PAUSE_S)
                continue
            with self._lock:
                self._retrying = False
                if self.connection is None and not self._closed.is_set():
                    self._set_connection(connection)
                    return
            connection.close()
            return

    def _set_connection(self, connection: Connection) -> None:
        self.connection = connection
        if self._announced > self._flushed_stores and not (connection.life and connection.life == self._ttl):
            self._doubt = "the daemon ended after the last flush; blocks that it had not written are lost"
        self._ttl = connection.life
        self._changed.notify_all()
        _log.warning("reconnected to the daemon: address=%s", self.endpoint)

    def long_call(self, op: str, timeout_s: float | None, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Call the daemon on a transfer connection, for replies that may take long."""
        connection = self.connection
        if connection is None:
            raise UnreachableError(f"{self.endpoint}: the daemon does not answer")
        end = None if timeout_s is None else time.monotonic() + timeout_s + self.patience_s
        with connection.transfer_wire(self.patience_s) as wire:
            wire.send({"op": op, **fields}, timeout_s=self.patience_s)
            return parse_reply(wire.receive(None if end is None else max(0.0, end - time.monotonic()))[0])

    def close_in_child(self) -> None:
        """In a forked child: close the sockets, because connections and leases belong to the parent."""
        self._closed.set()
        self._lock = threading.RLock()
        connection, self.connection = self.connection, None
        if connection is not None:
            for wire in (connection.wire, *connection.idle):
                with suppress(OSError):
                    wire.connection.close()


def _after(before: FlushReport, report: FlushReport) -> FlushReport:
    """Add the counts of an earlier reply of the same flush, which later replies do not repeat."""
    tiers = dict(report.tiers)
    for name, tier in before.tiers.items():
        now = tiers.get(name, TierFlush())
        reached, lost = tier.reached + now.reached, tier.lost + now.lost
        tiers[name] = replace(now, reached=reached, lost=lost, refused=now.refused + tier.lost)
    return replace(report, tiers=tiers)


_OPEN: weakref.WeakSet[RemoteCache] = weakref.WeakSet()


def _close_all_in_child() -> None:
    for cache in list(_OPEN):
        cache.close_in_child()


os.register_at_fork(after_in_child=_close_all_in_child)


# From the arguments of `kvcache.open` to a `RemoteCache`.

TLS_OPTIONS = ("ca_file", "cert_file", "key_file", "server_name")
"""Of a TLS endpoint: the CA, the client's certificate and key, and the name in the daemon's certificate."""


def connect(where: str, *, token_file: str = "", **settings: Any) -> RemoteCache:
    """Connect to a daemon. The token is read from `token_file`, else from the variable KVCACHE_TOKEN."""
    secure = where.startswith("tls:")
    files = {name: settings.pop(name) for name in TLS_OPTIONS if secure and name in settings}
    known = [name for name in inspect.signature(RemoteCache).parameters if name not in ("endpoint", "os_env")]
    unknown = sorted(settings.keys() - known)
    if unknown:
        known += ["token_file", *(TLS_OPTIONS if secure else ())]
        raise ConfigError(
            f"{unknown[0]} = {settings[unknown[0]]!r:.60}: {where} has its own settings; a client takes "
            f"{', '.join(known)}"
        )
    return RemoteCache(parse_endpoint(where, TokenSource(token_file), **files), **settings)


def parse_endpoint(where: str, token: TokenSource | None = None, **files: str) -> Endpoint:
    """Return the endpoint of `unix:PATH`, `tls://HOST:PORT` or, on loopback, `tcp://HOST:PORT`."""
    token = token or TokenSource()
    if where.startswith("unix:"):
        return UnixEndpoint(str(parse_unix_address(where)), token)
    return TcpEndpoint(where.partition(":")[2].removeprefix("//"), token, secure=where.startswith("tls:"), **files)

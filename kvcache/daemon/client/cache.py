"""A cache behind a daemon's socket: the face of `kvcache.cache.api`, in an engine's process.

Nothing that goes wrong with the daemon is the engine's to bear: while it does not answer, a match finds nothing, a
load is a miss and a store is dropped, at once, and a thread tries to reach it again. Its end is seen by the end of the
connection, so there is no heartbeat to miss, and nobody who is silent for a day is forgotten."""

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
from typing import Any

from kvcache.block.layout import KVLayout, Shard
from kvcache.block.namespace import Namespace
from kvcache.cache.api import FlushReport, NamespaceHandle, TierFlush, check_shards, check_ttl
from kvcache.daemon.client.connection import Connection, Endpoint, TokenSource, UnixEndpoint
from kvcache.daemon.client.request import RemoteBound
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

CONTROL_TIMEOUT_S = 1.0
"""For an answer on the connection of control, which an engine's scheduler waits for."""
ANNOUNCE_TIMEOUT_S = 0.005
"""For what an engine's thread says before it goes on."""
CLOSE_TIMEOUT_S = 30.0
"""For what was stored to be where it is meant for, when an engine ends."""
MIN_RECONNECT_PAUSE_S, MAX_RECONNECT_PAUSE_S = 0.01, 1.0
"""Between attempts to reach a daemon that is gone."""

DEFAULT_TENANT = "default"
"""Stands for whoever we came in as."""

_log = logger("kvcache.daemon")


class RemoteCache:
    """Made by `kvcache.open("unix:...")`."""

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
        """`engine` names the engine that this process is a part of: its ranks join each other's requests by their ids,
        and no other engine's. UnreachableError where no daemon listens,
        AccessError where it does not let us in."""
        if "/" in engine or len(engine) > 256:
            raise ConfigError(f"engine = {engine!r:.60}: expected a name of at most 256 characters without '/'")
        self.endpoint, self.engine, self.deadline_s, self.patience_s = endpoint, engine, deadline_s, patience_s
        self.os_env = os_env or OsEnv()
        self.executor = self.os_env.executor(threads, "copy")
        self._background = self.os_env.executor(1, "map")
        self.copiers = CopierRegistry(self._background.submit)
        self.staging_pool = StagingPool(self.copiers)
        self.prefix = uuid.uuid4().hex[:8]  # of the ids of requests that are given none
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._closed = threading.Event()
        self._flushed = FlushReport(fault="the cache is being closed")  # by `close`
        self._pid = os.getpid()
        self._retrying = False
        self._transfers_running = 0
        self._transfers_changed = threading.Condition()
        self._announced = self._flushed_stores = 0  # stores that were begun, and those that a true flush covered
        self._ttl, self._doubt = "", ""  # of the daemon's memory, and why blocks in it may be lost
        self._facts: dict[str, Any] = {}  # that the daemon adds to a namespace's own
        self._tenant = ""  # as which we came in
        self.isolates_tenants = False
        """Whether the daemon binds what we call blocks to the namespace, since it keeps tenants apart."""
        self.connection: Connection | None = self._connect()
        self._ttl = self.connection.life
        self.numbers = iter(range(1, 1 << 62))
        _OPEN.add(self)

    # the face

    def namespace(
        self,
        layout: KVLayout,
        *,
        model: str,
        revision: str,
        adapter: str | None = None,
        tenant: str = "default",
        cache_salt: str = "",
        facts: Mapping[str, Any] | None = None,
        shards: Sequence[Shard] | None = None,
        ranks: Sequence[Sequence[Shard]] | None = None,
        ttl_s: float | None = None,
    ) -> RemoteBound:
        self.check_open()
        held, _ = check_shards(layout, shards, ranks)
        namespace = Namespace(
            layout,
            model=model,
            revision=revision,
            adapter=adapter,
            tenant=self._tenant if self._tenant and tenant == DEFAULT_TENANT else tenant,
            cache_salt=cache_salt,
            facts={**(facts or {}), **self._facts},
        )
        bound = RemoteBound(self, namespace, held, ranks, check_ttl(ttl_s))
        try:
            with self.connected() as connection:
                bound.number(connection)
        except UnreachableError as error:  # it is bound when the daemon is back
            _log.debug("not bound yet: %s", error)
        return bound

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
        """The daemon's; where it does not answer, `unreachable` says why."""
        try:
            with self.connected() as connection:
                return connection.call("stats")
        except KVCacheError as error:
            return {"tiers": {}, "unreachable": str(error)}

    def kv_events(self, after: int | None, bounds: Sequence[NamespaceHandle]) -> EventBatch:
        """Where the daemon does not answer, nothing: the next answer says what was lost."""
        try:
            with self.connected() as connection:
                numbers = [bound.number(connection) for bound in bounds if isinstance(bound, RemoteBound)]
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
        """The daemon's audit of all of it."""
        if self._closed.is_set():
            return []
        try:
            return [str(fault) for fault in self.long_call("check", None, {})["faults"]]
        except KVCacheError as error:
            return [f"the daemon cannot be asked: {error}"]

    def close(self) -> FlushReport:
        """Flush, and end this process's part; the daemon and what is in it stay."""
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

    # the daemon

    def wait_reachable(self, timeout_s: float | None = None) -> bool:
        """Until the daemon answers; for programs that would rather wait than compute."""
        with suppress(UnreachableError), self.connected():
            return True
        with self._changed:
            return self._changed.wait_for(lambda: self.connection is not None, timeout_s)

    def check_open(self) -> None:
        if self._closed.is_set():
            raise ClosedError("this cache was closed; open another one")

    @contextmanager
    def connected(self) -> Iterator[Connection]:
        """The session, for the time of a few questions. Where the daemon does not answer, UnreachableError, at once
        until it was reached again."""
        with self._lock:
            connection = self.connection
            if (
                connection is not None and connection.wire.hung_up
            ):  # restarted since it was last asked, perhaps: then nobody notices
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
        """Whether the daemon was told that a store of this number begins: only where the session is there and takes it
        at once, since an engine's thread waits for nobody and reaches for nobody."""
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
        """It is of no more use; try to reach the daemon again, in the background."""
        with self._lock:
            if self.connection is not connection or self._closed.is_set():
                return
            _log.warning(
                "%s: the daemon is lost (%s); until it is back nothing is found and nothing kept", self.endpoint, error
            )
            self.connection = None
            connection.close()
            self._start_reconnecting()

    def _start_reconnecting(self) -> None:
        """In the background, until it is reached. Where the system gives no thread, whoever asks next tries anew."""
        if self._retrying or self._closed.is_set():
            return
        self._retrying = True
        try:
            threading.Thread(target=self._reconnect, name="kvcache-reconnect", daemon=True).start()
        except RuntimeError:
            self._retrying = False

    def transfer_started(self) -> None:
        """A transfer begins; `flush` waits until it has `moved`."""
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
            except Exception as error:  # noqa: BLE001  whatever it is, it may be over the next time
                _log.debug("not reached: %r", error)
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
            self._doubt = "the daemon ended after the last flush, and what it had not written then is lost"
        self._ttl = connection.life
        self._changed.notify_all()
        _log.warning("%s: reached again", self.endpoint)

    def long_call(self, op: str, timeout_s: float | None, fields: Mapping[str, Any]) -> dict[str, Any]:
        """A question that may take long, on a connection of its own."""
        connection = self.connection
        if connection is None:
            raise UnreachableError(f"{self.endpoint}: the daemon does not answer")
        end = None if timeout_s is None else time.monotonic() + timeout_s + self.patience_s
        with connection.transfer_wire(self.patience_s) as wire:
            wire.send({"op": op, **fields}, timeout_s=self.patience_s)
            return parse_reply(wire.receive(None if end is None else max(0.0, end - time.monotonic()))[0])

    def close_in_child(self) -> None:
        """In a forked child: the connections are the parent's, and so is what it was lent."""
        self._closed.set()
        self._lock = threading.RLock()
        connection, self.connection = self.connection, None
        if connection is not None:
            for wire in (connection.wire, *connection.idle):
                with suppress(OSError):
                    wire.connection.close()


def _after(before: FlushReport, report: FlushReport) -> FlushReport:
    """A report, with what an earlier one of the same flush told already and no later one tells again."""
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


# From what `kvcache.open` is given to a cache behind a socket.

TLS_OPTIONS = ("ca_file", "cert_file", "key_file", "server_name")
"""Of a route with TLS: whom to trust, what to show, and the name in the daemon's certificate where it is another."""


def connect(where: str, *, token_file: str = "", **settings: Any) -> RemoteCache:
    """`token_file` holds the token to show; without one, that of the variable KVCACHE_TOKEN is shown."""
    secure = where.startswith("tls:")
    files = {name: settings.pop(name) for name in TLS_OPTIONS if secure and name in settings}
    known = [name for name in inspect.signature(RemoteCache).parameters if name not in ("endpoint", "os_env")]
    unknown = sorted(settings.keys() - known)
    if unknown:
        known += ["token_file", *(TLS_OPTIONS if secure else ())]
        raise ConfigError(
            f"{unknown[0]} = {settings[unknown[0]]!r:.60}: {where} has settings of its own; here are {', '.join(known)}"
        )
    return RemoteCache(parse_endpoint(where, TokenSource(token_file), **files), **settings)


def parse_endpoint(where: str, token: TokenSource | None = None, **files: str) -> Endpoint:
    """To the daemon at `unix:PATH`, `tls://HOST:PORT` or, on loopback, `tcp://HOST:PORT`."""
    token = token or TokenSource()
    if where.startswith("unix:"):
        return UnixEndpoint(str(parse_unix_address(where)), token)
    return TcpEndpoint(where.partition(":")[2].removeprefix("//"), token, secure=where.startswith("tls:"), **files)

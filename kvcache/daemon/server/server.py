"""The daemon server: accepts a cache's clients, answers their messages, and ends their references.

One process owns a cache; the engines of its host share it over a Unix socket, and those of other hosts over TLS. The
cache outlives an engine: an engine that crashes and restarts finds its prefixes in host memory.

Alternatives:
  - A cache in each engine. Engines would not share prefixes, and a crash would lose the host tier.
  - An index in shared memory that every client changes. A client that crashes or misbehaves could damage it for all.
  - All bytes through the daemon's socket. A copying client loads 3.3 GB/s, a mapping client 25 GB/s
    (`benchmarks/socket_transfer.py`).

The daemon therefore keeps the index, the policy and the tiers to itself. On one host it leases slots (`slot_lease`): a
client maps the slabs of its tenant and copies between a slot and its pages. It replies when it has copied. Payload
bytes never pass through this file. A client of another host, or of a tenant with `share = "copy"`, sends and receives
payloads on its transfer connections.

A client has two kinds of connection, named by `role` in its hello:
  - `control` opens a `ClientSession`. The loop answers its messages in order (a match of a long prompt takes a fraction
    of a millisecond).
  - `mover` carries loads, stores and flushes of that session. It is a `TransferConnection` with a thread, because it
    waits for the client to copy.
A third role, `heir`, comes from a new daemon: this one hands over its host memory and ends (`handover`).

Invariants:
  - A session ends with its control connection, its process, or a reload that no longer admits it. Its requests close
    then, and their references end.
  - No timer ends a session. `PidfdWatcher` reports the end of a process even while another process holds its
    descriptors.
  - A slot that was leased for storing is not reused before its client has hung up, because the client may still write.
  - One client's fault does not affect another: an unexpected exception becomes an error reply, and a malformed message
    closes its connection only.
  - Memory per client is bounded: bytes read but not answered, replies not yet sent, namespaces, open requests and
    signatures.
  - A connection that has not authenticated does not count in `daemon.connections`; it waits in `PendingConnections`.
  - Each tenant has a guaranteed share of the connections and namespaces (`FairShare`).
  - The socket is unlinked before the drain begins, so that no client finds a daemon that is ending.

Threads: the thread that calls `run` drives the event loop. It alone changes the tables of connections and sessions, so
they need no lock. Each transfer connection has a thread, which uses its session, the cache and the thread-safe
`RateLimit`. A transfer thread reports its end through `call_soon_threadsafe`. `stop` and `reload` are safe from any
thread. No blocking call may run on the loop: one slow reply would delay every client.

To change it: a new message needs its fields in `protocol`, an answer in `ClientSession` (loop) or `slot_lease`
(thread), and a row in docs/spec/protocol.md. A second loop thread would need locks around sessions, shares and the
namespace registry.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

from kvcache.cache.cache import Cache
from kvcache.daemon.discovery import SocketClaim
from kvcache.daemon.protocol import MAX_FRAME_BYTES, PROTOCOL_VERSION, ProtocolError, error_reply, parse_request
from kvcache.daemon.server.admission import Admission, FairShare, TenantQuotas
from kvcache.daemon.server.auth import token_hash
from kvcache.daemon.server.client_session import ClientSession, PendingStores
from kvcache.daemon.server.connection import Connection, PendingConnections
from kvcache.daemon.server.handover import is_same_user
from kvcache.daemon.server.namespace_registry import NamespaceRegistry
from kvcache.daemon.server.slot_lease import TransferConnection, serve_transfers
from kvcache.daemon.server.systemd import PidfdWatcher
from kvcache.daemon.server.tcp import TcpConnection, TcpListener
from kvcache.errors import AccessError, ClosedError, ConfigError, KVCacheError, UnreachableError
from kvcache.log import logger

# The event loop of the daemon's one loop thread.


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a uvloop event loop where uvloop is installed, else asyncio's."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


FIRST_CLIENT_TIMEOUT_S = 60.0
"""Time that a daemon which ends by itself waits for its first client."""
HEALTH_TIMEOUT_S = 5.0
"""Time for the event loop to run a call, beyond which the daemon is unhealthy."""
_ACCEPT_RETRY_S = 0.1

_log = logger("kvcache.daemon")


class Daemon:
    """Serves a cache made with `shared=True`.

    The caller owns the cache and the claim. It closes the cache after `run`, and then releases the claim.
    """

    def __init__(
        self,
        cache: Cache,
        claim: SocketClaim,
        *,
        version: str = "",
        linger_s: float | None = None,
        on_started: Callable[[], object] = lambda: None,
        admission: Admission | None = None,
        port: TcpListener | None = None,
        on_reload: Callable[[], object] = lambda: None,
    ) -> None:
        """Prepare to serve `cache`; `run` serves it.

        Args:
            linger_s: The daemon ends by itself after this time without a client session; None for never.
            on_started: Called once the daemon listens.
            admission: Maps credentials to tenants; made from the settings where it is None.
            port: Listener for other hosts; the daemon closes it.
            on_reload: Called at SIGHUP after the tenants and certificates, to reload other settings. It may raise
                ConfigError.
        """
        self.on_started = on_started
        self.cache, self.claim, self._version, self._linger_s = cache, claim, version, linger_s
        self._settings = cache.settings.daemon
        self._limits = TenantQuotas(cache)
        self.admission = admission or Admission(self._settings.tenants_file, cache.os_env.clock)
        cache.control_handlers["rates"] = lambda _: {"rates": self.admission.rates}
        self.boot_id = secrets.token_bytes(8)
        """Random; differs after every start."""
        self._tcp_listener, self._on_reload = port, on_reload
        self._loop = new_loop()
        self._pending_connections = PendingConnections(self._loop)
        self._connection_shares = FairShare(self._settings.connections, lambda: self.admission.count)
        self._namespace_registry = NamespaceRegistry(cache, lambda: self.admission.count)
        self._peers: set[Connection] = set()
        self._sessions: dict[bytes, ClientSession] = {}
        self._of_peer: dict[Connection, ClientSession] = {}
        self._pending_stores = PendingStores(self._loop, self._of_peer, cache.os_env.clock)
        self._pidfd_watcher = PidfdWatcher(self._loop, self._process_ended)
        self._transfer_connections: dict[TransferConnection, threading.Thread] = {}
        self._serving = self._ending = False
        self.successor: socket.socket | None = None
        """Socket to the daemon that takes over, or None. The caller closes it."""
        self._ended = asyncio.Event()
        self._lingering: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; then drain transfers and close every connection."""
        try:
            self._limits.set(self.admission.tenants)
            self.cache.counted()  # starts counting, so that a report has figures
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._loop.add_signal_handler(number, self._end)
                self._loop.add_signal_handler(signal.SIGHUP, self._reload)
            self.claim.listen()
            if self._tcp_listener is not None:
                self._tcp_listener.listen()
            for listener in self._listeners():
                self._loop.add_reader(listener, self._accept, listener)
            self._serving = True
            self.on_started()
            if self._linger_s is not None:  # the process that started this daemon may connect late
                self._linger_for(max(self._linger_s, FIRST_CLIENT_TIMEOUT_S))
            with closing(self._pending_stores):  # closed before transfers drain, and also after an error
                self.cache.on_flush.append(self._pending_stores.wait)
                self._loop.run_until_complete(self._ended.wait())
            self._drain()
        finally:
            self.claim.close()
            if self._tcp_listener is not None:
                self._tcp_listener.close()
            self._loop.close()

    def close(self) -> None:
        """Release a daemon that never ran; `run` does this itself. Idempotent."""
        self._loop.close()

    def stop(self) -> None:
        """End `run`. Thread safety: any thread."""
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._end)

    def not_ready_reason(self) -> str:
        """Return why no engine should be sent here now, as `/readyz` reports it; "" where the daemon is ready."""
        if self._ending or not self._serving:
            return "ending" if self._ending else "starting"
        return "" if self.cache.ready() else "prefixes of warm.* are still being loaded here"

    def health_issue(self, timeout_s: float = HEALTH_TIMEOUT_S) -> str:
        """Return why this process should be replaced, as `/healthz` reports it; "" where its event loop runs.

        A daemon that starts or ends has no loop to ask, and counts as healthy. Thread safety: any thread but the
        loop's.
        """
        turned = threading.Event()
        with suppress(RuntimeError):  # the loop is closed already
            if self._serving and not self._ending:
                self._loop.call_soon_threadsafe(turned.set)
                if not turned.wait(timeout_s) and not self._ending:
                    return f"the daemon's event loop did not run for {timeout_s:g} s"
        return ""

    def reload(self) -> None:
        """Reload as at SIGHUP. Thread safety: any thread."""
        self._loop.call_soon_threadsafe(self._reload)

    @property
    def sessions(self) -> list[ClientSession]:
        return list(self._sessions.values())

    def _reload(self) -> None:
        """Reload the tenants and their limits, the certificates, then the rest.

        An invalid file is logged, and what was read from it before stays in force.
        """
        certificates = [] if self._tcp_listener is None else [self._tcp_listener.reload]
        for read in (self._reload_tenants, *certificates, self._on_reload):
            try:
                read()
            except ConfigError as error:
                _log.error("settings were not reloaded: cause=%s", error)
        _log.info("reloaded settings; a warning names each one that needs a restart")

    def _reload_tenants(self) -> None:
        tenants = self.admission.load_tenants()
        self._limits.set(tenants)
        self.admission.set_tenants(tenants)
        for session in self.sessions:
            if not session.still_authorized(self.admission):
                self._process_ended(session)

    # Connections.

    def _listeners(self) -> list[socket.socket]:
        return (
            [self.claim.listener] if self._tcp_listener is None else [self.claim.listener, self._tcp_listener.listener]
        )

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors left: clients in the backlog are accepted later
            _log.warning("cannot accept clients: cause=%s; retrying", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_ACCEPT_RETRY_S, self._accept_again, listener)
            return
        try:
            if self._tcp_listener is not None and listener is self._tcp_listener.listener:
                peer: Connection = TcpConnection(
                    self._loop, connection, self._tcp_listener.context, self._handle_message, self._handle_disconnect
                )
            else:
                peer = Connection(self._loop, connection, self._handle_message, self._handle_disconnect)
        except OSError:  # the client has hung up
            connection.close()
            return
        self._peers.add(peer)
        if listener is self.claim.listener and not self.claim.admits(peer.uid):
            _log.warning("refused client: peer=%s; the cache belongs to user %d", peer, os.geteuid())
            peer.send(error_reply(UnreachableError(f"this cache serves only user {os.geteuid()}; see daemon.mode")))
            peer.close()
            return
        self._extend_linger()
        self._pending_connections.add(peer)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._ending:
            self._loop.add_reader(listener, self._accept, listener)

    def _handle_disconnect(self, peer: Connection) -> None:
        self._peers.discard(peer)
        self._pending_connections.remove(peer)
        session = self._of_peer.pop(peer, None)
        if session is not None:
            self._connection_shares.release(session.tenant.name)
            self._end_session(session)
            if session.credentials.remote:  # a remote client without a control connection keeps no thread
                self._close_transfer_connections(session)

    # Messages.

    def _handle_message(self, peer: Connection, message: dict[str, Any]) -> None:
        session = self._of_peer.get(peer)
        try:
            op, table = parse_request(message, "control")
            if (op == "hello") != (session is None):
                raise ProtocolError(f"{op!r}: expected hello first, and only once")
        except ProtocolError as error:
            peer.send(error_reply(error))
            peer.close()
            return
        try:
            answer = {"ok": self._open_session(peer, message) if session is None else session.answer(op, message)}
        except (AccessError, ProtocolError) as error:
            self._refuse(peer, error)
            if session is None or isinstance(error, ProtocolError):
                peer.close()
            return
        except KVCacheError as error:
            answer = error_reply(error)
        except Exception as error:  # noqa: BLE001  boundary to foreign code: the error is the reply to one client
            _log.exception("%s failed", op)
            answer = error_reply(KVCacheError(f"{op} failed: {error!r:.200}"))
        if table.has_reply and peer.open:
            peer.send(answer)
            if session is None and "ok" not in answer:
                peer.close()

    def _refuse(self, peer: Connection, error: KVCacheError) -> None:
        if isinstance(error, AccessError):
            _log.warning("refused client: peer=%s cause=%s", peer, error)
        peer.send(error_reply(error))

    def _open_session(self, peer: Connection, message: dict[str, Any]) -> dict[str, Any]:
        if message["version"] != PROTOCOL_VERSION:
            raise UnreachableError(
                f"the daemon has protocol version {PROTOCOL_VERSION}, the client {message['version']}: "
                "install the same kvcache in both"
            )
        if message["role"] == "mover":
            return self._open_transfer_connection(peer, message)
        if message["role"] == "heir":
            return self._exit_for_successor(peer)
        if message["role"] != "control":
            raise ProtocolError(f"role {message['role']!r:.40}: expected control, mover or heir")
        engine = message.get("engine") or ""
        if "/" in engine or len(engine) > 256:
            raise ProtocolError("engine: expected a name of at most 256 characters without '/'")
        credentials = peer.credentials(token_hash(message["token"]) if message.get("token") else "")
        session = ClientSession(
            self.cache, engine, peer.pid, credentials, self.admission, self._namespace_registry, self._pending_stores
        )
        self._reserve_connection(session)
        self._pending_connections.remove(peer)
        self._sessions[session.secret] = self._of_peer[peer] = session
        peer.max_bytes = MAX_FRAME_BYTES
        self._pidfd_watcher.watch(session)
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        return {
            "version": PROTOCOL_VERSION,
            "server": self._version,
            "pid": os.getpid(),
            "boot": self.boot_id,
            "session": session.secret,
            "facts": self.cache.facts,
            "share": "copy" if session.streams_payloads else "map",
            "apart": self.admission.isolates_tenants,
            "stores": True,
            "life": self.cache.life,
            "tenant": "" if session.tenant.operator else session.tenant.name,
        }

    def _reserve_connection(self, session: ClientSession) -> None:
        """Count another connection of the session's tenant.

        Raises:
            UnreachableError: The tenant has no connection left.
        """
        name = session.tenant.name
        if not self._connection_shares.acquire(name):
            said = f"{self._connection_shares.used(name)} connections of tenant {name!r}, of "
            said += f"{self._connection_shares.capacity} for all"
            _log.warning("refused connection: %s (daemon.connections)", said)
            raise UnreachableError(f"{said} (daemon.connections): the limit is reached; close some or raise it")

    def _open_transfer_connection(self, peer: Connection, message: dict[str, Any]) -> dict[str, Any]:
        session = self._sessions.get(message.get("session") or b"")
        if session is None or session.pid != peer.pid:
            raise UnreachableError("found no session of this process with this secret; connect again")
        self._reserve_connection(session)
        peer.send({"ok": {}})
        if not peer.open:
            self._connection_shares.release(session.tenant.name)
            raise UnreachableError("it hung up")
        self._peers.discard(peer)
        self._pending_connections.remove(peer)
        moving = TransferConnection(peer.detach(), session)
        thread = threading.Thread(target=self._serve_transfers, args=(moving,), name="kvcache-mover", daemon=True)
        self._transfer_connections[moving] = thread
        try:
            thread.start()
        except RuntimeError:  # this process can start no more threads
            self._transfer_connection_closed(moving)
            moving.connection.close()
        return {}

    def _exit_for_successor(self, peer: Connection) -> dict[str, Any]:
        """End because another process takes over; `handover` sends it the host memory."""
        if isinstance(peer, TcpConnection) or not is_same_user(peer.pid, peer.uid):
            raise AccessError(f"only a process of the same user and container may replace a daemon: {peer} is not one")
        if self._ending:
            raise ClosedError("this daemon is already ending")
        peer.send({"ok": {"pid": os.getpid()}})
        if peer.open:
            self._peers.discard(peer)
            self.successor = peer.detach()
        _log.warning("ending for a successor: peer=%s", peer)
        self._end()
        return {}

    def _serve_transfers(self, moving: TransferConnection) -> None:
        try:
            serve_transfers(moving, self.cache, self._settings.lease_s)
        finally:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._transfer_connection_closed, moving)

    def _transfer_connection_closed(self, moving: TransferConnection) -> None:
        if self._transfer_connections.pop(moving, None) is not None:
            self._connection_shares.release(moving.session.tenant.name)

    # The end of sessions and of the daemon.

    def _end_session(self, session: ClientSession) -> None:
        if session.secret in self._sessions:
            session.end()
            del self._sessions[session.secret]  # only after `end`, so that a session missing here holds nothing
            self._pidfd_watcher.unwatch(session)
            self._linger()

    def _process_ended(self, session: ClientSession) -> None:
        self._end_session(session)
        self._close_transfer_connections(session)
        for peer in [p for p, of in self._of_peer.items() if of is session]:
            peer.close()

    def _close_transfer_connections(self, session: ClientSession) -> None:
        for moving in [m for m in self._transfer_connections if m.session is session]:
            moving.hang_up()

    def _linger(self) -> None:
        if self._linger_s is not None and not self._sessions and not self._ending and self._lingering is None:
            self._linger_for(self._linger_s)

    def _linger_for(self, seconds: float) -> None:
        self._lingers_until = self._loop.time() + seconds
        self._lingering = self._loop.call_later(seconds, self._linger_expired)

    def _extend_linger(self) -> None:
        """Restart the linger time: a client that only probes the socket gets as long to return as the last one had."""
        if self._lingering is not None and self._lingers_until < self._loop.time() + (self._linger_s or 0.0):
            self._lingering.cancel()
            self._linger_for(self._linger_s or 0.0)

    def _linger_expired(self) -> None:
        ended = self._lingering
        for listener in self._listeners():  # a client in the backlog has a connection already
            self._accept(listener)
        if self._lingering is ended:
            self._end()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            for listener in self._listeners():
                self._loop.remove_reader(listener)
            self.claim.unlink_socket()
            self._ended.set()

    def _drain(self) -> None:
        """Wait for running transfers, at most `daemon.drain_s`; then close every connection."""
        end = time.monotonic() + self._settings.drain_s
        for moving, thread in self._transfer_connections.items():
            moving.ending = True
            if not moving.busy:
                moving.hang_up()
            thread.join(max(0.0, end - time.monotonic()))
            moving.hang_up()
        for peer in list(self._peers):
            peer.close()
        for session in self.sessions:
            self._end_session(session)

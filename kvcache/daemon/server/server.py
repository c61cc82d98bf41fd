"""The daemon: one process owns a cache, others on this host share it over a Unix socket.

One thread runs the loop: it accepts, and answers what takes no time (a match of a long prompt is a fraction of a
millisecond). Each connection that moves records has a thread, which waits for the client to copy; the bytes themselves
never come here. When a client goes, however it goes, everything that it held is back at once."""

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
from kvcache.daemon.discovery import Claim
from kvcache.daemon.protocol import FRAME_BYTES, VERSION, ProtocolError, asked, refusal
from kvcache.daemon.server.admission import Allotment, Door, Limits
from kvcache.daemon.server.auth import token_hash
from kvcache.daemon.server.client_session import Coming, Session
from kvcache.daemon.server.connection import Hall, Peer
from kvcache.daemon.server.handover import akin
from kvcache.daemon.server.namespace_registry import Bindings
from kvcache.daemon.server.slot_lease import Moving, serve
from kvcache.daemon.server.systemd import Watch
from kvcache.daemon.server.tcp import Guest, Port
from kvcache.errors import AccessError, ClosedError, ConfigError, KVCacheError, UnreachableError
from kvcache.log import logger

# The event loop of a daemon's one thread.


def new_loop() -> asyncio.AbstractEventLoop:
    """Of uvloop where that is installed."""
    try:
        import uvloop
    except ModuleNotFoundError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


FIRST_S = 60.0
"""For the first of those for whom a daemon runs that ends by itself."""
_PAUSE_S = 0.1

_log = logger("kvcache.daemon")


class Daemon:
    """Serves a cache made with `shared=True`, which stays the caller's to close, and then to release the claim."""

    def __init__(
        self,
        cache: Cache,
        claim: Claim,
        *,
        version: str = "",
        linger_s: float | None = None,
        began: Callable[[], object] = lambda: None,
        door: Door | None = None,
        port: Port | None = None,
        again: Callable[[], object] = lambda: None,
    ) -> None:
        """`linger_s`: end by itself once nobody has been connected for so long; never, where not given. `began` is
        called when it listens. `door`: who comes in; by the settings, where not given. `port`: for those of
        other hosts; closed with it. `again` is called at SIGHUP, for what is read anew beside the tenants; it may raise
        ConfigError."""
        self.began = began
        self.cache, self.claim, self._version, self._linger_s = cache, claim, version, linger_s
        self._settings = cache.settings.daemon
        self._limits = Limits(cache)
        self.door = door or Door(self._settings.tenants_file, cache.flow.port.clock)
        cache.binds = self.door.apart
        cache.answers["rates"] = lambda _: {"rates": self.door.rates}
        self.boot = secrets.token_bytes(8)
        """Another one after every start."""
        self._port, self._again = port, again
        self._loop = new_loop()
        self._hall = Hall(self._loop)
        self._places = Allotment(self._settings.connections, lambda: self.door.count)
        self._bindings = Bindings(cache, lambda: self.door.count)
        self._peers: set[Peer] = set()
        self._sessions: dict[bytes, Session] = {}
        self._of_peer: dict[Peer, Session] = {}
        self._coming = Coming(self._loop, self._of_peer, cache.flow.port.clock)
        self._watch = Watch(self._loop, self._process_ended)
        self._moving: dict[Moving, threading.Thread] = {}
        self._serving = self._ending = False
        self.heir: socket.socket | None = None
        """To the process that takes this one's place, where it ended for one; the caller's to close."""
        self._ended = asyncio.Event()
        self._lingering: asyncio.TimerHandle | None = None

    def run(self) -> None:
        """Serve until `stop`, SIGTERM or SIGINT; then let transfers end and hang up."""
        try:
            self._limits.set(self.door.tenants)
            self.cache.counted()  # begins to count, so that whoever asks for it has something to be told
            if threading.current_thread() is threading.main_thread():
                for number in (signal.SIGTERM, signal.SIGINT):
                    self._loop.add_signal_handler(number, self._end)
                self._loop.add_signal_handler(signal.SIGHUP, self._read_again)
            self.claim.listen()
            if self._port is not None:
                self._port.listen()
            for listener in self._listeners():
                self._loop.add_reader(listener, self._accept, listener)
            self._serving = True
            self.began()
            if self._linger_s is not None:  # whoever started this may take a while to come
                self._linger_for(max(self._linger_s, FIRST_S))
            with closing(self._coming):  # before its clients are waited for, and however it ends
                self.cache.at_flush.append(self._coming.wait)
                self._loop.run_until_complete(self._ended.wait())
            self._drain()
        finally:
            self.claim.close()
            if self._port is not None:
                self._port.close()
            self._loop.close()

    def close(self) -> None:
        """What was made and never ran; no more is to be done for one that ran. Idempotent."""
        self._loop.close()

    def stop(self) -> None:
        """From any thread."""
        with suppress(RuntimeError):  # over already
            self._loop.call_soon_threadsafe(self._end)

    def why_not(self) -> str:
        """Why no engine should be sent here now; nothing where one may: what `/readyz` says."""
        if self._ending or not self._serving:
            return "ending" if self._ending else "starting"
        return "" if self.cache.ready() else "prefixes of warm.* are still on their way here"

    def read_again(self) -> None:
        """As at SIGHUP, from any thread."""
        self._loop.call_soon_threadsafe(self._read_again)

    @property
    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    def _read_again(self) -> None:
        """The tenants and their limits, certificates, and then the rest. What makes no sense is said, and stays."""
        certificates = [] if self._port is None else [self._port.read_again]
        for read in (self._read_tenants, *certificates, self._again):
            try:
                read()
            except ConfigError as error:
                _log.error("not read again: %s", error)
        _log.info("settings were read again, as far as nothing else is said")

    def _read_tenants(self) -> None:
        tenants = self.door.look()
        self._limits.set(tenants)
        self.door.use(tenants)
        for session in self.sessions:
            if not session.known_still(self.door):
                self._process_ended(session)

    # connections

    def _listeners(self) -> list[socket.socket]:
        return [self.claim.listener] if self._port is None else [self.claim.listener, self._port.listener]

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # no descriptors left: those who wait in the queue are accepted when there are
            _log.warning("nobody can be accepted for now: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_PAUSE_S, self._accept_again, listener)
            return
        try:
            if self._port is not None and listener is self._port.listener:
                peer: Peer = Guest(self._loop, connection, self._port.context, self._said, self._left)
            else:
                peer = Peer(self._loop, connection, self._said, self._left)
        except OSError:  # it hung up already
            connection.close()
            return
        self._peers.add(peer)
        if listener is self.claim.listener and not self.claim.admits(peer.uid):
            _log.warning("%s was refused: this is user %d's cache", peer, os.geteuid())
            peer.send(refusal(UnreachableError(f"this cache is user {os.geteuid()}'s alone: see daemon.mode")))
            peer.close()
            return
        self._stay()
        self._hall.enter(peer)

    def _accept_again(self, listener: socket.socket) -> None:
        if not self._ending:
            self._loop.add_reader(listener, self._accept, listener)

    def _left(self, peer: Peer) -> None:
        self._peers.discard(peer)
        self._hall.leave(peer)
        session = self._of_peer.pop(peer, None)
        if session is not None:
            self._places.give_back(session.tenant.name)
            self._end_session(session)
            if session.shown.remote:  # whoever keeps only those open has no claim to a thread
                self._hang_up_movers(session)

    # messages

    def _said(self, peer: Peer, message: dict[str, Any]) -> None:
        session = self._of_peer.get(peer)
        try:
            op, table = asked(message, "control")
            if (op == "hello") != (session is None):
                raise ProtocolError(f"{op!r}: expected hello first, and only once")
        except ProtocolError as error:
            peer.send(refusal(error))
            peer.close()
            return
        try:
            answer = {"ok": self._hello(peer, message) if session is None else session.answer(op, message)}
        except (AccessError, ProtocolError) as error:
            self._refuse(peer, error)
            if session is None or isinstance(error, ProtocolError):
                peer.close()
            return
        except KVCacheError as error:
            answer = refusal(error)
        except Exception as error:  # noqa: BLE001  one client's fault is nobody else's
            _log.exception("%s failed", op)
            answer = refusal(KVCacheError(f"{op} failed: {error!r:.200}"))
        if table.answered and peer.open:
            peer.send(answer)
            if session is None and "ok" not in answer:
                peer.close()

    def _refuse(self, peer: Peer, error: KVCacheError) -> None:
        if isinstance(error, AccessError):
            _log.warning("%s was refused: %s", peer, error)
        peer.send(refusal(error))

    def _hello(self, peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
        if message["version"] != VERSION:
            raise UnreachableError(
                f"this daemon speaks version {VERSION} of the protocol, the client {message['version']}: "
                "install the same kvcache in both"
            )
        if message["role"] == "mover":
            return self._begin_moving(peer, message)
        if message["role"] == "heir":
            return self._end_for(peer)
        if message["role"] != "control":
            raise ProtocolError(f"role {message['role']!r:.40}: expected control, mover or heir")
        engine = message.get("engine") or ""
        if "/" in engine or len(engine) > 256:
            raise ProtocolError("engine: expected a name of at most 256 characters without '/'")
        shown = peer.shown(token_hash(message["token"]) if message.get("token") else "")
        session = Session(self.cache, engine, peer.pid, shown, self.door, self._bindings, self._coming)
        self._place(session)
        self._hall.leave(peer)
        self._sessions[session.secret] = self._of_peer[peer] = session
        peer.most_bytes = FRAME_BYTES
        self._watch.begin(session)
        if self._lingering is not None:
            self._lingering.cancel()
            self._lingering = None
        return {
            "version": VERSION,
            "server": self._version,
            "pid": os.getpid(),
            "boot": self.boot,
            "session": session.secret,
            "facts": self.cache.facts,
            "share": "copy" if session.copies else "map",
            "apart": self.door.apart,
            "stores": True,
            "life": self.cache.life,
            "tenant": "" if session.tenant.operator else session.tenant.name,
        }

    def _place(self, session: Session) -> None:
        """Another connection of its tenant; UnreachableError where there is no room for one."""
        name = session.tenant.name
        if not self._places.take(name):
            said = f"{self._places.used(name)} connections of tenant {name!r}, of {self._places.most} for all"
            _log.warning("%s (daemon.connections): one more was refused", said)
            raise UnreachableError(f"{said} (daemon.connections): there is no room for one more")

    def _begin_moving(self, peer: Peer, message: dict[str, Any]) -> dict[str, Any]:
        session = self._sessions.get(message.get("session") or b"")
        if session is None or session.pid != peer.pid:
            raise UnreachableError("no session of this process has this secret; connect again")
        self._place(session)
        peer.send({"ok": {}})
        if not peer.open:
            self._places.give_back(session.tenant.name)
            raise UnreachableError("it hung up")
        self._peers.discard(peer)
        self._hall.leave(peer)
        moving = Moving(peer.detach(), session)
        thread = threading.Thread(target=self._move, args=(moving,), name="kvcache-mover", daemon=True)
        self._moving[moving] = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads in this process
            self._moved(moving)
            moving.connection.close()
        return {}

    def _end_for(self, peer: Peer) -> dict[str, Any]:
        """End, since another process takes this one's place; what is in host memory is handed to it (`handover`)."""
        if isinstance(peer, Guest) or not akin(peer.pid, peer.uid):
            raise AccessError(f"a daemon ends for a process of its own user and container alone: {peer} is none")
        if self._ending:
            raise ClosedError("this daemon is ending already")
        peer.send({"ok": {"pid": os.getpid()}})
        if peer.open:
            self._peers.discard(peer)
            self.heir = peer.detach()
        _log.warning("%s takes this daemon's place: it ends", peer)
        self._end()
        return {}

    def _move(self, moving: Moving) -> None:
        try:
            serve(moving, self.cache, self._settings.lease_s)
        finally:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._moved, moving)

    def _moved(self, moving: Moving) -> None:
        if self._moving.pop(moving, None) is not None:
            self._places.give_back(moving.session.tenant.name)

    # ends

    def _end_session(self, session: Session) -> None:
        if session.secret in self._sessions:
            session.end()
            del self._sessions[session.secret]  # whoever sees it gone finds nothing of it
            self._watch.end(session)
            self._linger()

    def _process_ended(self, session: Session) -> None:
        self._end_session(session)
        self._hang_up_movers(session)
        for peer in [p for p, of in self._of_peer.items() if of is session]:
            peer.close()

    def _hang_up_movers(self, session: Session) -> None:
        for moving in [m for m in self._moving if m.session is session]:
            moving.hang_up()

    def _linger(self) -> None:
        if self._linger_s is not None and not self._sessions and not self._ending and self._lingering is None:
            self._linger_for(self._linger_s)

    def _linger_for(self, seconds: float) -> None:
        self._lingers_until = self._loop.time() + seconds
        self._lingering = self._loop.call_later(seconds, self._lingered)

    def _stay(self) -> None:
        """Whoever comes, to look whether anybody answers, has the time of the last one that left to come again."""
        if self._lingering is not None and self._lingers_until < self._loop.time() + (self._linger_s or 0.0):
            self._lingering.cancel()
            self._linger_for(self._linger_s or 0.0)

    def _lingered(self) -> None:
        ended = self._lingering
        for listener in self._listeners():  # whoever is in the queue was told already that somebody answers
            self._accept(listener)
        if self._lingering is ended:
            self._end()

    def _end(self) -> None:
        if not self._ending:
            self._ending = True
            for listener in self._listeners():
                self._loop.remove_reader(listener)
            self.claim.hide()
            self._ended.set()

    def _drain(self) -> None:
        """Transfers under way end, or their time does; then every connection is closed."""
        end = time.monotonic() + self._settings.drain_s
        for moving, thread in self._moving.items():
            moving.ending = True
            if not moving.busy:
                moving.hang_up()
            thread.join(max(0.0, end - time.monotonic()))
            moving.hang_up()
        for peer in list(self._peers):
            peer.close()
        for session in self.sessions:
            self._end_session(session)

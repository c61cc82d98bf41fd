"""Connections on the daemon's event loop: bytes to messages and back, with bounded buffers and no blocking call.

`Connection` is one socket, authenticated or not. `PendingConnections` holds those that have not authenticated.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvcache.daemon.protocol import HEADER_BYTES, ProtocolError, body_length, error_reply, pack, unpack
from kvcache.daemon.server.admission import Credentials
from kvcache.daemon.wire import SOCKET_BUFFER_BYTES
from kvcache.log import logger

MAX_UNSENT_BYTES = 16 << 20
"""Unsent replies to one client, beyond which the daemon closes its connection."""
MAX_HELLO_BYTES = 64 << 10
"""Size limit of the first message: its sender has not authenticated."""
MAX_MESSAGES_PER_TURN = 32
"""Messages of one client that are answered before other clients have a turn."""
MAX_CATCH_UP_TURNS = 64
"""Turns of one client that `catch_up` takes before the loop continues."""
RECEIVE_BUFFER = memoryview(bytearray(SOCKET_BUFFER_BYTES))  # loop thread; large: few reads a message
_CREDENTIALS = struct.Struct("3i")

_log = logger("kvcache.daemon")


class Connection:
    """One client's socket on the event loop.

    Calls `on_message` with each message, and `on_close` once when the connection ends. Thread safety: the loop's thread
    only.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        on_message: Callable[[Connection, dict[str, Any]], None],
        on_close: Callable[[Connection], None],
    ) -> None:
        self.pid = self.uid = 0
        self._identify(connection)
        self.connection = connection
        self.max_bytes = MAX_HELLO_BYTES  # per message
        self._loop, self._on_message, self._on_close = loop, on_message, on_close
        self._read = bytearray()
        self._reading_paused = False  # whole messages wait in `_read`; no more is read before their turn
        self._turn_scheduled = False  # with the loop
        self._unsent: deque[memoryview] = deque()
        self._unsent_bytes = 0
        self.open = True
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
        loop.add_reader(connection, self._readable)

    def _identify(self, connection: socket.socket) -> None:
        """Read process and user of the client from the kernel."""
        self.pid, self.uid, _ = peer_credentials(connection)

    def __str__(self) -> str:
        return f"user {self.uid} (process {self.pid})"

    @property
    def origin(self) -> str:
        """The sender, as known before authentication; `PendingConnections` counts by it."""
        return f"user {self.uid}"

    def credentials(self, token_hash: str) -> Credentials:
        """Return the client's credentials: its token, and the user id that the kernel reports."""
        return Credentials(user=self.uid, token_hash=token_hash)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send what the socket accepts now; the loop sends the rest later. Closes beyond `MAX_UNSENT_BYTES`."""
        if not self.open:
            return
        try:
            rest = memoryview(pack(message))
        except ProtocolError as error:  # a reply too long for a frame
            rest = memoryview(pack(error_reply(error)))
        if not self._unsent:
            rest = rest[self._put(rest) :]
            if not rest or not self.open:
                return
            self._loop.add_writer(self.connection, self._writable)
        self._unsent.append(rest)
        self._unsent_bytes += len(rest)
        if self._unsent_bytes > MAX_UNSENT_BYTES:
            _log.warning("closed slow client: peer=%s", self)
            self.close()

    def catch_up(self) -> None:
        """Read and answer what has arrived by now, at most `MAX_CATCH_UP_TURNS` turns."""
        for _ in range(MAX_CATCH_UP_TURNS):
            if self._reading_paused:
                self._dispatch_batch()
            elif not self.open or not self._readable():
                return

    def detach(self) -> socket.socket:
        """Return the socket, blocking, for a thread to use; the loop stops watching it. The caller owns it."""
        self._loop.remove_reader(self.connection)
        self._loop.remove_writer(self.connection)
        self.open = False
        self.connection.setblocking(True)
        return self.connection

    def close(self) -> None:
        """Close the socket and call `on_close`. Idempotent."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self.connection)
        self._loop.remove_writer(self.connection)
        self.connection.close()
        self._unsent.clear()
        self._on_close(self)

    def _put(self, data: memoryview) -> int:
        try:
            return self._transmit(data)
        except BlockingIOError:
            return 0
        except OSError:
            self.close()
            return 0

    def _transmit(self, data: memoryview) -> int:
        return self.connection.send(data)

    def _receive(self) -> int:
        return self.connection.recv_into(RECEIVE_BUFFER)

    def _writable(self) -> None:
        while self._unsent and self.open:
            done = self._put(self._unsent[0])
            self._unsent_bytes -= done
            if done < len(self._unsent[0]):
                if self.open:
                    self._unsent[0] = self._unsent[0][done:]
                return
            self._unsent.popleft()
        if self.open:
            self._loop.remove_writer(self.connection)

    def _readable(self) -> bool:
        """Read one buffer and answer its whole messages; return whether anything was read."""
        try:
            count = self._receive()
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self.close()
            return False
        self._read += RECEIVE_BUFFER[:count]
        self._dispatch_batch()
        return True

    def _dispatch_batch(self) -> None:
        """Answer at most `MAX_MESSAGES_PER_TURN` whole messages, then schedule another turn.

        `_read` holds at most one partial message and one buffer: further bytes stay with the sender until these are
        answered.
        """
        for _ in range(MAX_MESSAGES_PER_TURN):
            if not self.open:
                return
            try:
                message = self._next()
            except ProtocolError as error:
                self.send(error_reply(error))
                self.close()
                return
            if message is None:
                self._resume_reading()
                return
            self._on_message(self, message)
        if not self.open:
            return
        if not self._reading_paused:
            self._reading_paused = True
            self._loop.remove_reader(self.connection)
        self._schedule_turn()

    def _schedule_turn(self) -> None:
        """Schedule one turn in the loop's next iteration; repeated calls before it have no effect."""
        if not self._turn_scheduled:
            self._turn_scheduled = True
            self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._turn_scheduled = False
        if self._reading_paused:
            self._dispatch_batch()
        elif self.open:
            self._readable()

    def _resume_reading(self) -> None:
        if self._reading_paused:
            self._reading_paused = False
            self._loop.add_reader(self.connection, self._readable)

    def _next(self) -> dict[str, Any] | None:
        if len(self._read) < HEADER_BYTES:
            return None
        size = body_length(self._read[:HEADER_BYTES])
        if size > self.max_bytes:
            raise ProtocolError(f"a hello of {size} bytes: expected at most {self.max_bytes}")
        end = HEADER_BYTES + size
        if len(self._read) < end:
            return None
        with memoryview(self._read) as view:
            message = unpack(view[HEADER_BYTES:end])
        del self._read[:end]
        return message


def peer_credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Return process, user and group of the other end, from the kernel."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return pid, uid, gid


# Connections that have not authenticated. They are kept in a separate, bounded pool, so that they cannot use up
# `daemon.connections`. Where the pool is full, the origin with most connections loses its oldest: a flood evicts only
# itself.

MAX_PENDING_CONNECTIONS = 64
"""Each takes a descriptor, in addition to those of `daemon.connections`."""
HELLO_TIMEOUT_S = 5.0
"""Time for a connection to send its hello."""


class PendingConnections:
    """Bounded pool of connections before their hello. Thread safety: the loop's thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Connection, asyncio.TimerHandle] = {}  # oldest first
        self._next_warning_s = loop.time()  # limits the log to one line in `HELLO_TIMEOUT_S` during a flood

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, peer: Connection) -> None:
        self._waiting[peer] = self._loop.call_later(HELLO_TIMEOUT_S, peer.close)
        if len(self._waiting) > MAX_PENDING_CONNECTIONS:
            crowd, count = Counter(each.origin for each in self._waiting).most_common(1)[0]
            first = next(each for each in self._waiting if each.origin == crowd)
            if self._loop.time() >= self._next_warning_s:
                self._next_warning_s = self._loop.time() + HELLO_TIMEOUT_S
                _log.warning("closing the oldest unauthenticated connections: count=%d peer=%s", count, crowd)
            first.close()

    def remove(self, peer: Connection) -> None:
        """Remove a connection that has authenticated or ended. Idempotent."""
        timer = self._waiting.pop(peer, None)
        if timer is not None:
            timer.cancel()

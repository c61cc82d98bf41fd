"""One connection as the daemon's loop sees it: bytes to messages and back, within bounds, never waiting."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from kvcache.daemon.protocol import HEAD_BYTES, ProtocolError, body_bytes, pack, refusal, unpack
from kvcache.daemon.server.admission import Shown
from kvcache.daemon.wire import BUFFER_BYTES
from kvcache.log import logger

UNREAD_BYTES = 16 << 20
"""Of answers that a client does not take, beyond which it is let go."""
FIRST_BYTES = 64 << 10
"""Of the first message: nobody knows yet who says it."""
AT_ONCE = 32
"""Messages of one client that are answered before others have their turn."""
CATCH_UP = 64
"""Turns of one client that are taken before somebody else's question is answered."""
RECEIVED = memoryview(bytearray(BUFFER_BYTES))  # of the loop's thread: a long message comes in one piece
_CREDENTIALS = struct.Struct("3i")

_log = logger("kvcache.daemon")


class Peer:
    """`on_message` is called with each message, `on_end` once when the connection is over."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        connection: socket.socket,
        on_message: Callable[[Peer, dict[str, Any]], None],
        on_end: Callable[[Peer], None],
    ) -> None:
        self.pid = self.uid = 0
        self._know(connection)
        self.connection = connection
        self.most_bytes = FIRST_BYTES  # of a message
        self._loop, self._on_message, self._on_end = loop, on_message, on_end
        self._read = bytearray()
        self._full = False  # whole messages wait: no more is read before they have had their turn
        self._waits = False  # for its turn, which the loop knows of
        self._unread: deque[memoryview] = deque()
        self._unread_bytes = 0
        self.open = True
        connection.setblocking(False)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, BUFFER_BYTES)
        loop.add_reader(connection, self._readable)

    def _know(self, connection: socket.socket) -> None:
        """Who it is, as the system tells."""
        self.pid, self.uid, _ = credentials(connection)

    def __str__(self) -> str:
        return f"user {self.uid} (process {self.pid})"

    @property
    def origin(self) -> str:
        """Where it comes from, as far as that can be told before it says who it is."""
        return f"user {self.uid}"

    def shown(self, token_hash: str) -> Shown:
        """Who it is, as far as can be told: what it gave, or else what the kernel knows."""
        return Shown(user=self.uid, token_hash=token_hash)

    def send(self, message: Mapping[str, Any]) -> None:
        """Now, as far as the other side takes it, and the rest when it does."""
        if not self.open:
            return
        try:
            rest = memoryview(pack(message))
        except ProtocolError as error:  # an answer too long for a frame
            rest = memoryview(pack(refusal(error)))
        if not self._unread:
            rest = rest[self._put(rest) :]
            if not rest or not self.open:
                return
            self._loop.add_writer(self.connection, self._writable)
        self._unread.append(rest)
        self._unread_bytes += len(rest)
        if self._unread_bytes > UNREAD_BYTES:
            _log.warning("%s does not take its answers: let go", self)
            self.close()

    def catch_up(self) -> None:
        """Take in and answer what had come by now; of a client that says more than any has reason to, a part."""
        for _ in range(CATCH_UP):
            if self._full:
                self._answer_some()
            elif not self.open or not self._readable():
                return

    def detach(self) -> socket.socket:
        """The connection, for a thread to go on with: the loop has no more to do with it."""
        self._loop.remove_reader(self.connection)
        self._loop.remove_writer(self.connection)
        self.open = False
        self.connection.setblocking(True)
        return self.connection

    def close(self) -> None:
        """Idempotent."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self.connection)
        self._loop.remove_writer(self.connection)
        self.connection.close()
        self._unread.clear()
        self._on_end(self)

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
        return self.connection.recv_into(RECEIVED)

    def _writable(self) -> None:
        while self._unread and self.open:
            done = self._put(self._unread[0])
            self._unread_bytes -= done
            if done < len(self._unread[0]):
                if self.open:
                    self._unread[0] = self._unread[0][done:]
                return
            self._unread.popleft()
        if self.open:
            self._loop.remove_writer(self.connection)

    def _readable(self) -> bool:
        """Take in a piece of what has come, and answer what is whole; whether there was anything."""
        try:
            count = self._receive()
        except BlockingIOError:
            return False
        except OSError:
            count = 0
        if not count:
            self.close()
            return False
        self._read += RECEIVED[:count]
        self._answer_some()
        return True

    def _answer_some(self) -> None:
        """What has been read and not answered is less than a message and what one call brings, however much is sent:
        the rest stays with whoever sends it."""
        for _ in range(AT_ONCE):
            if not self.open:
                return
            try:
                message = self._next()
            except ProtocolError as error:
                self.send(refusal(error))
                self.close()
                return
            if message is None:
                self._read_on()
                return
            self._on_message(self, message)
        if not self.open:
            return
        if not self._full:
            self._full = True
            self._loop.remove_reader(self.connection)
        self._go_on_soon()

    def _go_on_soon(self) -> None:
        """In the loop's next turn; once in it, however often that is asked for meanwhile."""
        if not self._waits:
            self._waits = True
            self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        self._waits = False
        if self._full:
            self._answer_some()
        elif self.open:
            self._readable()

    def _read_on(self) -> None:
        if self._full:
            self._full = False
            self._loop.add_reader(self.connection, self._readable)

    def _next(self) -> dict[str, Any] | None:
        if len(self._read) < HEAD_BYTES:
            return None
        size = body_bytes(self._read[:HEAD_BYTES])
        if size > self.most_bytes:
            raise ProtocolError(f"a hello of {size} bytes: at most {self.most_bytes} are read")
        end = HEAD_BYTES + size
        if len(self._read) < end:
            return None
        with memoryview(self._read) as view:
            message = unpack(view[HEAD_BYTES:end])
        del self._read[:end]
        return message


def credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end, as the kernel knows them."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(found)
    return pid, uid, gid


# Connections of which nobody knows yet whose they are. They wait apart from those that are known, so that whoever
# only connects shuts nobody out. So many wait at a time, for so long. Where one more comes, the one that waited
# longest leaves, of those that come from where most of them do: whoever connects without end pushes out itself.

WAITING = 64
"""At a time, a descriptor each, beside those of `daemon.connections`."""
HELLO_S = 5.0
"""For a connection to say who it is."""


class Hall:
    """Of the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: dict[Peer, asyncio.TimerHandle] = {}  # the longest first
        self._quiet_until = loop.time()  # a crowd writes no log

    def __len__(self) -> int:
        return len(self._waiting)

    def enter(self, peer: Peer) -> None:
        self._waiting[peer] = self._loop.call_later(HELLO_S, peer.close)
        if len(self._waiting) > WAITING:
            crowd, count = Counter(each.origin for each in self._waiting).most_common(1)[0]
            first = next(each for each in self._waiting if each.origin == crowd)
            if self._loop.time() >= self._quiet_until:
                self._quiet_until = self._loop.time() + HELLO_S
                _log.warning("%d connections of %s do not say who they are: the first of them go", count, crowd)
            first.close()

    def leave(self, peer: Peer) -> None:
        """It is known now, or gone. Idempotent."""
        timer = self._waiting.pop(peer, None)
        if timer is not None:
            timer.cancel()

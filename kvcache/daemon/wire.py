"""Blocking frames over a connected stream socket.

A Unix socket also carries descriptors of memory. Every socket also carries payload bytes behind a frame, read
directly into the caller's memory and sent from it.
"""

from __future__ import annotations

import array
import os
import select
import socket
import ssl
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from kvcache.daemon.protocol import HEADER_BYTES, MAX_FRAME_DESCRIPTORS, ProtocolError, body_length, frame_parts, unpack
from kvcache.errors import UnreachableError

SOCKET_BUFFER_BYTES = 1 << 20
_CHUNK_BYTES = 256 << 10
_DESCRIPTOR_BYTES = array.array("i").itemsize


class WireTimeoutError(UnreachableError):
    """The other side did not answer in time; it may still be there."""


class Wire:
    """A socket with frames.

    `accepts_descriptors`: received descriptors are kept; otherwise the system drops them. After an UnreachableError or
    a ProtocolError the object is unusable. Thread safety: one thread at a time.
    """

    def __init__(self, connection: socket.socket, *, accepts_descriptors: bool) -> None:
        self.connection = connection
        self._unix = connection.family == socket.AF_UNIX
        self._ancillary_bytes = (
            socket.CMSG_SPACE(MAX_FRAME_DESCRIPTORS * _DESCRIPTOR_BYTES) if accepts_descriptors and self._unix else 0
        )
        self._read = bytearray()
        self._descriptors: list[int] = []
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            with suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)

    @classmethod
    def connect(cls, path: str, timeout_s: float) -> Wire:
        connection: socket.socket | None = None
        try:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.settimeout(timeout_s)
            connection.connect(path)
        except OSError as error:
            if connection is not None:
                connection.close()
            raise UnreachableError(f"{path}: {error.strerror or error}; is `kvcache daemon` running?") from None
        return cls(connection, accepts_descriptors=True)

    def send(
        self, message: Mapping[str, Any], descriptors: Sequence[int] = (), *, timeout_s: float | None = None
    ) -> None:
        """Send one message; UnreachableError where the other side does not take it in time."""
        head, body = frame_parts({**message, "descriptors": len(descriptors)} if descriptors else message)
        if not self._unix:
            self.send_bytes([head + body], timeout_s=timeout_s)
            return
        rights = []
        if descriptors:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors).tobytes())]
        try:
            self.connection.settimeout(timeout_s)
            sent = self.connection.sendmsg([head, body], rights)
            if sent < len(head) + len(body):
                self.connection.sendall((head + body)[sent:])
        except TimeoutError:
            raise WireTimeoutError("the peer did not receive a message within the deadline") from None
        except OSError as error:
            raise UnreachableError(f"the connection ended: {error}") from None

    def send_bytes(self, frame_parts: Sequence[bytes | memoryview], *, timeout_s: float | None = None) -> None:
        """Send these bytes without a frame, in order. `timeout_s` applies to each."""
        try:
            self.connection.settimeout(timeout_s)
            for piece in frame_parts:
                self.connection.sendall(piece)
        except TimeoutError:
            raise WireTimeoutError("the peer did not receive the bytes within the deadline") from None
        except OSError as error:
            raise UnreachableError(f"the connection ended: {error}") from None

    def receive_bytes(self, into: Sequence[memoryview], timeout_s: float | None = None) -> None:
        """Fill these views with bytes that the other side sent with `send_bytes`. `timeout_s` covers all of them."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        for view in into:
            at = min(len(view), len(self._read))
            view[:at] = self._read[:at]
            del self._read[:at]
            while at < len(view):
                remaining_s = None if end is None else end - time.monotonic()
                if remaining_s is not None and remaining_s <= 0:
                    raise WireTimeoutError("the announced bytes did not arrive within the deadline")
                try:
                    self.connection.settimeout(remaining_s)
                    count = self.connection.recv_into(view[at:])
                except TimeoutError:
                    raise WireTimeoutError("the announced bytes did not arrive within the deadline") from None
                except OSError as error:
                    raise UnreachableError(f"the connection ended: {error}") from None
                if not count:
                    raise UnreachableError("the connection ended")
                at += count

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], list[int]]:
        """Return the next message and its descriptors, which the caller closes. `timeout_s` covers all of it."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        self._fill(HEADER_BYTES, end)
        size = body_length(self._read[:HEADER_BYTES])
        self._fill(HEADER_BYTES + size, end)
        with memoryview(self._read) as view:
            message = unpack(view[HEADER_BYTES : HEADER_BYTES + size])
        del self._read[: HEADER_BYTES + size]
        count = message.get("descriptors", 0)
        if not isinstance(count, int) or not 0 <= count <= len(self._descriptors):
            raise ProtocolError(f"{count!r:.40} descriptors: received {len(self._descriptors)}")
        descriptors, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        return message, descriptors

    def _fill(self, size: int, end: float | None) -> None:
        while len(self._read) < size:
            remaining_s = None if end is None else end - time.monotonic()
            if remaining_s is not None and remaining_s <= 0:
                raise WireTimeoutError("no reply within the deadline")
            try:
                self.connection.settimeout(remaining_s)
                if self._unix:
                    piece, rights, flags, _ = self.connection.recvmsg(
                        _CHUNK_BYTES, self._ancillary_bytes, socket.MSG_CMSG_CLOEXEC
                    )
                else:
                    piece, rights, flags = self.connection.recv(_CHUNK_BYTES), [], 0
            except TimeoutError:
                raise WireTimeoutError("no reply within the deadline") from None
            except OSError as error:
                raise UnreachableError(f"the connection ended: {error}") from None
            for level, kind, data in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    whole = len(data) - len(data) % _DESCRIPTOR_BYTES
                    self._descriptors += array.array("i", data[:whole])
            if self._ancillary_bytes and flags & socket.MSG_CTRUNC:
                raise UnreachableError(
                    "this process has no file descriptors left for the daemon's memory; raise `ulimit -n`"
                )
            if not piece:
                raise UnreachableError("the connection ended")
            self._read += piece

    @property
    def hung_up(self) -> bool:
        """Whether the other side hung up, or sent an unexpected message, which is as bad. Use it between requests."""
        try:
            self.connection.settimeout(0)
            if isinstance(self.connection, ssl.SSLSocket):  # it cannot peek; no byte is expected
                self.connection.recv(1)
            else:
                self.connection.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, ssl.SSLWantReadError):
            return bool(self._read)
        except OSError:
            pass
        return True

    def writable(self, timeout_s: float) -> bool:
        """Return whether the socket accepts a short message within this time."""
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        return bool(poll.poll(timeout_s * 1e3))

    def wait_for_hangup(self) -> None:
        """Send no more, and wait until the other side hangs up; discard what it sends."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(None)
            while self.connection.recv(_CHUNK_BYTES):
                pass

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []
        self.connection.close()

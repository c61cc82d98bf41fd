"""One connection to a server that speaks RESP, with payloads by reference.

The connection sends payloads from the caller's memory and receives values into it. A client that makes an object of
each value copies it twice. After an OSError the caller MUST close the connection, because the rest of a reply may
still follow. TimeoutError means that the deadline passed.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Sequence
from struct import pack
from typing import Any

from kvcache.os_env import Clock

_BUFFER_BYTES = 64 << 10
_MAX_IOVECS = 512  # buffers in one sendmsg; the kernel takes 1,024 at most
_MAX_SKIP_BYTES = 16 << 20
_MAX_VALUE_BYTES = 512 << 20  # no server of this protocol keeps a larger value
_MAX_REPLY_DEPTH = 16  # lists within lists
MAX_TAKE_BYTES = 32 << 10
"""The largest size that a caller requests from `read_exact`."""

Piece = bytes | memoryview


class ProtocolError(OSError):
    """The peer does not speak RESP, or closed the connection."""


class ErrorReply(str):
    """The code of an error reply, the first word of its text: OOM, READONLY.

    `target` is the HOST:PORT of a redirection, else empty.
    """

    __slots__ = ("target",)
    target: str

    def __new__(cls, code: str, target: str = "") -> ErrorReply:
        made = super().__new__(cls, code)
        made.target = target
        return made


class RespConnection:
    def __init__(self, made: Any, sock: Any, clock: Clock) -> None:
        """Take over a connected redis-py connection and its socket."""
        self._made, self._sock, self._clock = made, sock, clock
        self._encrypted = isinstance(self._sock, ssl.SSLSocket)
        self._limit_s = 0.0  # the timeout that the kernel has for this socket
        if not self._encrypted:
            self._sock.settimeout(None)  # with a timeout Python polls before each call: a second system call
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._bytes: bytearray = self._buffer.obj  # type: ignore[assignment]  # memoryview has no find()
        self._at = self._end = 0
        self.deadline = self._allowed_s = 0.0
        self.received = 0  # bytes since the connection opened
        self.wrong = ""  # the first error reply of a call; the pool clears it before each call
        self.asking = False  # the keys are migrating to this server: each command follows an ASKING
        self.tracked = False  # the server reports changes of the keys that this connection read
        self._is_tracking = False
        self.invalidated_keys: list[bytes] | None = []  # keys reported as changed; None: any key may have changed

    def set_deadline(self, seconds: float) -> None:
        """Set the deadline to `seconds` from now."""
        self._allowed_s = seconds
        self.extend_deadline()

    def extend_deadline(self) -> None:
        """Restart the time of `set_deadline`, for background work of many steps."""
        self.deadline = self._clock.now() + self._allowed_s

    def _wait(self) -> None:
        remaining = self.deadline - self._clock.now()
        if remaining <= 0:
            raise TimeoutError("deadline")
        if self._encrypted:
            self._sock.settimeout(remaining)
        elif not 0.8 * self._limit_s <= remaining <= self._limit_s:  # setting the timeout costs as much as a receive
            limit = pack("ll", *divmod(int(remaining * 1e6) + 1, 1_000_000))
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
            self._limit_s = remaining

    def _receive(self, into: memoryview, flags: int = 0) -> int:
        self._wait()
        try:
            got = self._sock.recv_into(into, 0, flags)
        except BlockingIOError:
            raise TimeoutError("deadline") from None
        if not got:
            raise ProtocolError("closed")
        self.received += got
        return int(got)

    def send(self, pieces: Sequence[Piece]) -> None:
        if self._encrypted:
            for piece in pieces:
                self._wait()
                self._sock.sendall(piece)
            return
        remaining = list(pieces)
        first = 0
        while first < len(remaining):
            self._wait()
            try:
                sent = self._sock.sendmsg(remaining[first : first + _MAX_IOVECS])
            except BlockingIOError:
                raise TimeoutError("deadline") from None
            while first < len(remaining) and sent >= len(remaining[first]):
                sent -= len(remaining[first])
                first += 1
            if sent:
                remaining[first] = memoryview(remaining[first])[sent:]

    def _more(self) -> None:
        """Receive more bytes into the buffer."""
        if self._at:
            rest = self._end - self._at
            self._buffer[:rest] = bytes(self._buffer[self._at : self._end])
            self._at, self._end = 0, rest
        if self._end == _BUFFER_BYTES:
            raise ProtocolError("protocol")
        self._end += self._receive(self._buffer[self._end :])

    def _line(self) -> bytes:
        while (line := self._raw_line())[:1] == b">":  # a push message stands between two replies
            self._on_push(line)
        return line

    def _raw_line(self) -> bytes:
        while (end := self._bytes.find(b"\r\n", self._at, self._end)) < 0:
            self._more()
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def enable_tracking(self) -> None:
        """Turn on client tracking, where the server has it. Needs a connection with RESP 3."""
        self.tracked = self.ask(b"CLIENT", b"TRACKING", b"ON") == b"OK"

    def read_invalidations(self) -> None:
        """Process the invalidations that have arrived. Does not block."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while self._at < self._end or poll.poll(0) or (self._encrypted and self._sock.pending()):
            if self._at == self._end:
                self._more()
            if self._bytes[self._at : self._at + 1] != b">":
                raise ProtocolError("protocol")
            self._on_push(self._raw_line())

    def _answer(self) -> bytes:
        """Return the first line of the reply to a command."""
        if self.asking and self._line()[:1] not in (b"+", b"-"):
            raise ProtocolError("protocol")
        return self._line()

    def _on_push(self, line: bytes) -> None:
        """Process a push message that begins with this line."""
        if self._is_tracking:
            raise ProtocolError("protocol")
        self._is_tracking = True
        message = [self.reply(1) for _ in range(_number(line))]
        self._is_tracking = False
        if message[:1] != [b"invalidate"]:
            return
        arguments = message[1:]
        names = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else []
        if arguments not in ([None], [names]) or not all(isinstance(name, bytes) for name in names):
            raise ProtocolError("protocol")
        if self.invalidated_keys is not None:
            self.invalidated_keys = None if arguments == [None] else self.invalidated_keys + names

    def read_exact(self, size: int) -> bytes:
        """Return the next `size` bytes, at most the size of the buffer."""
        while self._end - self._at < size:
            self._more()
        taken = bytes(self._buffer[self._at : self._at + size])
        self._at += size
        return taken

    def read_into(self, into: memoryview) -> None:
        """Fill the caller's memory with the next bytes."""
        done = min(len(into), self._end - self._at)
        into[:done] = self._buffer[self._at : self._at + done]
        self._at += done
        while done < len(into):
            done += self._receive(into[done:], 0 if self._encrypted else socket.MSG_WAITALL)

    def skip(self, size: int) -> None:
        """Discard the next `size` bytes. Raises ProtocolError above 16 MiB: a new connection is cheaper."""
        if size > _MAX_SKIP_BYTES:
            raise ProtocolError("length")
        while size:
            if self._at == self._end:
                self._more()
            step = min(size, self._end - self._at)
            self._at += step
            size -= step

    def bulk(self) -> int | ErrorReply | None:
        """Return the length of the value that follows; None where there is no value.

        The caller then reads that many bytes, and calls `end`.
        """
        line = self._answer()
        if line[:1] == b"-":
            return self._refused(line)
        if line[:1] != b"$":
            raise ProtocolError("protocol")
        size = _number(line)
        return size if size >= 0 else None

    def end(self) -> None:
        if self.read_exact(2) != b"\r\n":
            raise ProtocolError("protocol")

    def heads(self, count: int, size: int) -> list[bytes | ErrorReply]:
        """Return the replies to `count` GETRANGE commands, each of at most `size` bytes.

        Nearly all have the full length; those are sliced from the buffer directly.
        """
        full = b"$%d\r\n" % size
        skip, step = len(full), len(full) + size + 2
        heads: list[bytes | ErrorReply] = []
        while len(heads) < count:
            data = bytes(self._buffer[self._at : self._end])  # slices of bytes are bytes already
            at, most = 0, 0 if self.asking else min(len(data) // step, count - len(heads))
            while most and data.startswith(full, at):
                heads.append(data[at + skip : at + skip + size])
                at, most = at + step, most - 1
            self._at += at
            if len(heads) < count:
                length = self.bulk()
                if isinstance(length, ErrorReply):
                    heads.append(length)
                    continue
                if length is None or length > size:
                    raise ProtocolError("protocol")
                heads.append(self.read_exact(length))
                self.end()
        return heads

    def reply(self, depth: int = 0) -> Any:
        """Return any small reply: int, bytes, None, ErrorReply, or a list of these."""
        line = self._line() if depth else self._answer()
        kind = line[:1]
        if kind == b"+":
            return line[1:]
        if kind == b"-":
            return self._refused(line)
        if kind == b"_":
            return None
        number = _number(line)
        if kind == b":":
            return number
        if number < 0:
            return None
        if kind == b"*":
            if depth == _MAX_REPLY_DEPTH:
                raise ProtocolError("protocol")
            return [self.reply(depth + 1) for _ in range(number)]
        if kind != b"$":
            raise ProtocolError("protocol")
        if number > _MAX_VALUE_BYTES:  # checked before memory is allocated
            raise ProtocolError("length")
        value = self.read_exact(number) if number <= _BUFFER_BYTES - 2 else self._large(number)
        self.end()
        return value

    def _large(self, size: int) -> bytes:
        value = bytearray(size)
        self.read_into(memoryview(value))
        return bytes(value)

    def _refused(self, line: bytes) -> ErrorReply:
        """Return the code of an error reply. Its text may quote the command, so it is dropped."""
        code, *words = line[1:].decode("ascii", "replace").split(" ", 3)
        redirected = code in ("ASK", "MOVED") and len(words) == 2
        wrong = ErrorReply(code[:32] if code.isalpha() else "ERR", words[1] if redirected else "")
        self.wrong = self.wrong or wrong
        return wrong

    def ask(self, *words: bytes) -> Any:
        self.send([self.command(*words)])
        return self.reply()

    @property
    def command_prefix(self) -> bytes:
        """The bytes to send before each command."""
        return _ASKING if self.asking else b""

    def command(self, *words: bytes) -> bytes:
        return self.command_prefix + _command(*words)

    def store(self, name: bytes, value: Sequence[Piece], *, expire_ms: int, only_new: bool = True) -> list[Piece]:
        """Return a SET command for a value in pieces, without a copy of them."""
        size = sum(map(len, value))
        tail = ([b"NX"] if only_new else []) + ([b"PX", b"%d" % expire_ms] if expire_ms else [])
        set_ = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(tail), len(name), name, size)
        end = b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in tail])
        return [self.command_prefix + set_, *value, end]

    def is_stale(self) -> bool:
        """Return whether unexpected input waits: a surplus reply, or the end of the connection."""
        if self._at < self._end:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def abort(self) -> None:
        """Wake the thread that waits on this connection, from another thread. That thread then closes it."""
        with contextlib.suppress(OSError):  # already closed
            self._sock.shutdown(2)

    def close(self) -> None:
        self._made.disconnect()


def _command(*words: bytes) -> bytes:
    return b"*%d\r\n" % len(words) + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in words])


_ASKING = _command(b"ASKING")


def _number(line: bytes) -> int:
    try:
        return int(line[1:])
    except ValueError:
        raise ProtocolError("protocol") from None

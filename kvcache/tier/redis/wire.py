"""One connection to a server, speaking RESP with payloads by reference.

What is sent goes out of the caller's memory, and the bytes of a value come from the socket straight into it: a client
that makes an object of each value copies it twice. Whoever gets an OSError closes the wire, since nobody knows what
of a reply is still to come. TimeoutError is the one for a deadline that passed.
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
_MAX_IOVECS = 512  # buffers in one sendmsg; the system takes 1,024 at most
_MAX_SKIP_BYTES = 16 << 20
_MAX_VALUE_BYTES = 512 << 20  # of a value: no server of this protocol keeps a larger one
_MAX_REPLY_DEPTH = 16  # lists within lists
MAX_TAKE_BYTES = 32 << 10
"""What `take` is asked for at most."""

Piece = bytes | memoryview


class ProtocolError(OSError):
    """The peer does not speak RESP, or hung up."""


class ErrorReply(str):
    """The reply that the server refuses with: the code that its text begins with, such as OOM or READONLY. `place`:
    the server that it sends us to, HOST:PORT, where it does."""

    __slots__ = ("place",)
    place: str

    def __new__(cls, code: str, place: str = "") -> ErrorReply:
        made = super().__new__(cls, code)
        made.place = place
        return made


class RespConnection:
    def __init__(self, made: Any, sock: Any, clock: Clock) -> None:
        """Of a connected redis-py connection and its socket."""
        self._made, self._sock, self._clock = made, sock, clock
        self._encrypted = isinstance(self._sock, ssl.SSLSocket)
        self._limit_s = 0.0  # what the system was told of waiting
        if not self._encrypted:
            self._sock.settimeout(None)  # else each call of Python's asks twice: whether it may, then for the bytes
        self._buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._bytes: bytearray = self._buffer.obj  # type: ignore[assignment]  # find() is not a memoryview's
        self._at = self._end = 0
        self.deadline = self._allowed_s = 0.0
        self.received = 0  # bytes, since it was opened
        self.wrong = ""  # the last refusal; whoever runs a call clears it before
        self.asking = False  # for keys on their way to this server: ASKING goes before each command
        self.tracked = False  # the server tells when a key that was asked for here changes
        self._is_tracking = False
        self.invalidated_keys: list[bytes] | None = []  # of these keys it told; None: all of them may have

    def set_deadline(self, seconds: float) -> None:
        """From now on."""
        self._allowed_s = seconds
        self.extend_deadline()

    def extend_deadline(self) -> None:
        """As much time again, for work of many steps that nobody waits for."""
        self.deadline = self._clock.now() + self._allowed_s

    def _wait(self) -> None:
        remaining = self.deadline - self._clock.now()
        if remaining <= 0:
            raise TimeoutError("deadline")
        if self._encrypted:
            self._sock.settimeout(remaining)
        elif not 0.8 * self._limit_s <= remaining <= self._limit_s:  # near enough: telling it costs as much as a call
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
        """Make the buffer hold more than it does."""
        if self._at:
            rest = self._end - self._at
            self._buffer[:rest] = bytes(self._buffer[self._at : self._end])
            self._at, self._end = 0, rest
        if self._end == _BUFFER_BYTES:
            raise ProtocolError("protocol")
        self._end += self._receive(self._buffer[self._end :])

    def _line(self) -> bytes:
        while (line := self._raw_line())[:1] == b">":  # nobody asked for it: it stands between two replies
            self._on_push(line)
        return line

    def _raw_line(self) -> bytes:
        while (end := self._bytes.find(b"\r\n", self._at, self._end)) < 0:
            self._more()
        line = bytes(self._buffer[self._at : end])
        self._at = end + 2
        return line

    def enable_tracking(self) -> None:
        """Have the server tell of changes, where it can. Of a connection that speaks RESP 3."""
        self.tracked = self.ask(b"CLIENT", b"TRACKING", b"ON") == b"OK"

    def read_invalidations(self) -> None:
        """Take in what the server has told meanwhile; waits for nothing."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while self._at < self._end or poll.poll(0) or (self._encrypted and self._sock.pending()):
            if self._at == self._end:
                self._more()
            if self._bytes[self._at : self._at + 1] != b">":
                raise ProtocolError("protocol")
            self._on_push(self._raw_line())

    def _answer(self) -> bytes:
        """The first line of the reply to a command."""
        if self.asking and self._line()[:1] not in (b"+", b"-"):
            raise ProtocolError("protocol")
        return self._line()

    def _on_push(self, line: bytes) -> None:
        """What the server tells unasked, of which this is the first line."""
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
        """The next bytes, few enough for the buffer."""
        while self._end - self._at < size:
            self._more()
        taken = bytes(self._buffer[self._at : self._at + size])
        self._at += size
        return taken

    def read_into(self, into: memoryview) -> None:
        """The next bytes, into the caller's memory."""
        done = min(len(into), self._end - self._at)
        into[:done] = self._buffer[self._at : self._at + done]
        self._at += done
        while done < len(into):
            done += self._receive(into[done:], 0 if self._encrypted else socket.MSG_WAITALL)

    def skip(self, size: int) -> None:
        """Let bytes go by. So many that a new connection is cheaper end this one."""
        if size > _MAX_SKIP_BYTES:
            raise ProtocolError("length")
        while size:
            if self._at == self._end:
                self._more()
            step = min(size, self._end - self._at)
            self._at += step
            size -= step

    def bulk(self) -> int | ErrorReply | None:
        """The length of the value that follows, whose bytes and `end` are the caller's to take."""
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
        """The replies to as many GETRANGEs, each of `size` bytes at most. Those of full length, nearly all, are cut
        from the buffer at once."""
        full = b"$%d\r\n" % size
        skip, step = len(full), len(full) + size + 2
        heads: list[bytes | ErrorReply] = []
        while len(heads) < count:
            data = bytes(self._buffer[self._at : self._end])  # whose slices are bytes at once
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
        """Any small reply: int, bytes, None, Wrong, or a list of them."""
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
        if number > _MAX_VALUE_BYTES:  # before there is memory for it
            raise ProtocolError("length")
        value = self.read_exact(number) if number <= _BUFFER_BYTES - 2 else self._large(number)
        self.end()
        return value

    def _large(self, size: int) -> bytes:
        value = bytearray(size)
        self.read_into(memoryview(value))
        return bytes(value)

    def _refused(self, line: bytes) -> ErrorReply:
        """The code of a refusal; its text may quote what was sent, and goes nowhere."""
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
        """What goes before each command."""
        return _ASKING if self.asking else b""

    def command(self, *words: bytes) -> bytes:
        return self.command_prefix + _command(*words)

    def store(self, name: bytes, value: Sequence[Piece], *, expire_ms: int, only_new: bool = True) -> list[Piece]:
        """SET with a value in pieces, none of them copied."""
        size = sum(map(len, value))
        tail = ([b"NX"] if only_new else []) + ([b"PX", b"%d" % expire_ms] if expire_ms else [])
        set_ = b"*%d\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (3 + len(tail), len(name), name, size)
        end = b"\r\n" + b"".join([b"$%d\r\n%b\r\n" % (len(word), word) for word in tail])
        return [self.command_prefix + set_, *value, end]

    def is_stale(self) -> bool:
        """Whether something has come that nobody asked for: an answer too many, or the end."""
        if self._at < self._end:
            return True
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(0))

    def abort(self) -> None:
        """Wake the thread that waits for this wire, from another one; its caller closes it."""
        with contextlib.suppress(OSError):  # closed already
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

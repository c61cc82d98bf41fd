"""One message on the control socket: its length, 4 bytes little-endian, then a msgpack map of so many bytes."""

from __future__ import annotations

import socket
import time
from typing import Any

import msgpack

REQUEST_BYTES = 1 << 20
ANSWER_BYTES = 16 << 20
NOT_FOUND = "not_found"
"""The `kind` of an error about a name that nothing has."""
_HEAD_BYTES = 4


class FrameError(Exception):
    """The other side sent no message, or too late; the text says what came."""


def send(connection: socket.socket, message: dict[str, Any], *, most_bytes: int, timeout_s: float | None) -> None:
    try:
        body = msgpack.packb(message)
    except (TypeError, ValueError, OverflowError) as error:
        raise FrameError(f"a message that msgpack cannot write: {error}") from error
    if len(body) > most_bytes:
        raise FrameError(f"a message of {len(body)} bytes: at most {most_bytes} go into one")
    connection.settimeout(timeout_s)
    try:
        connection.sendall(len(body).to_bytes(_HEAD_BYTES, "little") + body)
    except OSError as error:
        raise FrameError(f"{error}") from error


def receive(connection: socket.socket, *, most_bytes: int, timeout_s: float | None) -> dict[str, Any]:
    """The next message. `timeout_s` is for all of it, however it trickles in."""
    end = None if timeout_s is None else time.monotonic() + timeout_s
    size = int.from_bytes(_exactly(connection, _HEAD_BYTES, end), "little")
    if size > most_bytes:
        raise FrameError(f"a message of {size} bytes: at most {most_bytes} are read")
    body = _exactly(connection, size, end)
    try:
        message = msgpack.unpackb(body)
    except Exception as error:  # the library raises many kinds for bytes that are no message
        raise FrameError(f"{size} bytes that are not msgpack: {error!r}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a message that is {type(message).__name__}: expected a map")
    return message


def _exactly(connection: socket.socket, size: int, end: float | None) -> bytes:
    got = bytearray()
    while len(got) < size:
        left = None if end is None else end - time.monotonic()
        if left is not None and left <= 0:
            raise FrameError("nothing within the deadline")
        connection.settimeout(left)
        try:
            piece = connection.recv(min(size - len(got), 64 << 10))
        except TimeoutError:
            raise FrameError("nothing within the deadline") from None
        except OSError as error:
            raise FrameError(f"{error}") from error
        if not piece:
            raise FrameError("the connection ended within a message" if got else "the connection ended")
        got += piece
    return bytes(got)

"""Asks running caches: finds their sockets, and puts a question to one."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvcache.daemon.control.frame import ANSWER_BYTES, NOT_FOUND, REQUEST_BYTES, FrameError, receive, send
from kvcache.daemon.control.place import directories, sockets, stale
from kvcache.errors import KVCacheError, NotFoundError, UnreachableError

TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Found:
    """A running cache: its socket, and what it says of itself; or, where it does not answer, why."""

    path: Path
    info: Mapping[str, Any]
    fault: str = ""

    @property
    def address(self) -> str:
        return self.path.stem


def ask(path: Path, op: str, *, timeout_s: float | None = TIMEOUT_S, **arguments: Any) -> dict[str, Any]:
    """The answer. UnreachableError where none comes; NotFoundError where nothing in the cache has the
    name that was given, KVCacheError with the cache's own words where it refuses otherwise."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(path))
            send(connection, {"op": op, **arguments}, most_bytes=REQUEST_BYTES, timeout_s=timeout_s)
            answer = receive(connection, most_bytes=ANSWER_BYTES, timeout_s=timeout_s)
    except (OSError, FrameError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreachableError(f"{path}: {reason}; `kvcache ps` lists the caches that run") from None
    if isinstance(answer.get("error"), str):
        raise (NotFoundError if answer.get("kind") == NOT_FOUND else KVCacheError)(answer["error"])
    if not isinstance(answer.get("ok"), dict):
        raise UnreachableError(f"{path}: the answer has neither `ok` nor `error`; is it a cache's socket?")
    return dict(answer["ok"])


def find(environ: Mapping[str, str] = os.environ) -> Iterator[Found]:
    """This user's running caches. What ended processes left behind is removed on the way."""
    for path in sockets(environ):
        if stale(path):
            with suppress(OSError):
                path.unlink()
            continue
        try:
            yield Found(path, ask(path, "info"))
        except KVCacheError as error:
            yield Found(path, {}, str(error))


def locate(address: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The socket of an address: as `kvcache ps` prints it, or a path. UnreachableError where there is none."""
    if "/" in address:
        return Path(address.removeprefix("unix:"))
    for path in sockets(environ):
        if path.stem == address:
            return path
    places = ", ".join(map(str, directories(environ)))
    raise UnreachableError(f"{address}: no such socket in {places}; `kvcache ps` lists the caches that run")

"""Asks running caches: finds their sockets, and puts a question to one."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

from kvcache.daemon.discovery import directories, sockets, stale
from kvcache.daemon.protocol import ANSWER_BYTES, NOT_FOUND, REQUEST_BYTES, FrameError, receive, send
from kvcache.errors import AccessError, ConfigError, KVCacheError, NotFoundError, UnreachableError

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


# Asks a daemon's page for figures, as a program.

HTTP_TIMEOUT_S = 30.0


def visit(
    url: str, path: str, token_file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """The answer. AccessError where the token will not do, UnreachableError where no page of ours answers."""
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"url = {url!r:.80}: expected http://HOST:PORT/ or https://HOST:PORT/")
    token = environ.get("KVCACHE_TOKEN", "") if token_file is None else token_file.read_text(encoding="utf-8").strip()
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = Request(urljoin(url if url.endswith("/") else url + "/", path), headers=headers)  # noqa: S310  checked
    try:
        with urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310  the same
            told = json.load(answer)
    except HTTPError as error:
        with error:
            said = error.read(4096).decode("utf-8", "replace")
        if error.code in {401, 403}:
            raise AccessError(f"{url}: {_why(said)}") from None
        raise UnreachableError(f"{url}: {error.code}, {_why(said)}") from None
    except (URLError, OSError, ValueError) as error:
        raise UnreachableError(f"{url}: {getattr(error, 'reason', error)}; is it a daemon's page?") from None
    if not isinstance(told, dict) or "time" not in told:
        raise UnreachableError(f"{url}: an answer that is none of ours; is it a daemon's page?")
    return told


def _why(said: str) -> str:
    try:
        return str(json.loads(said)["error"])
    except (ValueError, TypeError, KeyError):
        return "no reason was given"

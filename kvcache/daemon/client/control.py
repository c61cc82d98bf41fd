"""Finds running caches and sends commands to them, by control socket or HTTP."""

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

from kvcache.daemon.discovery import find_sockets, is_stale, socket_directories
from kvcache.daemon.protocol import (
    MAX_REPLY_BYTES,
    MAX_REQUEST_BYTES,
    NOT_FOUND,
    FrameError,
    receive_message,
    send_message,
)
from kvcache.errors import AccessError, ConfigError, KVCacheError, NotFoundError, UnreachableError

COMMAND_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class RunningCache:
    """A running cache: its socket, and its `info`; or `fault`, why it did not answer."""

    path: Path
    info: Mapping[str, Any]
    fault: str = ""

    @property
    def address(self) -> str:
        return self.path.stem


def send_command(
    path: Path, op: str, *, timeout_s: float | None = COMMAND_TIMEOUT_S, **arguments: Any
) -> dict[str, Any]:
    """Return the reply to a command.

    Raises:
        UnreachableError: The cache did not answer.
        NotFoundError: The cache has no object of the given name.
        KVCacheError: The cache refused for another reason, in its own words.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(os.fspath(path))
            send_message(connection, {"op": op, **arguments}, max_bytes=MAX_REQUEST_BYTES, timeout_s=timeout_s)
            answer = receive_message(connection, max_bytes=MAX_REPLY_BYTES, timeout_s=timeout_s)
    except (OSError, FrameError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UnreachableError(f"{path}: {reason}; `kvcache ps` lists the caches that run") from None
    if isinstance(answer.get("error"), str):
        raise (NotFoundError if answer.get("kind") == NOT_FOUND else KVCacheError)(answer["error"])
    if not isinstance(answer.get("ok"), dict):
        raise UnreachableError(
            f"{path}: the reply has neither `ok` nor `error`; check that the socket belongs to a cache"
        )
    return dict(answer["ok"])


def find_caches(environ: Mapping[str, str] = os.environ) -> Iterator[RunningCache]:
    """Yield this user's running caches; remove sockets of processes that have ended."""
    for path in find_sockets(environ):
        if is_stale(path):
            with suppress(OSError):
                path.unlink()
            continue
        try:
            yield RunningCache(path, send_command(path, "info"))
        except KVCacheError as error:
            yield RunningCache(path, {}, str(error))


def find_socket(address: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the socket of an address as `kvcache ps` prints it, or of a path; UnreachableError where there is none."""
    if "/" in address:
        return Path(address.removeprefix("unix:"))
    for path in find_sockets(environ):
        if path.stem == address:
            return path
    places = ", ".join(map(str, socket_directories(environ)))
    raise UnreachableError(f"{address}: no such socket in {places}; `kvcache ps` lists the caches that run")


# The HTTP API of a daemon.

HTTP_TIMEOUT_S = 30.0


def fetch_json(
    url: str, path: str, token_file: Path | None = None, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """Return the reply of the daemon's HTTP API.

    Raises:
        AccessError: The token is refused.
        UnreachableError: No daemon answers there.
    """
    if urlsplit(url).scheme not in {"http", "https"}:
        raise ConfigError(f"url = {url!r:.80}: expected http://HOST:PORT/ or https://HOST:PORT/")
    token = environ.get("KVCACHE_TOKEN", "") if token_file is None else token_file.read_text(encoding="utf-8").strip()
    headers = {"Accept": "application/json", **({"Authorization": f"Bearer {token}"} if token else {})}
    request = Request(urljoin(url if url.endswith("/") else url + "/", path), headers=headers)  # noqa: S310  checked
    try:
        with urlopen(request, timeout=HTTP_TIMEOUT_S) as answer:  # noqa: S310  checked
            document = json.load(answer)
    except HTTPError as error:
        with error:
            error_body = error.read(4096).decode("utf-8", "replace")
        if error.code in {401, 403}:
            raise AccessError(f"{url}: {_error_text(error_body)}") from None
        raise UnreachableError(f"{url}: {error.code}, {_error_text(error_body)}") from None
    except (URLError, OSError, ValueError) as error:
        raise UnreachableError(
            f"{url}: {getattr(error, 'reason', error)}; check that a kvcache daemon serves it"
        ) from None
    if not isinstance(document, dict) or "time" not in document:
        raise UnreachableError(f"{url}: the reply is not a kvcache daemon's; check that a kvcache daemon serves it")
    return document


def _error_text(error_body: str) -> str:
    try:
        return str(json.loads(error_body)["error"])
    except (ValueError, TypeError, KeyError):
        return "the reply gives no reason"

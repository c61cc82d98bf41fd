"""Where the sockets of running caches are: a directory of this user's alone, one socket a cache, PID-N.sock.

A socket gets its name once it listens, so that one that refuses is one whose process has ended, and may be removed.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from kvcache.errors import StoreError
from kvcache.machine import running, runtime_directories

LONGEST = 107 if sys.platform == "linux" else 103
"""Bytes of a socket's path that the system takes."""

SUFFIX, NEW = ".sock", ".new"


directories = runtime_directories
"""Where a cache of this user may have its socket."""


def prepare(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for a new socket, made where it is missing; StoreError where none will do."""
    refusals = []
    for directory in directories(environ):
        longest = directory / f"{2**22}-999{SUFFIX}{NEW}"
        if len(os.fsencode(longest)) > LONGEST:
            refusals.append(f"{directory} makes too long a path")
            continue
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            refusals.append(f"{directory}: {error.strerror}")
            continue
        if _ours(directory):
            return directory
        refusals.append(f"{directory} is not this user's alone")
    raise StoreError(f"no place for a socket: {'; '.join(refusals)}; set XDG_RUNTIME_DIR to a directory of mode 0700")


def _ours(directory: Path) -> bool:
    """A real directory that nobody else can enter; anybody may have put something else there."""
    try:
        found = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o077


def listening(directory: Path) -> tuple[socket.socket, Path]:
    """A socket of mode 0600 that listens under a free name."""
    sweep(directory)
    for number in count(1):
        path = directory / f"{os.getpid()}-{number}{SUFFIX}"
        new = path.with_name(path.name + NEW)
        if path.exists() or new.exists():
            continue
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(new))
            new.chmod(0o600)
            listener.listen(8)
            new.rename(path)
        except BaseException:
            listener.close()
            with suppress(OSError):
                new.unlink()
            raise
        return listener, path
    raise AssertionError("count ends")


def sockets(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """The sockets in all directories of this user, the oldest process first."""
    for directory in directories(environ):
        if _ours(directory):
            yield from sorted(directory.glob(f"*{SUFFIX}"), key=_order)


def _order(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.split("-") if part.isdigit())


def sweep(directory: Path) -> None:
    """Remove what ended processes left behind."""
    for path in directory.glob(f"*{SUFFIX}*"):
        if stale(path):
            with suppress(OSError):
                path.unlink()


def stale(path: Path) -> bool:
    """Whether nobody listens there, and nobody is about to."""
    if path.name.endswith(NEW):
        return not _alive(path.name.partition("-")[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
        except OSError:  # too long a path: not one of ours
            return False


def _alive(pid: str) -> bool:
    return not pid.isdecimal() or running(int(pid))

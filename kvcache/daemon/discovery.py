"""Finds and creates sockets: the control sockets of running caches, and the socket of a daemon.

Control sockets are named PID-N.sock, in a directory that only this user can enter. A socket gets its name once it
listens. A socket that refuses a connection therefore belongs to a process that has ended, and may be removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

from kvcache.errors import ConfigError, StoreError
from kvcache.machine import is_running, runtime_directories

MAX_SOCKET_PATH_BYTES = 107 if sys.platform == "linux" else 103
"""Longest socket path that the system accepts."""

SOCKET_SUFFIX, PENDING_SUFFIX = ".sock", ".new"


socket_directories = runtime_directories
"""Directories where a cache of this user may have its socket."""


def make_socket_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory for a new socket, and create it; StoreError where none is suitable."""
    refusals = []
    for directory in socket_directories(environ):
        longest = directory / f"{2**22}-999{SOCKET_SUFFIX}{PENDING_SUFFIX}"
        if len(os.fsencode(longest)) > MAX_SOCKET_PATH_BYTES:
            refusals.append(f"the path of a socket in {directory} would be too long")
            continue
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            refusals.append(f"{directory}: {error.strerror}")
            continue
        if _is_private(directory):
            return directory
        refusals.append(f"{directory} is accessible to other users")
    raise StoreError(
        f"found no directory for a socket: {'; '.join(refusals)}; set XDG_RUNTIME_DIR to a directory of mode 0700"
    )


def _is_private(directory: Path) -> bool:
    """Return whether the path is a directory, no link, that only this user can enter.

    Another user may have created something else there.
    """
    try:
        status = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077


def open_control_socket(directory: Path) -> tuple[socket.socket, Path]:
    """Return a listening socket of mode 0600, and its path."""
    remove_stale_sockets(directory)
    for number in count(1):
        path = directory / f"{os.getpid()}-{number}{SOCKET_SUFFIX}"
        new = path.with_name(path.name + PENDING_SUFFIX)
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


def find_sockets(environ: Mapping[str, str] = os.environ) -> Iterator[Path]:
    """Yield the sockets in all directories of this user, oldest process first."""
    for directory in socket_directories(environ):
        if _is_private(directory):
            yield from sorted(directory.glob(f"*{SOCKET_SUFFIX}"), key=_pid_order)


def _pid_order(path: Path) -> tuple[int, ...]:
    return tuple(int(part) for part in path.stem.split("-") if part.isdigit())


def remove_stale_sockets(directory: Path) -> None:
    """Remove sockets of processes that have ended."""
    for path in directory.glob(f"*{SOCKET_SUFFIX}*"):
        if is_stale(path):
            with suppress(OSError):
                path.unlink()


def is_stale(path: Path) -> bool:
    """Return whether no process listens there or is about to."""
    if path.name.endswith(PENDING_SUFFIX):
        return not _alive(path.name.partition("-")[0])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            return probe.connect_ex(os.fspath(path)) == errno.ECONNREFUSED
        except OSError:  # too long a path, which this module never creates
            return False


def _alive(pid: str) -> bool:
    return not pid.isdecimal() or is_running(int(pid))


# The daemon's socket: claimed by one process, and visible once it listens.

SOCKET_NAME = "kvcache.socket"
UNIX_SCHEME = "unix:"
_BACKLOG = 512
_POLL_S = 0.02


def parse_unix_address(where: str, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the path of `unix:PATH`; `unix:` alone is the user's own daemon."""
    path = where.removeprefix(UNIX_SCHEME).removeprefix("//")
    return Path(path) if path else make_socket_directory(environ) / SOCKET_NAME


class SocketClaim:
    """The exclusive right to a socket path, until `release`.

    The socket exists from `listen` until `close`. The owner releases the claim last, after it has closed its drives, so
    that the next process can open them.
    """

    def __init__(self, path: Path, mode: int, *, wait_s: float = 0.0) -> None:
        """Claim the path.

        Args:
            path: The socket's path.
            mode: The socket's mode.
            wait_s: Time to wait for another process that is ending.

        Raises:
            StoreError: Another process has the claim.
        """
        self.path, self._mode, self._pid = path.absolute(), mode, os.getpid()
        new = self.path.with_name(f"{self.path.name}.new")
        if len(os.fsencode(new)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"daemon.socket = {str(path)!r}: expected a path of at most {MAX_SOCKET_PATH_BYTES - 4} bytes"
            )
        lock = self.path.with_name(f"{self.path.name}.lock")
        try:
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"daemon.socket = {str(path)!r}: {error.strerror}; choose another directory") from None
        if not _try_lock(self._lock, wait_s):
            owner = os.pread(self._lock, 64, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise StoreError(f"{path}: process {owner or 'unknown'} serves it; connect to unix:{path}") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(self._pid).encode(), 0)
        self._new = new
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def listen(self) -> None:
        """Listen, and make the socket visible under its path."""
        try:
            with suppress(FileNotFoundError):
                self._new.unlink()
            self.listener.bind(os.fspath(self._new))
            self._new.chmod(self._mode)
            self.listener.listen(_BACKLOG)
            self.listener.setblocking(False)
            self._new.rename(self.path)
        except OSError as error:
            raise StoreError(f"daemon.socket = {str(self.path)!r}: {error.strerror or error}") from None

    def admits(self, user: int) -> bool:
        """Return whether the user may connect.

        The socket's mode decides; mode 600 is also checked against the user id, because a file's mode can be changed.
        """
        return bool(self._mode & 0o077) or user in (0, os.geteuid())

    def unlink_socket(self) -> None:
        """Remove the socket's path, so that new clients do not find it. Idempotent."""
        if self._pid == os.getpid():
            with suppress(OSError):
                self.path.unlink()

    def close(self) -> None:
        """Remove the path and stop listening. Idempotent."""
        self.unlink_socket()
        self.listener.close()

    def release(self) -> None:
        """Close, and let another process claim the path. Idempotent."""
        self.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _try_lock(descriptor: int, wait_s: float) -> bool:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        else:
            return True

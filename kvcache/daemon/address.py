"""Where a daemon listens: a Unix socket that one process claims, and that is there once it answers."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from kvcache.daemon.control.place import LONGEST, prepare
from kvcache.errors import ConfigError, StoreError

NAME = "kvcache.socket"
SCHEME = "unix:"
_BACKLOG = 512
_LOOK_S = 0.02


def socket_of(where: str, environ: Mapping[str, str] = os.environ) -> Path:
    """The path that `unix:PATH` names; `unix:` alone is the user's own daemon."""
    path = where.removeprefix(SCHEME).removeprefix("//")
    return Path(path) if path else prepare(environ) / NAME


class Claim:
    """The right to a socket, until `release`. StoreError where another process has it. It is there after `listen`,
    which is for when there is something to serve, until `close`: whoever has the claim after that has it alone with
    what else the process before had."""

    def __init__(self, path: Path, mode: int, *, wait_s: float = 0.0) -> None:
        """`wait_s`: for another process that is ending."""
        self.path, self._mode, self._pid = path.absolute(), mode, os.getpid()
        new = self.path.with_name(f"{self.path.name}.new")
        if len(os.fsencode(new)) > LONGEST:
            raise ConfigError(f"daemon.socket = {str(path)!r}: expected a path of at most {LONGEST - 4} bytes")
        lock = self.path.with_name(f"{self.path.name}.lock")
        try:
            self._lock = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(f"daemon.socket = {str(path)!r}: {error.strerror}; choose another directory") from None
        if not _locked(self._lock, wait_s):
            owner = os.pread(self._lock, 64, 0).decode(errors="replace").strip()
            os.close(self._lock)
            raise StoreError(f"{path}: process {owner or 'unknown'} serves it; connect to unix:{path}") from None
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, str(self._pid).encode(), 0)
        self._new = new
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def listen(self) -> None:
        """Be found under the path from now on."""
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
        """The socket's mode decides; that of the owner alone is checked once more, since modes can be changed."""
        return bool(self._mode & 0o077) or user in (0, os.geteuid())

    def hide(self) -> None:
        """Nobody finds it any more. Idempotent."""
        if self._pid == os.getpid():
            with suppress(OSError):
                self.path.unlink()

    def close(self) -> None:
        """Nobody comes any more. Idempotent."""
        self.hide()
        self.listener.close()

    def release(self) -> None:
        """Let another process have it. Idempotent."""
        self.close()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def _locked(descriptor: int, wait_s: float) -> bool:
    end = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                return False
            time.sleep(_LOOK_S)
        else:
            return True

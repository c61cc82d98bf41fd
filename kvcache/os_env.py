"""The operating system as an interface: disk, clock and executor.

A simulation replaces them, so that one seed decides everything. The packages of higher layers use files, time and
threads only through this module.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol

Buffer = memoryview
_FALLOCATE = hasattr(os, "posix_fallocate")


class File(Protocol):
    """An open file. Offsets, lengths and buffers are multiples of 4,096 where `direct` is true."""

    direct: bool

    def read(self, offset: int, buffers: Sequence[Buffer]) -> int:
        """Fill the buffers in order, from `offset`. Returns the bytes read: fewer only at the end of the file."""

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write all buffers at `offset`, or raise OSError."""

    def size(self) -> int: ...
    def truncate(self, size_bytes: int) -> None: ...
    def allocate(self, size_bytes: int) -> None:
        """Reserve disk space for later writes within this size. Raises OSError ENOSPC where there is none."""

    def sync(self) -> None:
        """Return once all earlier writes are on the medium."""

    def close(self) -> None: ...


class Disk(Protocol):
    """A directory tree of files."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        """Open for reading and writing. `direct` requests O_DIRECT; `File.direct` says whether the file has it."""

    def lock(self, path: str, note: str) -> Callable[[], None] | str:
        """Lock a path for this process; return the function that unlocks it, or the note of the holding process."""

    def make_directory(self, path: str) -> None: ...
    def list(self, path: str) -> list[str]: ...
    def rename(self, source: str, target: str) -> None:
        """Rename atomically; durable after `sync_directory` of the parent."""

    def remove(self, path: str) -> None: ...
    def sync_directory(self, path: str) -> None: ...
    def free_bytes(self, path: str) -> int: ...


class Clock(Protocol):
    def now(self) -> float:
        """Return monotonic seconds, for deadlines and ages."""

    def wall(self) -> float:
        """Return seconds since 1970, for expiry and for output."""


class Executor(Protocol):
    """Runs calls on a bounded number of threads."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]: ...
    def close(self) -> None:
        """Run all submitted calls, then end the threads."""


class LocalFile:
    """A file of the operating system, with O_DIRECT where the file system has it."""

    def __init__(self, descriptor: int, direct: bool) -> None:
        self._descriptor = descriptor
        self.direct = direct

    def read(self, offset: int, buffers: Sequence[Buffer]) -> int:
        done, total = 0, sum(map(len, buffers))
        while done < total:
            got = os.preadv(self._descriptor, _remaining_buffers(buffers, done), offset + done)
            if got == 0:
                break
            done += got
        return done

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        done, total = 0, sum(map(len, buffers))
        while done < total:
            done += os.pwritev(self._descriptor, _remaining_buffers(buffers, done), offset + done)

    def size(self) -> int:
        return os.fstat(self._descriptor).st_size

    def truncate(self, size_bytes: int) -> None:
        os.ftruncate(self._descriptor, size_bytes)

    def allocate(self, size_bytes: int) -> None:
        if _FALLOCATE:
            os.posix_fallocate(self._descriptor, 0, size_bytes)
        else:  # macOS: the file is sparse, and a full disk fails the later write
            os.ftruncate(self._descriptor, size_bytes)

    def sync(self) -> None:
        getattr(os, "fdatasync", os.fsync)(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)


def _remaining_buffers(buffers: Sequence[Buffer], done: int) -> list[Buffer]:
    """Return the buffers after `done` bytes, at most as many as one system call takes."""
    remaining: list[Buffer] = []
    for buffer in buffers:
        if done >= len(buffer):
            done -= len(buffer)
            continue
        remaining.append(buffer[done:] if done else buffer)
        done = 0
        if len(remaining) == 1024:  # IOV_MAX
            break
    return remaining


class LocalDisk:
    """The operating system's files."""

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        flags = os.O_RDWR | getattr(os, "O_CLOEXEC", 0) | (os.O_CREAT if create else 0)
        if direct and hasattr(os, "O_DIRECT"):
            try:
                return LocalFile(os.open(path, flags | os.O_DIRECT, 0o600), True)
            except OSError as error:
                if error.errno != 22:  # EINVAL: this file system has no O_DIRECT
                    raise
        return LocalFile(os.open(path, flags, 0o600), False)

    def lock(self, path: str, note: str) -> Callable[[], None] | str:
        import fcntl

        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 4096, 0).decode(errors="replace").strip()
            os.close(descriptor)
            return owner
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, note.encode(), 0)
        return lambda: os.close(descriptor)

    def make_directory(self, path: str) -> None:
        os.makedirs(path, mode=0o700, exist_ok=True)

    def list(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def rename(self, source: str, target: str) -> None:
        os.replace(source, target)

    def remove(self, path: str) -> None:
        os.unlink(path)

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def free_bytes(self, path: str) -> int:
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ThreadExecutor:
    """A bounded pool of named threads. Callers bound its queue: they count the calls in flight.

    The constructor starts all threads, because `submit` often runs on an engine's scheduler thread, which a thread
    start would delay.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=f"kvcache-{name}")
        started = threading.Event()
        try:
            for _ in range(threads):  # a waiting call occupies its thread, so the next one starts another thread
                self._pool.submit(started.wait)
        finally:
            started.set()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        return self._pool.submit(call)

    def close(self) -> None:
        self._pool.shutdown(wait=True)


class InlineExecutor:
    """Runs each call within `submit`, for tests and single-threaded simulation."""

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(call())
        except Exception as error:  # noqa: BLE001  boundary to foreign code: the future carries the error, as in a thread pool
            future.set_exception(error)
        return future

    def close(self) -> None:
        pass


def _thread_executor(count: int, name: str) -> Executor:
    return ThreadExecutor(count, name)


@dataclass(frozen=True)
class OsEnv:
    """Disk, clock, executor and condition variables. `executor(threads, name)` makes an executor."""

    disk: Disk = field(default_factory=LocalDisk)
    clock: Clock = field(default_factory=SystemClock)
    executor: Callable[[int, str], Executor] = _thread_executor
    condition: Callable[[], threading.Condition] = threading.Condition

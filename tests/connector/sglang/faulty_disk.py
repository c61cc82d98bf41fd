"""A drive that hangs, fails or is full when a test says so."""

from __future__ import annotations

import errno
import threading
from collections.abc import Sequence
from typing import Any, cast

from kvcache.os_env import File, LocalDisk


class FaultyDisk(LocalDisk):
    def __init__(self) -> None:
        self.going = threading.Event()
        self.going.set()
        self.error: int | None = None

    def open(self, path: str, *, create: bool = False, direct: bool = False) -> File:
        return cast(File, FaultyFile(self, super().open(path, create=create, direct=direct)))

    def hang(self) -> None:
        """Every read and write waits from now on, until `go`."""
        self.going.clear()

    def go(self) -> None:
        self.going.set()


class FaultyFile:
    def __init__(self, drive: FaultyDisk, file: File) -> None:
        self._drive, self._file = drive, file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, offset: int, buffers: Sequence[memoryview]) -> int:
        self._drive.going.wait()
        return self._file.read(offset, buffers)

    def write(self, offset: int, buffers: Sequence[memoryview]) -> None:
        self._drive.going.wait()
        if self._drive.error is not None:
            raise OSError(self._drive.error, "said the test")
        self._file.write(offset, buffers)

    def allocate(self, size_bytes: int) -> None:
        if self._drive.error == errno.ENOSPC:
            raise OSError(errno.ENOSPC, "said the test")
        self._file.allocate(size_bytes)

"""The directory of a store: its lock, its format version, and the names of its files.

LOCK            locked by the owning process while it runs; its text names the process
FORMAT          one line: the format and its version
journal-N       entries, see `journal.py`
checkpoint-N    the state in which journal-N begins
segment-NNNNNN  slots, see `segment.py`
"""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable
from contextlib import suppress

from kvcache.errors import StoreError
from kvcache.os_env import Disk, File

VERSION = 1
_FORMAT = f"kvcache-nvme {VERSION}\n"
_NAME = re.compile(r"(journal|checkpoint|segment)-(\d{1,18})(\.tmp)?")
_ADVICE = {
    errno.EACCES: "give this user permission to write there or choose another directory",
    errno.EPERM: "give this user permission to write there or choose another directory",
    errno.EROFS: "the file system is read-only: remount it or choose another directory",
    errno.ENOSPC: "the file system is full: free space or choose another directory",
    errno.EDQUOT: "the quota is exceeded: free space or choose another directory",
    errno.ENOTDIR: "choose a directory",
    errno.EEXIST: "choose a directory",
}


def directory_error(path: str, error: OSError) -> StoreError:
    """Return the error for a directory that cannot be used, with advice for the operator."""
    advice = _ADVICE.get(error.errno or 0, "check the drive, or choose another directory")
    return StoreError(f"nvme directory {path}: {error.strerror or error}; {advice}")


class Directory:
    """The directory of a store, locked by this process until `release`."""

    def __init__(self, disk: Disk, path: str, served_address: str = "") -> None:
        """Lock the directory, and create FORMAT where it is empty.

        Args:
            served_address: where others reach this process's cache; shown to a process that wants the same directory.

        Raises:
            StoreError: the directory cannot be used, is in use, or holds something else.
        """
        self.disk, self.path = disk, path
        try:
            disk.make_directory(path)
            claim = disk.lock(
                self.join("LOCK"), f"process {os.getpid()}{', which serves ' * bool(served_address)}{served_address}"
            )
        except OSError as error:
            raise directory_error(path, error) from error
        if isinstance(claim, str):
            raise StoreError(
                f"nvme directory {path}: in use by {claim or 'another process'}; end it or choose another directory"
            )
        self.release = claim
        try:
            self._check_format()
        except BaseException:
            claim()
            raise

    def _check_format(self) -> None:
        try:
            there = self.disk.list(self.path)
            if "FORMAT" not in there:
                strangers = [name for name in there if name not in {"LOCK", "FORMAT.tmp", "lost+found"}]
                if strangers:
                    raise StoreError(
                        f"nvme directory {self.path}: holds {strangers[0]!r} but no FORMAT file, so it is no store; "
                        "choose an empty directory"
                    )
                self.write("FORMAT", [_FORMAT.encode()])
            found = self.read("FORMAT")
        except OSError as error:
            raise directory_error(self.path, error) from error
        if found != _FORMAT.encode():
            raise StoreError(
                f"nvme directory {self.path}: FORMAT says {bytes(found[:40])!r}, this version reads "
                f"{_FORMAT.encode()!r}; open it with the version that wrote it or choose another directory"
            )

    def join(self, name: str) -> str:
        return os.path.join(self.path, name)

    def file_numbers(self, noun: str) -> list[int]:
        """Return the numbers of the files named `noun`-N, ascending."""
        found = (_NAME.fullmatch(name) for name in self.disk.list(self.path))
        return sorted(int(match[2]) for match in found if match and match[1] == noun and not match[3])

    def unfinished(self) -> list[str]:
        """Return the files that were being written when their process ended; nothing refers to them."""
        return [name for name in self.disk.list(self.path) if name.endswith(".tmp")]

    def read(self, name: str) -> bytearray:
        """Read a whole file.

        Raises:
            OSError: fewer bytes could be read than the file has; no writer leaves such a file.
        """
        file = self.disk.open(self.join(name))
        try:
            data = bytearray(file.size())
            got = file.read(0, [memoryview(data)]) if data else 0
        finally:
            file.close()
        if got != len(data):
            raise OSError(errno.EIO, f"{name} has {len(data)} bytes, {got} could be read")
        return data

    def write(self, name: str, parts: Iterable[bytes]) -> None:
        """Write a whole file durably; it gets its name only after its bytes are on the medium."""
        self.create(name, parts).close()
        self.sync()

    def create(self, name: str, parts: Iterable[bytes]) -> File:
        """Write a whole file, and return it open. It gets its name only after its bytes are on the medium.

        The name itself is durable after `sync`.

        Raises:
            OSError: the file did not get the name.
        """
        temporary = self.join(name + ".tmp")
        file = None
        try:
            file = self.disk.open(temporary, create=True)
            file.truncate(0)
            at = 0
            for part in parts:
                file.write(at, [memoryview(part)])
                at += len(part)
            file.sync()
            self.disk.rename(temporary, self.join(name))
        except OSError:
            with suppress(OSError):
                if file is not None:
                    file.close()
                self.disk.remove(temporary)
            raise
        return file

    def sync(self) -> None:
        """Return when every name in the directory is on the medium.

        A system that cannot write names stops writing altogether. So, unlike with file data, a second sync does not
        report success for names that the first one lost.
        """
        self.disk.sync_directory(self.path)

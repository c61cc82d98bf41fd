"""A store's directory: whose it is, in which format, and what its files are called.

LOCK            held by the owner while it runs; names its process
FORMAT          one line: what wrote this and in which version
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
    errno.ENOSPC: "the file system is full: free some room or choose another directory",
    errno.EDQUOT: "the quota is used up: free some room or choose another directory",
    errno.ENOTDIR: "choose a directory",
    errno.EEXIST: "choose a directory",
}


def directory_error(path: str, error: OSError) -> StoreError:
    """What to tell the operator about a directory that cannot be used."""
    advice = _ADVICE.get(error.errno or 0, "see whether the drive is well, or choose another directory")
    return StoreError(f"nvme directory {path}: {error.strerror or error}; {advice}")


class Directory:
    """The directory, claimed for this process until `release`. StoreError where that cannot be."""

    def __init__(self, disk: Disk, path: str, served_address: str = "") -> None:
        """`serves`: where others reach this process's cache, to be told to whoever wants the directory too."""
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
        """The numbers of the files called `noun`-N, ascending."""
        found = (_NAME.fullmatch(name) for name in self.disk.list(self.path))
        return sorted(int(match[2]) for match in found if match and match[1] == noun and not match[3])

    def unfinished(self) -> list[str]:
        """Files that were being written when their process ended; nothing refers to them."""
        return [name for name in self.disk.list(self.path) if name.endswith(".tmp")]

    def read(self, name: str) -> bytearray:
        """All of a file. OSError where less can be read than there is: that is no end that a writer left."""
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
        """A whole file, under its name only once it is on the medium, and there for good when this returns."""
        self.create(name, parts).close()
        self.sync()

    def create(self, name: str, parts: Iterable[bytes]) -> File:
        """A whole file, under its name only once it is on the medium. OSError: it does not have the name. The name is
        there for good after `sync`."""
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
        """Return when every name in the directory is on the medium. A system that cannot write names stops writing
        altogether, so that, unlike with a file's bytes, a second sync does not say yes to what the first one lost."""
        self.disk.sync_directory(self.path)

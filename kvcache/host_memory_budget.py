"""One budget of host memory for all caches of this user on this node, across processes and ranks.

Each open cache has a claim: a file in the user's runtime directory with the size of its memory. The process holds a
lock on the file while it lives, so the claim of a dead process ends without cleanup. Without a runtime directory each
process decides alone.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from kvcache.machine import runtime_directories

CLAIMS_FOLDER = "memory"
_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE")
"""Variables by which launchers of a job state its number of processes on this node."""

ReleaseClaim = Callable[[], None]
"""Releases a claim; idempotent."""


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this job's processes on this node; 1 without a launcher's variable."""
    given = (environ.get(name, "") for name in _RANKS)
    return max((int(value) for value in given if value.isdigit()), default=1) or 1


def claimed_bytes() -> int:
    """Return the bytes claimed by all open caches of this user, in any process."""
    return sum(size for folder in _folders() for size in _claims(folder))


@contextmanager
def budget_lock() -> Iterator[Callable[[int], ReleaseClaim]]:
    """Hold the budget's lock, so that no other process sizes its cache, and yield the function that claims bytes."""
    folders = _folders(make=True)
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(folders[0] / "LOCK", "w", encoding="ascii"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (IndexError, OSError):  # no directory, or a full or read-only one
            folders = []
        yield lambda size: _claim(folders[0], size) if folders else lambda: None


def _folders(*, make: bool = False) -> list[Path]:
    """Return the folder of claims: that in the first directory that only this user can access; else nothing."""
    for directory in runtime_directories():
        with suppress(OSError):
            if make:
                directory.mkdir(mode=0o700, exist_ok=True)
            if directory.is_symlink() or directory.stat().st_uid != os.geteuid() or directory.stat().st_mode & 0o077:
                continue
            if make:
                (directory / CLAIMS_FOLDER).mkdir(mode=0o700, exist_ok=True)
            if (directory / CLAIMS_FOLDER).is_dir():
                return [directory / CLAIMS_FOLDER]
    return []


def _claims(folder: Path) -> Iterator[int]:
    """Yield the bytes of each live process's claim, and remove claims of dead processes."""
    for path in folder.glob("*-*"):
        with suppress(OSError, ValueError), path.open(encoding="ascii") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                yield int(file.read() or 0)
            else:
                path.unlink()


def _claim(folder: Path, size_bytes: int) -> ReleaseClaim:
    for number in count(1):
        path = folder / f"{os.getpid()}-{number}"
        try:
            # O_CLOEXEC: a child that executes another program must not keep the claim
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC)
        except FileExistsError:
            continue
        except OSError:
            return lambda: None
        break
    descriptors = [descriptor]
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, b"%d" % size_bytes)

    def release() -> None:
        if descriptors:
            with suppress(OSError):
                path.unlink()
            os.close(descriptors.pop())

    return release

"""One sum of host memory for all caches of this user on this node, however many processes and ranks there are.

Each cache that is open in a process has a file in the user's runtime directory that says how much it took, locked for
as long as the process lives. So what a dead one had comes back by itself, however it died. Where there is no such
directory each process is on its own.
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
"""Variables by which those who start several processes for one job say how many there are on this node."""

ReleaseClaim = Callable[[], None]
"""Gives back what was claimed; idempotent."""


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """How many processes of this job there are on this node; 1 where nobody says."""
    given = (environ.get(name, "") for name in _RANKS)
    return max((int(value) for value in given if value.isdigit()), default=1) or 1


def claimed_bytes() -> int:
    """What caches that are open now have, in whatever process of this user."""
    return sum(size for folder in _folders() for size in _claims(folder))


@contextmanager
def budget_lock() -> Iterator[Callable[[int], ReleaseClaim]]:
    """While this lasts no other process decides how much to take. Gives what claims the bytes that were decided on."""
    folders = _folders(make=True)
    with ExitStack() as stack:
        try:
            lock = stack.enter_context(open(folders[0] / "LOCK", "w", encoding="ascii"))
            fcntl.flock(lock, fcntl.LOCK_EX)
        except (IndexError, OSError):  # no directory, or a full or a read-only one
            folders = []
        yield lambda size: _claim(folders[0], size) if folders else lambda: None


def _folders(*, make: bool = False) -> list[Path]:
    """Where claims are, or may be made: the first directory of this user's alone."""
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
    """The bytes of each claim whose owner lives; those of the dead are removed."""
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
            # the descriptor is closed in a child that executes another program, so the claim is this process's alone
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

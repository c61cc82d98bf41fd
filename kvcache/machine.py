"""Limits of this machine or container: memory, disk space, cache directories, processes.

The settings read them once. `root` is the root of the file system, so that tests can supply other machines.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
_MEMORY_KINDS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that this process may use."""

    allowed_bytes: int  # the machine's memory, or a cgroup's smaller limit
    free_bytes: int  # of these, not in use; page cache counts as free
    bound: str  # "machine" or "cgroup": the source of `allowed_bytes`


def memory(root: Path = _ROOT) -> Memory:
    total, free = _machine_memory(root)
    bound = "machine"
    for limit, used in _cgroups(root):
        if limit < total:
            total, bound = limit, "cgroup"
        free = min(free, max(0, limit - used))
    return Memory(total, min(free, total), bound)


def _machine_memory(root: Path) -> tuple[int, int]:
    lines = _read_text(root / "proc/meminfo").splitlines()
    table = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if ":" in line}
    if "MemTotal" in table:
        return table["MemTotal"], table.get("MemAvailable", table.get("MemFree", table["MemTotal"]))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS reports no more
    return total, total


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, bytes in use without page cache) of each limited cgroup of this process, v2 and v1."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # In a container the path may be the host's and missing here; the mount's top is then this process's cgroup.
        directory = top / inner.lstrip("/")
        for folder in (directory, *directory.parents):
            limit, used = _read_text(folder / names[0]).strip(), _read_text(folder / names[1]).strip()
            if limit.isdigit() and used.isdigit():
                yield int(limit), max(0, int(used) - _statistic(folder / "memory.stat", names[2]))
            if folder == top:
                break


def _statistic(path: Path, name: str) -> int:
    for line in _read_text(path).splitlines():
        if line.split(" ", 1)[0] == name:
            return int(line.split()[1])
    return 0


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of this user's caches: $KVCACHE_DIR, else `kvcache` in $XDG_CACHE_HOME or ~/.cache."""
    if environ.get("KVCACHE_DIR"):
        return Path(environ["KVCACHE_DIR"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvcache"


def runtime_directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Return directories for files that live as long as a process of this user, the first choice first.

    A directory may be missing. Any user may have created another file at its path, so the caller must check it.
    """
    user = os.geteuid()
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(runtime, "kvcache")] if os.path.isabs(runtime) else []
    candidates += [Path(folder, f"kvcache-{user}") for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108  callers check
    return list(dict.fromkeys([*candidates, Path(f"/run/user/{user}/kvcache")]))


def disk_free_bytes(path: Path) -> int:
    """Return the free bytes of the file system that would hold `path`, which need not exist."""
    return shutil.disk_usage(_nearest_existing(path)).free


def disk_used_bytes(path: Path) -> int:
    """Return the disk space of the files directly in `path`; 0 where it is missing or unreadable."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries if entry.is_file())
    except OSError:
        return 0


def is_memory_backed(path: Path, root: Path = _ROOT) -> bool:
    """Return whether the file system that would hold `path` is memory; False where unknown."""
    return file_system(path, root) in _MEMORY_KINDS


def file_system(path: Path, root: Path = _ROOT) -> str:
    """Return the kind of the file system that would hold `path`: "ext4", "overlay"; "" where unknown."""
    directory = os.path.realpath(_nearest_existing(path))
    kind, longest = "", -1
    for line in _read_text(root / "proc/self/mounts").splitlines():
        _, mount, this, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if os.path.commonpath((directory, mount)) == mount and len(mount) >= longest:  # the last mount at a path counts
            kind, longest = this, len(mount)
    return kind


def is_running(process: int) -> bool:
    """Return whether a process of this id runs. A zombie does not.

    Zombies stay for good in a container whose first process does not reap its children.
    """
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # a process of another user
        pass
    state = _read_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return state[:1] not in (["Z"], ["X"])


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not os.path.exists(path):
        path = path.parent
    return path


def _read_text(path: Path) -> str:
    """Return the text of a file; "" where it is missing or a sandbox hides it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

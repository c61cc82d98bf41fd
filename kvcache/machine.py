"""What this machine, or the container around this process, allows: memory, room on disk, where caches go.

Read once, when settings are made. `root` stands for the file system, so that tests can bring machines of their own.
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
    """`allowed_bytes`: all of the machine's, or what a cgroup leaves of it; `free_bytes`: what of that is not in use,
    page cache counted as free."""

    allowed_bytes: int
    free_bytes: int
    bound: str  # "machine" or "cgroup": which of them decides `allowed_bytes`


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
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # macOS tells no more
    return total, total


def _cgroups(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use without page cache) of each cgroup around this process that has a limit, v2 and v1."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        # Within a container the path may be the host's, and not there: then the mount's top is ours.
        place = top / inner.lstrip("/")
        for folder in (place, *place.parents):
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
    """Where this user's caches go: $KVCACHE_DIR, else `kvcache` in $XDG_CACHE_HOME, else in ~/.cache."""
    if environ.get("KVCACHE_DIR"):
        return Path(environ["KVCACHE_DIR"]).expanduser().absolute()
    base = environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "kvcache"


def runtime_directories(environ: Mapping[str, str] = os.environ) -> list[Path]:
    """Where a process of this user may leave what lasts as long as it, the first choice first. None need be there, and
    anybody may have put something else there."""
    user = os.geteuid()
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    candidates = [Path(runtime, "kvcache")] if os.path.isabs(runtime) else []
    candidates += [Path(folder, f"kvcache-{user}") for folder in (tempfile.gettempdir(), "/tmp")]  # noqa: S108  users check
    return list(dict.fromkeys([*candidates, Path(f"/run/user/{user}/kvcache")]))


def disk_free_bytes(path: Path) -> int:
    """Free on the file system that would hold `path`, which need not exist."""
    return shutil.disk_usage(_nearest_existing(path)).free


def disk_used_bytes(path: Path) -> int:
    """Disk room of the files right in `path`; 0 where it is not there, or not ours to read."""
    try:
        with os.scandir(path) as entries:
            return sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in entries if entry.is_file())
    except OSError:
        return 0


def is_memory_backed(path: Path, root: Path = _ROOT) -> bool:
    """Whether the file system that would hold `path` is memory; False where the system does not tell."""
    return file_system(path, root) in _MEMORY_KINDS


def file_system(path: Path, root: Path = _ROOT) -> str:
    """The kind of the file system that would hold `path`: "ext4", "overlay"; "" where the system does not tell."""
    place = os.path.realpath(_nearest_existing(path))
    kind, longest = "", -1
    for line in _read_text(root / "proc/self/mounts").splitlines():
        _, mount, this, *_ = line.split(" ")
        mount = mount.replace("\\040", " ")
        if os.path.commonpath((place, mount)) == mount and len(mount) >= longest:  # the last mount on a place counts
            kind, longest = this, len(mount)
    return kind


def is_running(process: int) -> bool:
    """Whether a process of this number runs. One that has ended and that nobody has waited for does not: where a
    container's first process waits for nobody, such are there for good."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # somebody else's
        pass
    state = _read_text(Path(f"/proc/{process}/stat")).rpartition(")")[2].split()
    return state[:1] not in (["Z"], ["X"])


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not os.path.exists(path):
        path = path.parent
    return path


def _read_text(path: Path) -> str:
    """What is there to read; nothing where there is nothing, or where a sandbox hides it."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""

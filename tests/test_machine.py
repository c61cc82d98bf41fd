"""What a machine allows, told from the files that Linux shows: machines of our own under a temporary root."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvcache.machine import (
    cache_directory,
    disk_free_bytes,
    disk_used_bytes,
    file_system,
    is_memory_backed,
    is_running,
    memory,
)

GiB = 1 << 30


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def meminfo(total: int, available: int) -> str:
    return f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {available >> 10} kB"


def test_a_bare_machine_is_limited_by_its_memory(tmp_path: Path) -> None:
    found = memory(write(tmp_path, {"proc/meminfo": meminfo(64 * GiB, 40 * GiB)}))
    assert (found.allowed_bytes, found.free_bytes, found.bound) == (64 * GiB, 40 * GiB, "machine")


def test_the_tightest_cgroup_around_us_decides(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": meminfo(64 * GiB, 40 * GiB),
        "proc/self/cgroup": "0::/pod/inner",
        "sys/fs/cgroup/pod/memory.max": 8 * GiB,
        "sys/fs/cgroup/pod/memory.current": 7 * GiB,
        "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {3 * GiB}",
        "sys/fs/cgroup/pod/inner/memory.max": "max",
        "sys/fs/cgroup/pod/inner/memory.current": GiB,
    }
    found = memory(write(tmp_path, files))
    assert (found.allowed_bytes, found.free_bytes, found.bound) == (8 * GiB, 4 * GiB, "cgroup")


def test_a_cgroup_of_the_first_version_seen_from_within(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": meminfo(64 * GiB, 40 * GiB),
        "proc/self/cgroup": "5:cpuset:/x\n4:memory:/docker/not-visible-here\n0::/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 2 * GiB,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": 3 * GiB,
        "sys/fs/cgroup/memory/memory.stat": f"total_inactive_file {GiB // 2}",
    }
    found = memory(write(tmp_path, files))
    assert (found.allowed_bytes, found.free_bytes, found.bound) == (2 * GiB, 0, "cgroup")


def test_an_unlimited_cgroup_sets_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": meminfo(4 * GiB, 3 * GiB),
        "proc/self/cgroup": "4:memory:/",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
        "sys/fs/cgroup/memory/memory.usage_in_bytes": GiB,
    }
    found = memory(write(tmp_path, files))
    assert (found.allowed_bytes, found.free_bytes, found.bound) == (4 * GiB, 3 * GiB, "machine")


def test_this_machine_reports_plausible_limits() -> None:
    found = memory()
    assert 0 < found.free_bytes <= found.allowed_bytes


def test_the_last_mount_over_a_path_decides_its_kind(tmp_path: Path) -> None:
    disk, shadowed = tmp_path / "a disk", tmp_path / "twice"
    disk.mkdir()
    shadowed.mkdir()
    mounts = f"dev / ext4 rw\ntmpfs {tmp_path} tmpfs rw\ndev {str(disk).replace(' ', chr(92) + '040')} xfs rw\n"
    mounts += f"dev {shadowed} ext4 rw\nnone {shadowed} tmpfs rw"
    root = write(tmp_path / "root", {"proc/self/mounts": mounts})
    assert is_memory_backed(tmp_path / "not" / "there", root)
    assert not is_memory_backed(disk / "x", root)
    assert is_memory_backed(shadowed, root)
    assert not is_memory_backed(Path("/"), root)
    assert not is_memory_backed(tmp_path, tmp_path / "no mounts here")
    kinds = [file_system(place, root) for place in (disk / "x", shadowed, Path("/"))]
    assert kinds == ["xfs", "tmpfs", "ext4"]
    assert file_system(tmp_path, tmp_path / "no mounts here") == ""


def test_room_on_disk(tmp_path: Path) -> None:
    missing = tmp_path / "not" / "there"
    assert disk_free_bytes(missing) > 0
    assert disk_used_bytes(missing) == 0
    (tmp_path / "segment").write_bytes(b"x" * 100_000)
    (tmp_path / "folder").mkdir()
    assert 100_000 <= disk_used_bytes(tmp_path) < 300_000


def test_where_caches_go(tmp_path: Path) -> None:
    assert cache_directory({"KVCACHE_DIR": str(tmp_path)}) == tmp_path
    assert cache_directory({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "kvcache"
    assert cache_directory({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "kvcache"
    assert cache_directory({}) == Path.home() / ".cache" / "kvcache"


def test_a_zombie_process_does_not_run() -> None:
    assert is_running(os.getpid())
    assert not is_running(1 << 70)
    child = os.posix_spawn(sys.executable, [sys.executable, "-S", "-c", ""], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and can be waited for still
    assert not is_running(child)
    os.waitpid(child, 0)

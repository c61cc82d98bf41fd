"""Is there the memory that the settings ask for, and may it be pinned and shared?"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator

from kvcache.cli.doctor.finding import Finding, ok, warn
from kvcache.machine import Memory, memory
from kvcache.settings import Settings
from kvcache.settings.types import GiB, show_bytes

SHARED = "/dev/shm"  # noqa: S108  its size is asked for, nothing is written
SHARED_BYTES = GiB  # a container's default is 64 MiB


def checks(settings: Settings) -> Iterator[Finding]:
    yield capacity(memory(), settings.host.capacity_bytes)
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    yield locked(None if limit == resource.RLIM_INFINITY else limit, settings.host.capacity_bytes)
    try:
        shared = os.statvfs(SHARED)
    except OSError:
        yield shared_memory(None)
    else:
        yield shared_memory(shared.f_blocks * shared.f_frsize)


def capacity(now: Memory, wanted_bytes: int) -> Finding:
    whose = "a cgroup allows" if now.bound == "cgroup" else "the machine has"
    found = (
        f"host.capacity_bytes = {show_bytes(wanted_bytes)}; {whose} {show_bytes(now.allowed_bytes)}, "
        f"{show_bytes(now.free_bytes)} of it free"
    )
    if wanted_bytes > now.allowed_bytes:
        return Finding("memory", "fail", found, "lower host.capacity_bytes, or allow the process more memory")
    if wanted_bytes > now.free_bytes:
        return warn("memory", found, "fine if a running cache has it; else lower host.capacity_bytes or end others")
    return ok("memory", found)


def locked(limit_bytes: int | None, wanted_bytes: int) -> Finding:
    """None: no limit."""
    if limit_bytes is None:
        return ok("locked memory", "no limit")
    found = f"{show_bytes(limit_bytes)} may be locked; host.capacity_bytes = {show_bytes(wanted_bytes)}"
    if limit_bytes >= wanted_bytes:
        return ok("locked memory", found)
    return warn(
        "locked memory",
        found,
        "matters where host memory is pinned for a GPU: `ulimit -l unlimited`, LimitMEMLOCK=infinity for a service, "
        "--ulimit memlock=-1 for a container",
    )


def shared_memory(size_bytes: int | None) -> Finding:
    """None: there is none."""
    if size_bytes is None:
        remedy = "engines of several processes exchange data there: mount a tmpfs on it"
        return warn("shared memory", f"{SHARED} is not there", remedy)
    found = f"{SHARED} has {show_bytes(size_bytes)}"
    if size_bytes >= SHARED_BYTES:
        return ok("shared memory", found)
    return warn(
        "shared memory",
        found,
        f"engines of several processes exchange data there and want {show_bytes(SHARED_BYTES)} or more: "
        "--shm-size or --ipc=host for a container",
    )

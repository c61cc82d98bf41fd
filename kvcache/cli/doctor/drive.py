"""Is the place of the NVMe tier a drive, does it go around the page cache, and how fast is it?

The rates are those of one thread and large pieces, over at most 256 MiB and a few seconds each: enough to tell a local
drive from a network's or a container's, and no benchmark.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from kvcache.cli.doctor.finding import Finding, fail, ok, warn
from kvcache.machine import file_system, in_memory
from kvcache.os_env import Clock, Disk, LocalDisk, SystemClock
from kvcache.settings import Settings
from kvcache.settings.types import MiB, show_bytes

TOTAL_BYTES = 256 * MiB
LEAST_BYTES = 16 * MiB
PIECE_BYTES = 4 * MiB
MOST_S = 5.0
SLOW = 500 * MiB  # a second
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "glusterfs")


def checks(settings: Settings, place: Path, path: Path) -> Iterator[Finding]:
    """`place`: an empty directory on the tier's file system, removed by the caller."""
    yield kind(file_system(place), in_memory(place), path)
    yield from rates(LocalDisk(), SystemClock(), place, settings.nvme.free_floor_bytes)


def kind(name: str, memory: bool, path: Path) -> Finding:
    found = f"{path} lies on {name or 'a file system that the system does not name'}"
    if memory:
        return warn("drive", f"{found}, which is memory", "set nvme.path to a directory on a drive")
    if name == "overlay":
        remedy = "mount a volume and set nvme.path to it: a container's own layer is slow and goes with the container"
        return warn("drive", found, remedy)
    if name.startswith(_REMOTE):
        remedy = "set nvme.path to a local drive: this one is shared or far, and another host must not use it too"
        return warn("drive", found, remedy)
    return ok("drive", found)


def rates(disk: Disk, clock: Clock, place: Path, floor_bytes: int) -> Iterator[Finding]:
    """O_DIRECT, then the rates of writing and reading one file there."""
    room = disk.free_bytes(str(place)) - floor_bytes
    total = min(TOTAL_BYTES, room // 2) // PIECE_BYTES * PIECE_BYTES
    if total < LEAST_BYTES:
        found = f"{show_bytes(max(0, room))} are free beyond nvme.free_floor_bytes"
        yield fail("drive rate", found, "free some room, or set nvme.path to another drive")
        return
    path = str(place / "rate")
    file = disk.open(path, create=True, direct=True)
    try:
        if file.direct:
            yield ok("O_DIRECT", "reads and writes go around the page cache")
        else:
            yield warn("O_DIRECT", "this file system has none", "works through the page cache; ext4 and xfs have it")
        piece = memoryview(mmap.mmap(-1, PIECE_BYTES))  # on a page boundary, as O_DIRECT wants
        piece[:] = os.urandom(PIECE_BYTES)
        began, written = clock.now(), 0
        while written < total:
            file.write(written, [piece])
            written += PIECE_BYTES
            if clock.now() - began > MOST_S:
                break
        file.sync()
        yield ok("write rate", _rate(written, clock.now() - began))
        began, got = clock.now(), 0
        while got < written:
            got += file.read(got, [piece])
            if clock.now() - began > MOST_S:
                break
        yield _read(got, clock.now() - began, file.direct)
    finally:
        file.close()
        disk.remove(path)


def _read(got: int, seconds: float, direct: bool) -> Finding:
    found = _rate(got, seconds)
    if not direct:
        return warn("read rate", f"{found}, out of the page cache", "tells nothing about the drive itself")
    if got < SLOW * seconds:
        remedy = (
            "blocks may come back slower than a GPU recomputes them: use a faster drive, or nvme.enabled = false; "
            "`kvcache size MODEL` tells the bytes of a token"
        )
        return warn("read rate", found, remedy)
    return ok("read rate", found)


def _rate(size: int, seconds: float) -> str:
    return f"{show_bytes(size / max(seconds, 1e-9))} a second ({show_bytes(size)})"

"""How long a store takes to open again, by how many blocks it holds, closed in order or killed.

    restart/1e6             until the tier answers for 10^6 blocks that a checkpoint names
    restart/1e6/killed      the same, where as many entries as compaction allows stand behind it, one a frame
    restart/1e6/cache       until the cache's index has them too, killed
    restart/1e6/memory      bytes a block that the tier holds in memory, counted by the system

The same for 1e4 and 1e5. The journal is as a real store leaves it; the segment files are of full size and hold nothing
(a sparse file each), since opening reads none of them. Fails where a block is missing.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

import numpy as np
from harness import Row, options, publish
from numpy.typing import NDArray

from kvcache.evict.policy import LRU
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index
from kvcache.os_env import LocalDisk
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.nvme.allocator import Allocator
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.journal import COLUMNS, ENTRY_BYTES, NAMESPACE, PUT, SEGMENT, SYNCED, Entry, Journal

COUNTS = {"1e4": 10_000, "1e5": 100_000, "1e6": 1_000_000}
RECORD_BYTES = 364 << 10
SEGMENT_BYTES = 256 << 20
CHAIN = 128
CAPACITY_BYTES = 1 << 42


def entries(count: int) -> tuple[bytes, NDArray[np.void]]:
    """What makes the segments, and a put entry a block, in chains."""
    slots = SEGMENT_BYTES // RECORD_BYTES
    namespace = sha256(b"restart").digest()
    rows = np.zeros(count, COLUMNS)
    rows["kind"], rows["record_bytes"] = PUT, RECORD_BYTES
    rows["signature"] = np.random.default_rng(0).integers(0, 256, (count, 32), np.uint8)
    rows["parent"] = np.roll(rows["signature"], 1, axis=0)
    rows["parent"][::CHAIN] = np.frombuffer(namespace, np.uint8)
    rows["shard"] = np.frombuffer(np.array([0, 30, 0, 3], "<u2").tobytes(), np.uint8)
    rows["segment"], rows["slot"] = np.arange(count) // slots + 1, np.arange(count) % slots
    head = [Entry(SEGMENT, segment=n + 1, slot=slots, record_bytes=RECORD_BYTES) for n in range(-(-count // slots))]
    head.append(Entry(NAMESPACE, signature=namespace))
    return b"".join(entry.pack() for entry in head), rows


@contextmanager
def left_behind(directory: Path, count: int, *, killed: bool) -> Iterator[Path]:
    """A store's directory, as its process left it."""
    head, rows = entries(count)
    behind = min(count, Allocator(CAPACITY_BYTES, SEGMENT_BYTES).compact_at_entries(), count // 8) if killed else 0
    path = Path(tempfile.mkdtemp(prefix="restart-", dir=directory))
    try:
        claimed = Directory(LocalDisk(), str(path))
        journal = Journal(claimed)
        state = head + rows[: count - behind].tobytes()
        state += Entry(SYNCED, write_id=len(state) // ENTRY_BYTES).pack()
        journal.checkpoint(journal.rotate(), iter([state]), len(state) // ENTRY_BYTES)
        for row in rows[count - behind :]:
            journal.append(row.tobytes())
        journal.close()
        claimed.release()
        for number in range(1, int(rows["segment"][-1]) + 1):
            with (path / f"segment-{number:06d}").open("wb") as file:
                file.truncate(SEGMENT_BYTES // RECORD_BYTES * RECORD_BYTES)
        yield path
    finally:
        shutil.rmtree(path)


def opened(path: Path) -> NvmeTier:
    return NvmeTier(
        str(path), NvmeSettings(capacity_bytes=CAPACITY_BYTES, segment_bytes=SEGMENT_BYTES, min_free_bytes=0)
    )


def taken_in(path: Path, count: int) -> NvmeTier:
    tier, index = opened(path), Index(["host", "nvme"], LRU())
    for head, signatures in tier.runs():
        index.insert_run(
            BlockRun(pack_shard_key(head.namespace, head.group, head.shard), signatures), head.parent, tier.name
        )
    if index.resident("nvme") != count:
        raise SystemExit(f"the index knows {index.resident('nvme')} blocks of {count}")
    return tier


def seconds(call: Callable[[], NvmeTier], count: int, times: int) -> float:
    best = float("inf")
    for _ in range(times):
        gc.collect()
        begun = time.perf_counter()
        tier = call()
        best = min(best, time.perf_counter() - begun)
        if tier.usage().records != count:
            raise SystemExit(f"{tier.usage().records} blocks of {count} are there")
        abandon(tier)
    return best


def abandon(tier: NvmeTier) -> None:
    """Let go of the directory as it is: the next one is to find what this one found."""
    tier._executor.close()  # noqa: SLF001  no public end leaves the journal as it was
    tier._store.catalog.close()  # noqa: SLF001
    tier._store.directory.release()  # noqa: SLF001


def memory_bytes(path: Path) -> int:
    """What a process of its own grows by. (Here memory was given out and taken back before.)"""
    code = (
        "import resource, sys; from pathlib import Path; sys.path[:0] = ['benchmarks', '.']\n"
        "from restart import opened\n"
        "def resident(): return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()\n"
        f"before = resident(); tier = opened(Path({str(path)!r})); print(resident() - before)"
    )
    root = Path(__file__).parents[1]
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=root, check=True)
    return int(ended.stdout)


def rows_of(name: str, count: int, directory: Path, times: int) -> Iterator[Row]:
    with left_behind(directory, count, killed=False) as path:
        yield Row(f"restart/{name}", seconds(lambda: opened(path), count, times), "s")
        if Path("/proc/self/statm").exists():
            yield Row(f"restart/{name}/memory", memory_bytes(path) / count, "B")
    with left_behind(directory, count, killed=True) as path:
        yield Row(f"restart/{name}/killed", seconds(lambda: opened(path), count, times), "s")
        yield Row(f"restart/{name}/cache", seconds(lambda: taken_in(path, count), count, times), "s")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="where on the drive to put the files")
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    os.makedirs(directory, exist_ok=True)
    rows: list[Row] = []
    for name, count in COUNTS.items():
        rows += rows_of(name, count, directory, 2 if arguments.quick else 5)
    publish("restart", rows, arguments.json)


if __name__ == "__main__":
    main()

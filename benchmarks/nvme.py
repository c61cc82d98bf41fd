"""The NVMe tier beside fio on the same file: whole batches of sealed records, written until durable, read and verified.

    read/364KiB             payload and header, of a block of SmolLM2 in bfloat16; floor: fio, same sizes and depth
    write/364KiB            over slots written before, synced every 64 MiB and at the end; floor: the same by fio
    read/364KiB/cpu         processor time a GB, checksums included; peer: fio's
    read/364KiB/unchecked   the same without the checksums
    write/364KiB/cpu        processor time a GB; peer: fio's

The same for 2MiB and 32MiB. Peer of both rates: the same memory moved by as many threads with preadv and pwritev, no
tier and no checks. (fio uses its few buffers again and again, which stay in the processor's cache; ours are as large as
the file, but lie on huge pages, as the arena's do, which the system moves at half the cost.) All take turns, so
that they meet the same machine; the middle of a few rounds counts. fio runs io_uring with as many requests in flight
as the tier. Needs fio (apt-get install fio) and a drive, not memory: --directory.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from statistics import median

from harness import Row, options, publish

from kvcache.block.layout import Shard
from kvcache.block.record import Address, header_area, record_bytes, seal, verify
from kvcache.os_env import LocalDisk
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.host.arena import Region
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.tier import Outcome

KiB, MiB = 1 << 10, 1 << 20
SIZES = {"364KiB": 360 * KiB, "2MiB": 2 * MiB, "32MiB": 32 * MiB}  # by what is stored with its header, the payload
THREADS = 4
DEPTH = {"read": THREADS, "write": THREADS - 1}  # the tier leaves a thread to those who read
FLUSH_BYTES = 64 * MiB  # after so many the tier syncs, and so does fio
Segments = list[memoryview]


class Wrong(SystemExit):
    """A record was not what it should be: no figure is better than a wrong one."""


class Runs:
    """The middle of several runs: bytes a second, and processor seconds a GB."""

    def __init__(self) -> None:
        self._rates: list[float] = []
        self._cpu_s: list[float] = []

    @property
    def rate(self) -> float:
        return median(self._rates)

    @property
    def cpu_s(self) -> float:
        return median(self._cpu_s)

    def add(self, size_bytes: int, wall_s: float, cpu_s: float) -> None:
        self._rates.append(size_bytes / wall_s)
        self._cpu_s.append(cpu_s / (size_bytes / 1e9))

    def time(self, size_bytes: int, call: Callable[[], object]) -> None:
        before, begun = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        call()
        wall_s, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_SELF)
        self.add(size_bytes, wall_s, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def blocks(count: int) -> list[Address]:
    """A chain."""
    namespace = sha256(b"benchmark").digest()
    parent, found = namespace, []
    for _ in range(count):
        signature = sha256(parent).digest()
        found.append(Address(namespace, signature, parent, 0, Shard(0, 1, 0, 1)))
        parent = signature
    return found


def sealed(addresses: Sequence[Address], payload_bytes: int) -> list[Segments]:
    """A record each, no two alike, in slots of memory as the arena has it."""
    size, area = record_bytes(payload_bytes), header_area(payload_bytes)
    noise = sha256(b"noise").digest() * (payload_bytes // 32)
    region, records = Region(size * len(addresses)), []
    for i, address in enumerate(addresses):
        memory = region.view[i * size : (i + 1) * size]
        header, payload = memory[:area], memory[area:]
        payload[:payload_bytes] = noise[:payload_bytes]
        payload[:8] = i.to_bytes(8, "little")
        seal(header, payload, address, stored_bytes=payload_bytes)
        records.append([header, payload])
    return records


@contextmanager
def opened(directory: Path, size_bytes: int) -> Iterator[NvmeTier]:
    tier = NvmeTier(
        str(directory),
        NvmeSettings(
            capacity_bytes=size_bytes + size_bytes // 4 + 256 * MiB,
            segment_bytes=size_bytes,
            threads=THREADS,
            queue_bytes=1 << 40,
            min_free_bytes=0,
        ),
    )
    try:
        yield tier
    finally:
        tier.close()


def fio(kind: str, file: Path, piece_bytes: int, size_bytes: int) -> tuple[float, float, float]:
    """Bytes moved, seconds, and seconds of processor time."""
    command = [
        "fio", "--name=floor", f"--filename={file}", f"--rw={kind}", f"--bs={piece_bytes}", f"--size={size_bytes}",
        "--direct=1", "--ioengine=io_uring", f"--iodepth={DEPTH[kind]}", "--overwrite=1", "--output-format=json",
    ]  # fmt: skip
    command += [f"--fdatasync={max(1, FLUSH_BYTES // piece_bytes)}"] if kind == "write" else []
    job = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["jobs"][0]
    seconds = job["job_runtime"] / 1000
    return job[kind]["io_bytes"], job[kind]["runtime"] / 1000, (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds


def plain(kind: str, file: Path, records: Sequence[Segments]) -> None:
    """The same memory, threads and syncs, and nothing but the system's calls."""
    piece_bytes = sum(map(len, records[0]))
    handle = LocalDisk().open(str(file), direct=True)
    flush_each = max(1, FLUSH_BYTES // piece_bytes)

    def move(first: int) -> None:
        for i in range(first, len(records), DEPTH[kind]):
            if kind == "read":
                handle.read(i * piece_bytes, records[i])
            else:
                handle.write(i * piece_bytes, records[i])
                if i % flush_each == flush_each - 1:
                    handle.sync()

    with ThreadPoolExecutor(DEPTH[kind]) as pool:
        list(pool.map(move, range(DEPTH[kind])))
    handle.close()


def measure(name: str, payload_bytes: int, total_bytes: int, rounds: int, directory: Path) -> Iterator[Row]:
    size = record_bytes(payload_bytes)
    addresses = blocks(max(THREADS, total_bytes // size))
    records, moved = sealed(addresses, payload_bytes), len(addresses) * size
    ours = {"read": Runs(), "write": Runs()}
    floor = {"read": Runs(), "write": Runs()}
    bare = {"read": Runs(), "write": Runs()}
    checksums = Runs()
    with opened(directory, moved) as tier:
        demand(tier.write(addresses, records))
        (file,) = directory.glob("segment-*")
        for turn in range(rounds):

            def other(kind: str) -> None:
                floor[kind].add(*fio(kind, file, size, moved))

            other("write")
            bare["write"].time(moved, lambda: plain("write", file, records))
            tier.remove(addresses)
            ours["write"].time(moved, lambda: (demand(tier.write(addresses, records)), tier.sync()))
            if turn % 2:  # the second reader may find more in a cache below
                other("read")
            bare["read"].time(moved, lambda: plain("read", file, records))
            for header, _ in records:
                header[:] = bytes(len(header))
            ours["read"].time(moved, lambda: demand(tier.read(addresses, records)))
            if not turn % 2:
                other("read")
            checksums.time(moved, lambda: check(addresses, records))
    for kind, runs in ours.items():
        yield Row(f"{kind}/{name}", runs.rate / 1e9, "GB/s", floor[kind].rate / 1e9, bare[kind].rate / 1e9)
    for kind, runs in ours.items():
        yield Row(f"{kind}/{name}/cpu", runs.cpu_s, "s", peer=floor[kind].cpu_s)
    yield Row(f"read/{name}/unchecked", max(0.0, ours["read"].cpu_s - checksums.cpu_s), "s", peer=floor["read"].cpu_s)


def demand(outcomes: Sequence[Outcome]) -> None:
    if set(outcomes) != {Outcome.DONE}:
        raise Wrong(f"outcomes {set(outcomes)}: expected DONE for every record")


def check(addresses: Sequence[Address], records: Sequence[Segments]) -> None:
    for address, (header, payload) in zip(addresses, records, strict=True):
        verify(header, payload, address)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--directory", type=Path, default=Path(), help="where on the drive to put the files")
    arguments = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt-get install fio")
    total_bytes, rounds = (640 * MiB, 4) if arguments.quick else (2048 * MiB, 9)
    rows: list[Row] = []
    for name, payload_bytes in SIZES.items():
        directory = Path(tempfile.mkdtemp(prefix="nvme-", dir=arguments.directory))
        try:
            rows += measure(name, payload_bytes, total_bytes, rounds, directory / "store")
        finally:
            shutil.rmtree(directory)
    publish("nvme", rows, arguments.json)


if __name__ == "__main__":
    main()

"""The doctor's checks of storage: the drive, Redis, the object store, and a store and a load through every tier."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from time import perf_counter

import numpy as np

from kvcache.block.layout import KVLayout, Shard
from kvcache.block.record import Address, header_area, record_bytes, seal
from kvcache.cache.cache import Cache
from kvcache.cli.doctor.machine import Finding, fail, ok, warn
from kvcache.codec.codec import codec
from kvcache.machine import file_system, is_memory_backed
from kvcache.os_env import Clock, Disk, LocalDisk, SystemClock
from kvcache.settings import Settings
from kvcache.settings.sources import load
from kvcache.settings.types import MiB, show_bytes
from kvcache.tier.object import ObjectTier
from kvcache.tier.redis import RedisTier
from kvcache.tier.tier import Outcome, Tier, call
from kvcache.transfer.pages import GroupPages

# Checks whether the NVMe tier is on a drive, whether it bypasses the page cache, and how fast it is. The rates are
# those of one thread and large pieces, over at most 256 MiB and a few seconds each. This distinguishes a local drive
# from a network's or a container's, and is not a benchmark.

MAX_TEST_BYTES = 256 * MiB
MIN_TEST_BYTES = 16 * MiB
IO_BYTES = 4 * MiB
MAX_TEST_S = 5.0
MIN_READ_BYTES_PER_S = 500 * MiB  # a second
_REMOTE = ("nfs", "cifs", "smb", "fuse", "9p", "ceph", "lustre", "glusterfs")


def check_drive(settings: Settings, directory: Path, path: Path) -> Iterator[Finding]:
    """Check the drive. `directory` is an empty directory on the tier's file system, which the caller removes."""
    yield drive_kind(file_system(directory), is_memory_backed(directory), path)
    yield from drive_rates(LocalDisk(), SystemClock(), directory, settings.nvme.min_free_bytes)


def drive_kind(name: str, memory: bool, path: Path) -> Finding:
    found = f"{path} lies on {name or 'a file system that the system does not name'}"
    if memory:
        return warn("drive", f"{found}, which is memory", "set nvme.path to a directory on a drive")
    if name == "overlay":
        remedy = (
            "mount a volume and set nvme.path to it: a container's own layer is slow and is deleted with the container"
        )
        return warn("drive", found, remedy)
    if name.startswith(_REMOTE):
        remedy = "set nvme.path to a local drive: this file system is remote, and two hosts must not share a directory"
        return warn("drive", found, remedy)
    return ok("drive", found)


def drive_rates(disk: Disk, clock: Clock, directory: Path, min_free_bytes: int) -> Iterator[Finding]:
    """Check O_DIRECT, then the rates of writing and reading one file."""
    free_bytes = disk.free_bytes(str(directory)) - min_free_bytes
    total = min(MAX_TEST_BYTES, free_bytes // 2) // IO_BYTES * IO_BYTES
    if total < MIN_TEST_BYTES:
        found = f"{show_bytes(max(0, free_bytes))} are free beyond nvme.min_free_bytes"
        yield fail("drive rate", found, "free some space, or set nvme.path to another drive")
        return
    path = str(directory / "rate")
    file = disk.open(path, create=True, direct=True)
    try:
        if file.direct:
            yield ok("O_DIRECT", "reads and writes bypass the page cache")
        else:
            yield warn(
                "O_DIRECT",
                "this file system does not support O_DIRECT",
                "the tier uses the page cache; ext4 and xfs support O_DIRECT",
            )
        piece = memoryview(mmap.mmap(-1, IO_BYTES))  # page-aligned, as O_DIRECT requires
        piece[:] = os.urandom(IO_BYTES)
        began, written = clock.now(), 0
        while written < total:
            file.write(written, [piece])
            written += IO_BYTES
            if clock.now() - began > MAX_TEST_S:
                break
        file.sync()
        yield ok("write rate", _rate(written, clock.now() - began))
        began, got = clock.now(), 0
        while got < written:
            got += file.read(got, [piece])
            if clock.now() - began > MAX_TEST_S:
                break
        yield _read(got, clock.now() - began, file.direct)
    finally:
        file.close()
        disk.remove(path)


def _read(got: int, seconds: float, direct: bool) -> Finding:
    found = _rate(got, seconds)
    if not direct:
        return warn("read rate", f"{found}, from the page cache", "this rate does not measure the drive itself")
    if got < MIN_READ_BYTES_PER_S * seconds:
        remedy = (
            "loads may be slower than recomputation on a GPU: use a faster drive, or nvme.enabled = false; "
            "`kvcache size MODEL` prints the bytes of a token"
        )
        return warn("read rate", found, remedy)
    return ok("read rate", found)


def _rate(size: int, seconds: float) -> str:
    return f"{show_bytes(size / max(seconds, 1e-9))} a second ({show_bytes(size)})"


# Checks that the shared Redis answers, is configured as a cache, and returns a record.

PROBE_BYTES = 1 << 20


def check_redis(settings: Settings) -> Iterator[Finding]:
    """Check Redis with one record of 1 MiB under a separate prefix, and remove it."""
    probe = settings.redis.model_copy(update={"prefix": f"{settings.redis.prefix[:57]}:doctor"})
    with closing(RedisTier(probe)) as tier:
        began = perf_counter()
        policies = tier.policies()
        milliseconds = 1000 * (perf_counter() - began)
        if not policies:
            faults = [name.partition("_")[2] for name in tier.counters if name.startswith("faults_")]
            cause = ", ".join(faults) or "no answer"
            remedy = (
                "check redis.url, the password, TLS and the server's log; until then each lookup in this tier is a miss"
            )
            yield fail("redis", f"{tier.where}: {cause}", remedy)
            return
        usage = tier.usage()
        size = f"{show_bytes(usage.used_bytes)} of {show_bytes(usage.capacity_bytes)}"
        yield ok("redis", f"{tier.where} answers in {milliseconds:.1f} ms: {usage.records:,} keys, {size}")
        yield _policy(policies)
        yield round_trip(tier, "docs/operations.md lists the commands that the user needs; see the server's log")


def _policy(policies: set[str]) -> Finding:
    if "" in policies:
        remedy = "CONFIG SET maxmemory: without a limit the server uses all memory and the system kills it"
        return warn("redis memory", "maxmemory is not set", remedy)
    if "noeviction" in policies:
        remedy = "CONFIG SET maxmemory-policy allkeys-lru: otherwise the full server refuses writes"
        return warn("redis memory", "maxmemory-policy is noeviction", remedy)
    return ok("redis memory", f"maxmemory-policy is {', '.join(sorted(policies))}")


def round_trip(tier: Tier, remedy: str) -> Finding:
    """Write, read and remove one record."""
    given = np.random.default_rng().bytes(PROBE_BYTES)
    address = Address(given[:32], given[32:64], b"", 0, Shard(0, 1, 0, 1))
    out, back = (memoryview(bytearray(record_bytes(PROBE_BYTES))) for _ in range(2))
    area = header_area(PROBE_BYTES)
    out[area : area + PROBE_BYTES] = given
    seal(out[:area], out[area:], address, stored_bytes=PROBE_BYTES)
    began = perf_counter()
    (written,) = call(tier, "write", [address], [[out[:area], out[area:]]])
    (read,) = call(tier, "read", [address], [[back[:area], back[area:]]])
    seconds = perf_counter() - began
    call(tier, "remove", [address])
    if (written, read) != (Outcome.DONE, Outcome.DONE) or back[area : area + PROBE_BYTES] != given:
        cause = "".join(f", {line}" for line in tier.health_issues())
        return fail(f"{tier.name} trip", f"a write was {written.value}, a read {read.value}{cause}", remedy)
    return ok(f"{tier.name} trip", f"wrote and read 1 MiB in {1000 * seconds:.1f} ms, the same bytes")


# Checks that the object store answers and returns a record.


def check_bucket(settings: Settings) -> Iterator[Finding]:
    """Check the object store with one record of 1 MiB under a separate prefix, and remove it."""
    probe = settings.object.model_copy(update={"prefix": f"{settings.object.prefix}/doctor"})
    with closing(ObjectTier(probe)) as tier:
        faults = "object.url, object.endpoint and the credentials, which must allow list, get, put and delete"
        yield round_trip(tier, f"check {faults}; until then each lookup in this tier is a miss")


LAYOUT = KVLayout.mha(layers=4, kv_heads=2, head_dim=64, dtype="fp16")
BLOCKS = 16
AXES = ("kv", "page", "token", "head", "dim")
TRANSFER_TIMEOUT_S = 30.0

BlockArray = np.ndarray[tuple[int, ...], np.dtype[np.uint16]]


def check_round_trip(settings: Settings, directory: Path) -> Iterator[Finding]:
    """Check a small separate cache, opened twice in `directory`: the second time only durable tiers have the blocks."""
    small = _settings(settings, directory)
    given = np.random.default_rng().integers(0, 1 << 16, _shape(), np.uint16)
    with closing(Cache(small)) as cache:
        yield _store(cache, given)
        yield _load(cache, given, "host")
        yield from _flush(cache)
    if small.nvme.enabled:
        with closing(Cache(small)) as cache:
            yield _load(cache, given, "nvme")


def _flush(cache: Cache) -> Iterator[Finding]:
    """Yield a finding where not every block is in the tiers below host memory."""
    report = cache.flush(TRANSFER_TIMEOUT_S)
    if report:
        return
    refused, waiting = (sum(getattr(t, name) for t in report.tiers.values()) for name in ("refused", "waiting"))
    faults = [report.fault, *(line for tier in cache.lower_tiers for line in tier.health_issues())]
    cause = "".join(f"; {fault}" for fault in faults if fault)
    found = f"of {BLOCKS} blocks {refused} were refused and {waiting} still wait "
    found += f"after at most {TRANSFER_TIMEOUT_S:g} s{cause}"
    yield fail("flush", found, "the drive hangs, fails, is full or is very slow; see the system's log")


def _settings(settings: Settings, directory: Path) -> Settings:
    lossless = not codec(settings.nvme.codec).error_bound  # ConfigError where its library is missing
    nvme = {
        "enabled": settings.nvme.enabled,
        "path": directory / "nvme",
        "capacity_bytes": 64 * MiB,
        "codec": settings.nvme.codec if lossless else "raw",
        "durability": settings.nvme.durability,
        "min_free_bytes": 0,
    }
    return load(environ={}, host={"capacity_bytes": 16 * MiB}, nvme=nvme, evict={"policy": settings.evict.policy})


def _shape() -> tuple[int, ...]:
    group = LAYOUT.groups[0]
    return (group.layers, 2, BLOCKS, LAYOUT.block_tokens, group.kv_heads, group.head_dim)


def _pages(tensors: BlockArray) -> list[GroupPages]:
    return [GroupPages.from_tensors(LAYOUT, list(tensors), axes=AXES)]


def _store(cache: Cache, given: BlockArray) -> Finding:
    began = perf_counter()
    with cache.namespace(LAYOUT, model="doctor", revision="1").request() as r:
        r.match(range(BLOCKS * LAYOUT.block_tokens))
        transfer = r.store(_pages(given), [list(range(BLOCKS))])
        transfer.wait(TRANSFER_TIMEOUT_S)
    return _finding_of("store", cache, transfer.outcomes, perf_counter() - began)


def _load(cache: Cache, given: BlockArray, tier: str) -> Finding:
    name, got = f"load from {tier}", np.zeros_like(given)
    began = perf_counter()
    with cache.namespace(LAYOUT, model="doctor", revision="1").request() as r:
        hit = r.match(range(BLOCKS * LAYOUT.block_tokens))
        if hit.by_tier != {tier: BLOCKS}:
            found = f"{BLOCKS} blocks were stored; found {dict(hit.by_tier) or 'none'}"
            return fail(name, found, _REPORT)
        r.admit()
        transfer = r.load(BLOCKS, _pages(got), [list(range(BLOCKS))])
        transfer.wait(TRANSFER_TIMEOUT_S)
    judged = _finding_of(name, cache, transfer.outcomes, perf_counter() - began)
    if judged.state == "ok" and not np.array_equal(got, given):
        return fail(name, "the load returned other bytes than were stored", _REPORT)
    return judged


_REFUSED = "refused_records"
_REPORT = "kvcache or the drive is defective: report it with `kvcache doctor --bundle FILE`"


def _finding_of(name: str, cache: Cache, outcomes: tuple[Outcome, ...], seconds: float) -> Finding:
    bad = sorted({outcome.value for outcome in outcomes if outcome is not Outcome.DONE})
    if bad:
        rows = (labels for name, labels, _ in cache.counters.rows() if name == _REFUSED)
        refused = [f"{labels['check']} in {labels['tier']}" for labels in rows]
        found = f"not all of {len(outcomes)} blocks were loaded: {', '.join([*bad, *refused])}"
        return fail(name, found, _REPORT)
    return ok(name, f"{len(outcomes)} blocks in {seconds * 1000:.1f} ms")

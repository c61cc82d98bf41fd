"""Export and import of a namespace as one file, to move it to another machine. Every record is verified on both sides.

The file is `KVCARCH` and a line feed, then consecutive MessagePack values. The first is a map (`version`, `namespace`:
the id, or nil for all). Each record is two binaries: its header, and its payload as stored. Parents precede children.
The last value is the number of records, so the end reveals a file that was cut short or extended. aiofiles reads and
writes it.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

import aiofiles
import msgpack

from kvcache.block.record import Address, Header, RecordError, header_area, read_header, record_bytes, verify
from kvcache.errors import StoreError
from kvcache.tier.nvme.inspect import inspect_record
from kvcache.tier.nvme.tier import NvmeTier
from kvcache.tier.tier import Outcome, Segments

MAGIC = b"KVCARCH\n"
VERSION = 1
_ID_BYTES = 32  # of a namespace
_BATCH = 32
_READ_BYTES = 1 << 20
_MAX_RECORD_BYTES = 1 << 30

ProgressCallback = Callable[[int], object]


@dataclass(slots=True)
class TransferReport:
    """The result of an export or an import."""

    records: int = 0
    size_bytes: int = 0
    left_out: int = 0  # export: records that failed a check or could not be read
    there: int = 0  # import: records that the store had already
    no_room: int = 0
    refused: int = 0  # import: records that the drive or the store refused


async def export_archive(
    tier: NvmeTier, path: str, namespace: bytes | None, on_progress: ProgressCallback = lambda size_bytes: None
) -> TransferReport:
    """Write the records of a namespace, or of all, to a file. It gets its name once it is complete and synced."""
    report, temporary = TransferReport(), path + ".tmp"
    try:
        async with aiofiles.open(temporary, "wb") as file:
            await file.write(MAGIC + msgpack.packb({"version": VERSION, "namespace": namespace}))
            wanted = (address for address in tier.scan() if namespace in (None, address.namespace))
            part = await asyncio.to_thread(_pack, tier, list(islice(wanted, _BATCH)), report, on_progress)
            while part is not None:
                following = asyncio.to_thread(_pack, tier, list(islice(wanted, _BATCH)), report, on_progress)
                _, part = await asyncio.gather(file.write(part), following)
            await file.write(msgpack.packb(report.records))
            await file.flush()
            await asyncio.to_thread(os.fsync, file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return report


def _pack(
    tier: NvmeTier, addresses: list[Address], report: TransferReport, on_progress: ProgressCallback
) -> bytes | None:
    """Return some records in the file's format; None where there are none."""
    parts = []
    for address in addresses:
        seen = inspect_record(tier.catalog, address.name)
        if seen is None or seen.header is None or seen.fault is not None:
            report.left_out += 1
            continue
        head, area = seen.header, header_area(seen.header.decoded_bytes)
        parts.append(msgpack.packb(bytes(seen.data[: head.header_bytes])))
        parts.append(msgpack.packb(bytes(seen.data[area : area + head.stored_bytes])))
        report.records += 1
        report.size_bytes += seen.entry.record_bytes
        on_progress(seen.entry.record_bytes)
    return b"".join(parts) if addresses else None


async def import_archive(
    tier: NvmeTier | None, path: str, on_progress: ProgressCallback = lambda size_bytes: None
) -> TransferReport:
    """Write the records of a file to a store after verifying each; without a `tier`, only verify.

    Args:
        on_progress: called with the number of bytes read from the file.

    Raises:
        StoreError: the file is no archive, or not complete; the records before the fault were imported.
    """
    report, records = TransferReport(), 0
    async for batch in _batches(_values(path, on_progress), path):
        records += len(batch)
        await asyncio.to_thread(_write, tier, batch, report)
    return report


def _write(tier: NvmeTier | None, batch: list[tuple[Header, Segments]], report: TransferReport) -> None:
    addresses = [header.address for header, _ in batch]
    new = [True] * len(batch) if tier is None else [not known for known in tier.has_names(addresses)]
    report.there += len(batch) - sum(new)
    fresh = [pair for pair, is_new in zip(batch, new, strict=True) if is_new]
    outcomes = (Outcome.DONE,) * len(fresh)
    if tier is not None:
        outcomes = tier.write([header.address for header, _ in fresh], [segments for _, segments in fresh])
    for (_, segments), outcome in zip(fresh, outcomes, strict=True):
        if outcome is Outcome.DONE:
            report.records += 1
            report.size_bytes += sum(map(len, segments))
        elif outcome is Outcome.NO_CAPACITY:
            report.no_room += 1
        else:
            report.refused += 1


async def _batches(values: AsyncIterator[Any], path: str) -> AsyncIterator[list[tuple[Header, Segments]]]:
    """Yield the verified records of an archive in batches."""
    about = await anext(values, None)
    if about is None:
        raise StoreError(f"archive {path}: ends before its first record: it was cut short; export it anew")
    version = about.get("version") if isinstance(about, dict) else None
    if version != VERSION:
        raise StoreError(
            f"archive {path}: version {version!r:.20}, expected {VERSION}; import it with the version that wrote it"
        )
    namespace = about.get("namespace", b"")
    if namespace is not None and not (isinstance(namespace, bytes) and len(namespace) == _ID_BYTES):
        raise StoreError(f"archive {path}: its head names no namespace, nor all of them; export it anew")
    batch: list[tuple[Header, Segments]] = []
    count = 0
    async for value in values:
        if isinstance(value, int):
            rest = await anext(values, None)
            if value != count or rest is not None:
                raise StoreError(f"archive {path}: {count} records, where its end says {value}: export it anew")
            if batch:
                yield batch
            return
        try:
            batch.append(_record(value, await anext(values, b""), namespace))
        except RecordError as error:
            raise StoreError(f"archive {path}: record {count + 1}: {error}; export it anew") from None
        count += 1
        if len(batch) == _BATCH:
            yield batch
            batch = []
    raise StoreError(f"archive {path}: ends after {count} records without its end: it was cut short; export it anew")


def _record(head: Any, payload: Any, namespace: bytes | None) -> tuple[Header, Segments]:
    """Return a verified record in the padded form that a tier takes."""
    if not (isinstance(head, bytes) and isinstance(payload, bytes)):
        raise RecordError("field", f"{type(head).__name__} and {type(payload).__name__}: expected two binaries")
    header = read_header(head)
    if namespace not in (None, header.address.namespace):
        raise RecordError("namespace", "another one than the archive's head names")
    if len(payload) != header.stored_bytes:
        raise RecordError("length", f"{len(payload)} bytes, where its header says {header.stored_bytes}")
    area = header_area(header.decoded_bytes)
    memory = memoryview(mmap.mmap(-1, area + record_bytes(len(payload)) - header_area(len(payload))))
    memory[: len(head)] = head
    memory[area : area + len(payload)] = payload
    verify(memory[:area], memory[area:], header.address)
    return header, [memory[:area], memory[area:]]


async def _values(path: str, on_progress: ProgressCallback) -> AsyncIterator[Any]:
    unpacker = msgpack.Unpacker(max_buffer_size=_MAX_RECORD_BYTES)
    async with aiofiles.open(path, "rb") as file:
        if await file.read(len(MAGIC)) != MAGIC:
            raise StoreError(f"archive {path}: does not begin with {MAGIC!r}; expected an archive")
        while data := await file.read(_READ_BYTES):
            unpacker.feed(data)
            on_progress(len(data))
            for value in _unpacked(unpacker, path):
                yield value


def _unpacked(unpacker: msgpack.Unpacker, path: str) -> Iterator[Any]:
    try:
        yield from unpacker
    except (ValueError, msgpack.UnpackException) as error:
        raise StoreError(f"archive {path}: {error or 'not MessagePack'}; export it anew") from None

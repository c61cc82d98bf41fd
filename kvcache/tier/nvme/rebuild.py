"""Rebuilds the journal of a store from its records, since each record names itself.

Only records that verify are kept, in segments whose footer describes their slots. A removed record may return if no
other record was written over it; it is still the record that its name says.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcache.block.record import RecordError, header_area, read_header, record_bytes, verify
from kvcache.errors import StoreError
from kvcache.os_env import File, OsEnv
from kvcache.tier.nvme import segment as bounce
from kvcache.tier.nvme.directory import Directory, directory_error
from kvcache.tier.nvme.journal import (
    CHECKPOINT,
    ENTRY_BYTES,
    NAMESPACE,
    SEGMENT,
    UNKNOWN,
    Entry,
    FileHeader,
    Journal,
    frames,
    put_entry,
)
from kvcache.tier.nvme.segment import FOOTER_BYTES, SegmentFooter


@dataclass(slots=True)
class RebuildReport:
    """The result. `unlabelled` counts segments without a sound footer, which the next start removes."""

    segments: int = 0
    records: int = 0
    size_bytes: int = 0
    unsound: int = 0  # slots without a whole record, remains of earlier records among them
    doubles: int = 0
    unlabelled: int = 0


def rebuild(
    path: str,
    *,
    dry_run: bool = False,
    on_progress: Callable[[int], object] = lambda size_bytes: None,
    os_env: OsEnv | None = None,
) -> RebuildReport:
    """Read every slot of a store whose journal is unreadable, and write a checkpoint of the sound records.

    Args:
        dry_run: only report.
        on_progress: called with each slot's size in bytes.

    Raises:
        StoreError: another process has the directory, it is no store, or its journal is sound.
    """
    os_env = os_env or OsEnv()
    directory = Directory(os_env.disk, path)
    try:
        if _readable(directory):
            raise StoreError(f"nvme directory {path}: its journal is intact and has more information than the records")
        found = RebuildReport()
        entries = b"".join(entry.pack() for entry in _entries(directory, found, on_progress))
        if not dry_run:
            number = max([0, *directory.file_numbers("journal"), *directory.file_numbers("checkpoint")]) + 1
            header = FileHeader(CHECKPOINT, number, 0, len(entries) // ENTRY_BYTES)
            directory.write(f"checkpoint-{number}", [header.pack(), *frames(iter([entries]), number)])
        return found
    except OSError as error:
        raise directory_error(path, error) from error
    finally:
        directory.release()


def _readable(directory: Directory) -> bool:
    if not directory.file_numbers("segment"):
        return True
    if not directory.file_numbers("journal") and not directory.file_numbers("checkpoint"):
        return False
    try:
        return not Journal.inspect(directory).damaged
    except StoreError:
        return False


def _entries(directory: Directory, found: RebuildReport, on_progress: Callable[[int], object]) -> Iterator[Entry]:
    """Yield segments, namespaces and records in the order of a checkpoint, each before the entries that need it."""
    namespaces: dict[bytes, int] = {}
    names: set[bytes] = set()
    for number in directory.file_numbers("segment"):
        file = directory.disk.open(directory.join(f"segment-{number:06d}"), direct=True)
        try:
            footer = _read_footer(file)
            if footer is None or footer.number != number:
                found.unlabelled += 1
                continue
            found.segments += 1
            yield Entry(SEGMENT, segment=number, slot=footer.slots, record_bytes=footer.slot_bytes)
            for slot in range(footer.slots):
                on_progress(footer.slot_bytes)
                entry, namespace, name = _record(file, footer, slot)
                if entry is None:
                    found.unsound += bool(name)
                elif name in names:
                    found.doubles += 1
                else:
                    names.add(name)
                    if namespace not in namespaces:
                        namespaces[namespace] = len(namespaces)
                        yield Entry(NAMESPACE, namespace=namespaces[namespace], signature=namespace)
                    found.records += 1
                    found.size_bytes += entry.record_bytes
                    yield entry._replace(namespace=namespaces[namespace])
        finally:
            file.close()


def _read_footer(file: File) -> SegmentFooter | None:
    at = file.size() - FOOTER_BYTES
    if at < 0 or at % FOOTER_BYTES:
        return None
    page = bounce.thread_buffer(FOOTER_BYTES)
    footer = SegmentFooter.unpack(page) if file.read(at, [page]) == FOOTER_BYTES else None
    return footer if footer is not None and footer.slots * footer.slot_bytes == at else None


def _record(file: File, footer: SegmentFooter, slot: int) -> tuple[Entry | None, bytes, bytes]:
    """Read the record in a slot.

    Returns:
        Its put entry without the namespace's number, its namespace, and its name. Without a sound record the entry is
        None. The name is empty where the slot was never written.
    """
    data = bounce.thread_buffer(footer.slot_bytes)
    try:
        if file.read(slot * footer.slot_bytes, [data]) < footer.slot_bytes:
            raise OSError(errno.EIO, "short")
        if not any(data[:8]):
            return None, b"", b""
        header = read_header(data)
        area = header_area(header.decoded_bytes)
        verify(data, data[area:], header.address)
    except (OSError, RecordError):
        return None, b"", b"?"
    address = header.address
    entry = put_entry(header)._replace(
        group=address.group,
        shard=address.shard.pack(),
        signature=address.signature,
        parent=address.parent or UNKNOWN,
        segment=footer.number,
        slot=slot,
        record_bytes=area + record_bytes(header.stored_bytes) - header_area(header.stored_bytes),
    )
    return entry, address.namespace, address.name

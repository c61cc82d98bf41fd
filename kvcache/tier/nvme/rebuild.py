"""A store whose journal is lost, told anew by its records: each says itself what it is.

Only what was read whole and verified comes back, where the segment's label says which slots there are. A record that
was removed may come back too, as long as nothing was written over it: it is what its name says all the same.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from kvcache.block.record import RecordError, header_area, read_header, record_bytes, verify
from kvcache.errors import StoreError
from kvcache.os_env import File, Port
from kvcache.tier.nvme import segment as bounce
from kvcache.tier.nvme.directory import Directory, refusal
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
from kvcache.tier.nvme.segment import LABEL_BYTES, Label


@dataclass(slots=True)
class Rebuilt:
    """What was found. `unlabelled`: segments whose slots nobody knows any more, which the next start removes."""

    segments: int = 0
    records: int = 0
    size_bytes: int = 0
    unsound: int = 0  # slots that hold something else than a whole record, leftovers of earlier ones among them
    doubles: int = 0
    unlabelled: int = 0


def rebuild(
    path: str,
    *,
    dry_run: bool = False,
    told: Callable[[int], object] = lambda size_bytes: None,
    port: Port | None = None,
) -> Rebuilt:
    """Read every slot of a store that cannot be opened for its journal, and write a checkpoint of what is sound.
    `dry_run`: find out only. `told` hears of each slot's bytes. StoreError where another process has the directory, it
    is no store, or its journal is well."""
    port = port or Port()
    directory = Directory(port.disk, path)
    try:
        if _readable(directory):
            raise StoreError(f"nvme directory {path}: its journal is well, and says more than the records would")
        found = Rebuilt()
        entries = b"".join(entry.pack() for entry in _entries(directory, found, told))
        if not dry_run:
            number = max([0, *directory.numbered("journal"), *directory.numbered("checkpoint")]) + 1
            header = FileHeader(CHECKPOINT, number, 0, len(entries) // ENTRY_BYTES)
            directory.write(f"checkpoint-{number}", [header.pack(), *frames(iter([entries]), number)])
        return found
    except OSError as error:
        raise refusal(path, error) from error
    finally:
        directory.release()


def _readable(directory: Directory) -> bool:
    if not directory.numbered("segment"):
        return True
    if not directory.numbered("journal") and not directory.numbered("checkpoint"):
        return False
    try:
        return not Journal.look(directory).damaged
    except StoreError:
        return False


def _entries(directory: Directory, found: Rebuilt, told: Callable[[int], object]) -> Iterator[Entry]:
    """Segments, namespaces and records as a checkpoint has them, each before what needs it."""
    namespaces: dict[bytes, int] = {}
    names: set[bytes] = set()
    for number in directory.numbered("segment"):
        file = directory.disk.open(directory.join(f"segment-{number:06d}"), direct=True)
        try:
            label = _label(file)
            if label is None or label.number != number:
                found.unlabelled += 1
                continue
            found.segments += 1
            yield Entry(SEGMENT, segment=number, slot=label.slots, record_bytes=label.slot_bytes)
            for slot in range(label.slots):
                told(label.slot_bytes)
                entry, namespace, name = _record(file, label, slot)
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


def _label(file: File) -> Label | None:
    at = file.size() - LABEL_BYTES
    if at < 0 or at % LABEL_BYTES:
        return None
    page = bounce.buffer(LABEL_BYTES)
    label = Label.unpack(page) if file.read(at, [page]) == LABEL_BYTES else None
    return label if label is not None and label.slots * label.slot_bytes == at else None


def _record(file: File, label: Label, slot: int) -> tuple[Entry | None, bytes, bytes]:
    """The put entry of the record in a slot, without its namespace's number, that namespace, and the record's name.
    No entry where no whole record is there; no name either where the slot was never written."""
    data = bounce.buffer(label.slot_bytes)
    try:
        if file.read(slot * label.slot_bytes, [data]) < label.slot_bytes:
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
        segment=label.number,
        slot=slot,
        record_bytes=area + record_bytes(header.stored_bytes) - header_area(header.stored_bytes),
    )
    return entry, address.namespace, address.name

"""Tools that look at a whole store: summary, usage, scrub and audit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvcache.block.record import Address, Header, RecordError, header_area, read_header, verify
from kvcache.tier.nvme import segment as bounce
from kvcache.tier.nvme.allocator import Allocator
from kvcache.tier.nvme.catalog import Catalog
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import PUT, Entry
from kvcache.tier.tier import RecordFilter, ScrubReport

# Counts of the store, from memory: by namespace, by slot size, and of the journal.


def store_summary(catalog: Catalog) -> dict[str, Any]:
    with catalog.memory:
        entries, namespaces = catalog.index.puts()
        segments = list(catalog.allocator.segments.values())
        shapes: dict[int, list[int]] = defaultdict(lambda: [0] * 5)
        for segment in segments:
            counts = (1, segment.slots, segment.live, len(segment.free), segment.quarantined)
            shapes[segment.slot_bytes] = [a + b for a, b in zip(shapes[segment.slot_bytes], counts, strict=True)]
        journal = catalog.journal
        entries_behind, number, files_bytes = journal.entries_behind, journal.number, catalog.allocator.files_bytes
    return {
        "path": catalog.directory.path,
        "records": len(entries),
        "record_bytes": int(entries["record_bytes"].sum()),
        "segment_files": len(segments),
        "segment_bytes": files_bytes,
        "journal": {"number": number, "entries": entries_behind},
        "namespaces": [
            {
                "id": namespaces[int(of)].hex(),
                "records": int((mine := entries["namespace"] == of).sum()),
                "record_bytes": int(entries["record_bytes"][mine].sum()),
                "groups": np.unique(entries["group"][mine]).tolist(),
            }
            for of in np.unique(entries["namespace"])
        ],
        "slots": [
            dict(
                zip(("slot_bytes", "segments", "slots", "records", "free", "quarantined"), (size, *counts), strict=True)
            )
            for size, counts in sorted(shapes.items())
        ],
    }


def usage_by_namespace(catalog: Catalog) -> dict[bytes, tuple[int, int]]:
    """Return records and bytes by namespace. The lock is held for one segment at a time."""
    found: dict[int, tuple[int, int]] = {}
    with catalog.memory:
        segments, names = list(catalog.allocator.segments.values()), dict(catalog.index.namespaces)
    for segment in segments:
        with catalog.memory:
            rows = segment.columns()
            rows = rows[rows["kind"] == PUT][["namespace", "record_bytes"]]
        for namespace in np.unique(rows["namespace"]).tolist():
            sizes = rows["record_bytes"][rows["namespace"] == namespace]
            records, size = found.get(namespace, (0, 0))
            found[namespace] = records + len(sizes), size + int(sizes.sum())
    with catalog.memory:
        names |= catalog.index.namespaces
    return {names[namespace]: held for namespace, held in found.items() if namespace in names}


class InspectedRecord(NamedTuple):
    """A record as it was read. `data` is this thread's buffer, valid until the next record is inspected."""

    address: Address
    entry: Entry
    data: memoryview
    header: Header | None
    fault: OSError | RecordError | None


def inspect_record(catalog: Catalog, name: bytes) -> InspectedRecord | None:
    """Read and verify the record of a name; None where there is none, or it was replaced meanwhile."""
    with catalog.memory:
        found = catalog.index.find(name)
        if found is None:
            return None
        segment, slot, entry = found
        segment.users += 1
        address = catalog.index.address(entry)
    data = bounce.thread_buffer(entry.record_bytes)
    header, fault = None, None
    try:
        with catalog.files.open_file(segment) as file:
            got = segment.read(file, slot, [data])
        if got < entry.record_bytes:
            raise RecordError("short", f"{got} bytes of {entry.record_bytes}")
        header = read_header(data)
        # an earlier write of the same record is equal, byte by byte
        verify(data, data[header_area(header.decoded_bytes) :], address)
    except (OSError, RecordError) as error:
        fault = error
    with catalog.memory:
        unchanged = catalog.index.find(name) == found
    return InspectedRecord(address, entry, data, header, fault) if unchanged or fault is None else None


def inspect_all(catalog: Catalog) -> Iterator[InspectedRecord]:
    """Yield all records in the order of their slots on the drive."""
    with catalog.memory:
        names = sorted(catalog.index.locations, key=catalog.index.locations.__getitem__)
    for name in names:
        inspected = inspect_record(catalog, name)
        if inspected is not None:
            yield inspected


def scrub(
    catalog: Catalog, on_progress: Callable[[int], object], *, dry_run: bool, unwanted: RecordFilter | None = None
) -> ScrubReport:
    """Verify every record.

    Remove the damaged ones with their slots, and the unwanted ones. Reads and writes may run meanwhile.

    Args:
        on_progress: called with each record's size in bytes.
        dry_run: only count.
    """
    found = ScrubReport()
    for inspected in inspect_all(catalog):
        found.records += 1
        found.size_bytes += inspected.entry.record_bytes
        if isinstance(inspected.fault, OSError):
            found.unread += 1
        elif inspected.fault is not None and inspected.fault.foreign:
            found.foreign += 1
        elif inspected.fault is not None:
            if not dry_run:
                catalog.unpublish([(inspected.address, inspected.entry)], quarantine=True, insist=True)
                catalog.on_loss(inspected.address)
            found.damaged += 1
        elif unwanted is not None and inspected.header is not None and unwanted(inspected.header):
            if not dry_run:
                catalog.unpublish([(inspected.address, inspected.entry)], insist=True)
                catalog.on_loss(inspected.address)
            found.unwanted += 1
        on_progress(inspected.entry.record_bytes)
    return found


# Audit: do index, journal and files agree, and does every record verify? Writes may run meanwhile; a record that
# changes during the audit is not a fault.


def audit(catalog: Catalog, on_progress: Callable[[], object]) -> list[str]:
    """Return one line for each fault. `on_progress` is called once a record."""
    with catalog.journal_lock:  # only free slots change while the lock is held
        catalog.flush_deferred()
        with catalog.memory:
            faults = _audit_index(catalog)
        faults += _audit_journal(catalog) + _audit_files(catalog)
        names = list(catalog.index.locations)
    for name in names:
        faults += _audit_record(catalog, name)
        on_progress()
    return faults


def _audit_index(catalog: Catalog) -> list[str]:
    index = catalog.index
    faults = catalog.allocator.check(index.locations.values())
    for name in index.locations:
        found = index.find(name)
        assert found is not None
        segment, slot, entry = found
        here = (entry.kind, entry.segment, entry.slot, index.address(entry).name)
        if here != (PUT, segment.number, slot, name):
            faults.append(f"nvme: {name.hex()} leads to segment {segment.number} slot {slot}, which holds another")
    return faults


def _audit_journal(catalog: Catalog) -> list[str]:
    """Compare the state that a restart would find with the state in memory."""
    found = catalog.journal.read()
    replayed = Index(Allocator(catalog.allocator.capacity_bytes, catalog.allocator.segment_bytes))
    replayed.load(found.entries)
    faults = [f"nvme: {found.damaged} is damaged"] if found.damaged else []
    for name in replayed.locations.keys() ^ catalog.index.locations.keys():
        where = "the journal" if name in replayed.locations else "the index"
        faults.append(f"nvme: {name.hex()} is known to {where} alone")
    for name in replayed.locations.keys() & catalog.index.locations.keys():
        then, now = replayed.find(name), catalog.index.find(name)
        assert then is not None
        assert now is not None
        if then[2] != now[2]:
            faults.append(f"nvme: {name.hex()} is one record in the journal and another in the index")
    if replayed.allocator.segments.keys() != catalog.allocator.segments.keys():
        faults.append("nvme: the journal and memory know different segments")
    return faults


def _audit_files(catalog: Catalog) -> list[str]:
    existing = set(catalog.directory.file_numbers("segment"))
    missing = catalog.allocator.segments.keys() - existing
    faults = [f"nvme: segment {number} has no file" for number in sorted(missing)]
    strangers = existing - catalog.allocator.segments.keys() - catalog.files.orphan_files.keys()
    if strangers:
        faults.append(f"nvme: files of segments that the catalog does not list: {sorted(strangers)[:8]}")
    return faults


def _audit_record(catalog: Catalog, name: bytes) -> list[str]:
    inspected = inspect_record(catalog, name)
    if inspected is None or inspected.fault is None:
        return []
    return [f"nvme: {name.hex()} in segment {inspected.entry.segment} slot {inspected.entry.slot}: {inspected.fault}"]

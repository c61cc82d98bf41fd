"""Looking at records one by one, where nobody asked for them: is each what the journal says it is?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from kvcache.block.record import Address, Header, RecordError, header_area, read_header, verify
from kvcache.tier.nvme import segment as bounce
from kvcache.tier.nvme.allocator import Space
from kvcache.tier.nvme.catalog import Ledger
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.journal import PUT, Entry
from kvcache.tier.tier import Scrubbed, Unwanted

# What is in a store, counted: by namespace, by slot size, and the journal. From memory, at once.


def survey(ledger: Ledger) -> dict[str, Any]:
    with ledger.memory:
        entries, namespaces = ledger.index.puts()
        segments = list(ledger.space.segments.values())
        shapes: dict[int, list[int]] = defaultdict(lambda: [0] * 5)
        for segment in segments:
            counts = (1, segment.slots, segment.live, len(segment.free), segment.quarantined)
            shapes[segment.slot_bytes] = [a + b for a, b in zip(shapes[segment.slot_bytes], counts, strict=True)]
        journal = ledger.journal
        behind, number, files_bytes = journal.behind, journal.number, ledger.space.files_bytes
    return {
        "path": ledger.directory.path,
        "records": len(entries),
        "record_bytes": int(entries["record_bytes"].sum()),
        "segment_files": len(segments),
        "segment_bytes": files_bytes,
        "journal": {"number": number, "entries": behind},
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


def holdings(ledger: Ledger) -> dict[bytes, tuple[int, int]]:
    """Records and bytes by namespace. Nobody waits for longer than one segment takes."""
    found: dict[int, tuple[int, int]] = {}
    with ledger.memory:
        segments, names = list(ledger.space.segments.values()), dict(ledger.index.namespaces)
    for segment in segments:
        with ledger.memory:
            rows = segment.columns()
            rows = rows[rows["kind"] == PUT][["namespace", "record_bytes"]]
        for namespace in np.unique(rows["namespace"]).tolist():
            sizes = rows["record_bytes"][rows["namespace"] == namespace]
            records, size = found.get(namespace, (0, 0))
            found[namespace] = records + len(sizes), size + int(sizes.sum())
    with ledger.memory:
        names |= ledger.index.namespaces
    return {names[namespace]: held for namespace, held in found.items() if namespace in names}


class Seen(NamedTuple):
    """A record as it was found. `data`, where it is sound, is this thread's buffer: good until the next one."""

    address: Address
    entry: Entry
    data: memoryview
    header: Header | None
    fault: OSError | RecordError | None


def look(ledger: Ledger, name: bytes) -> Seen | None:
    """Read the record of a name; None where there is none, or it was replaced meanwhile."""
    with ledger.memory:
        found = ledger.index.find(name)
        if found is None:
            return None
        segment, slot, entry = found
        segment.users += 1
        address = ledger.index.address(entry)
    data = bounce.buffer(entry.record_bytes)
    header, fault = None, None
    try:
        with ledger.files.using(segment) as file:
            got = segment.read(file, slot, [data])
        if got < entry.record_bytes:
            raise RecordError("short", f"{got} bytes of {entry.record_bytes}")
        header = read_header(data)
        # an earlier write of the same record will do: it has the same bytes
        verify(data, data[header_area(header.decoded_bytes) :], address)
    except (OSError, RecordError) as error:
        fault = error
    with ledger.memory:
        unchanged = ledger.index.find(name) == found
    return Seen(address, entry, data, header, fault) if unchanged or fault is None else None


def every(ledger: Ledger) -> Iterator[Seen]:
    """All records, in the order in which they lie on the drive."""
    with ledger.memory:
        names = sorted(ledger.index.places, key=ledger.index.places.__getitem__)
    for name in names:
        seen = look(ledger, name)
        if seen is not None:
            yield seen


def scrub(
    ledger: Ledger, told: Callable[[int], object], *, dry_run: bool, unwanted: Unwanted | None = None
) -> Scrubbed:
    """Read and check every record; what is damaged leaves, its slot is not used again, and so does what is `unwanted`.
    `told` hears of each record's bytes. Reads and writes go on meanwhile."""
    found = Scrubbed()
    for seen in every(ledger):
        found.records += 1
        found.size_bytes += seen.entry.record_bytes
        if isinstance(seen.fault, OSError):
            found.unread += 1
        elif seen.fault is not None and seen.fault.foreign:
            found.foreign += 1
        elif seen.fault is not None:
            if not dry_run:
                ledger.withdraw([(seen.address, seen.entry)], quarantine=True, insist=True)
                ledger.on_loss(seen.address)
            found.damaged += 1
        elif unwanted is not None and seen.header is not None and unwanted(seen.header):
            if not dry_run:
                ledger.withdraw([(seen.address, seen.entry)], insist=True)
                ledger.on_loss(seen.address)
            found.unwanted += 1
        told(seen.entry.record_bytes)
    return found


# A full audit of a store: does all that says what is in it agree, and is every record what it says it is? Reads every
# record. Writes go on meanwhile: what changes while it is looked at is not a fault.


def audit(ledger: Ledger, told: Callable[[], object]) -> list[str]:
    """One line a fault. `told` is called once a record."""
    with ledger.journaling:  # nothing but free slots changes meanwhile
        ledger.say()
        with ledger.memory:
            faults = _memory(ledger)
        faults += _journal(ledger) + _files(ledger)
        places = list(ledger.index.places)
    for name in places:
        faults += _record(ledger, name)
        told()
    return faults


def _memory(ledger: Ledger) -> list[str]:
    index = ledger.index
    faults = ledger.space.check(index.places.values())
    for name in index.places:
        found = index.find(name)
        assert found is not None
        segment, slot, entry = found
        here = (entry.kind, entry.segment, entry.slot, index.address(entry).name)
        if here != (PUT, segment.number, slot, name):
            faults.append(f"nvme: {name.hex()} leads to segment {segment.number} slot {slot}, which holds another")
    return faults


def _journal(ledger: Ledger) -> list[str]:
    """What a restart would find is what is known now."""
    found = ledger.journal.read()
    replayed = Index(Space(ledger.space.capacity_bytes, ledger.space.segment_bytes))
    replayed.load(found.entries)
    faults = [f"nvme: {found.damaged} is damaged"] if found.damaged else []
    for name in replayed.places.keys() ^ ledger.index.places.keys():
        where = "the journal" if name in replayed.places else "the index"
        faults.append(f"nvme: {name.hex()} is known to {where} alone")
    for name in replayed.places.keys() & ledger.index.places.keys():
        then, now = replayed.find(name), ledger.index.find(name)
        assert then is not None
        assert now is not None
        if then[2] != now[2]:
            faults.append(f"nvme: {name.hex()} is one record in the journal and another in the index")
    if replayed.space.segments.keys() != ledger.space.segments.keys():
        faults.append("nvme: the journal and memory know different segments")
    return faults


def _files(ledger: Ledger) -> list[str]:
    there = set(ledger.directory.numbered("segment"))
    missing = ledger.space.segments.keys() - there
    faults = [f"nvme: segment {number} has no file" for number in sorted(missing)]
    strangers = there - ledger.space.segments.keys() - ledger.files.leftovers.keys()
    if strangers:
        faults.append(f"nvme: files of segments that nobody knows: {sorted(strangers)[:8]}")
    return faults


def _record(ledger: Ledger, name: bytes) -> list[str]:
    seen = look(ledger, name)
    if seen is None or seen.fault is None:
        return []
    return [f"nvme: {name.hex()} in segment {seen.entry.segment} slot {seen.entry.slot}: {seen.fault}"]

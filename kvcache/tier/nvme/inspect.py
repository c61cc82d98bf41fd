"""Looking at records one by one, where nobody asked for them: is each what the journal says it is?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvcache.block.record import Address, Header, RecordError, header_area, read_header, verify
from kvcache.tier.nvme import bounce
from kvcache.tier.nvme.entry import Entry
from kvcache.tier.nvme.ledger import Ledger
from kvcache.tier.tier import Scrubbed, Unwanted


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

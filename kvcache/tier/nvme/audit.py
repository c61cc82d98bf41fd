"""A full audit of a store: does all that says what is in it agree, and is every record what it says it is?

Reads every record. Writes go on meanwhile: what changes while it is looked at is not a fault.
"""

from __future__ import annotations

from collections.abc import Callable

from kvcache.tier.nvme.entry import PUT
from kvcache.tier.nvme.index import Index
from kvcache.tier.nvme.ledger import Ledger
from kvcache.tier.nvme.scrub import look
from kvcache.tier.nvme.space import Space


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

"""The index of a store: from a record's name to its segment number and slot, in one integer.

All other facts of a record are in its segment's row. A restart rebuilds the index from the journal's entries in bulk;
only the dictionary is filled one entry at a time. `OwnerFile`, at the end, keeps the owners of namespaces.

Thread safety: `Index` has none; `Catalog` calls it under its `memory` lock. `OwnerFile` has its own lock.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_digest

from kvcache.block.layout import Shard
from kvcache.block.namespace import OWNER_BYTES, Owner
from kvcache.block.record import Address
from kvcache.tier.nvme.allocator import Allocator
from kvcache.tier.nvme.directory import Directory
from kvcache.tier.nvme.journal import (
    COLUMNS,
    ENTRY_BYTES,
    NAMESPACE,
    PUT,
    QUARANTINE,
    REMOVE,
    RETIRE,
    SEGMENT,
    SYNCED,
    UNKNOWN,
    Entry,
    names,
)
from kvcache.tier.nvme.segment import Segment, SlotIO

RESYNC_BYTES = 512 << 20
"""At a start, up to this much unsynced data is written again before the next sync.

More than this is only synced, since only a process with durability `none` ends with more.
"""


class Index:
    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.locations: dict[bytes, int] = {}
        self.namespaces: dict[int, bytes] = {}  # by their number in entries
        self._numbers: dict[bytes, int] = {}
        self._next_number = 0

    def find(self, name: bytes) -> tuple[Segment, int, Entry] | None:
        location = self.locations.get(name)
        if location is None:
            return None
        segment = self.allocator.segments[location >> 32]
        slot = location & 0xFFFFFFFF
        return segment, slot, segment.row(slot)

    def matches(self, entry: Entry, address: Address) -> bool:
        """Return whether this is the entry of exactly the record of this address."""
        return (
            entry.signature == address.signature
            and self.namespaces[entry.namespace] == address.namespace
            and (not address.parent or entry.parent in {UNKNOWN, address.parent})
        )

    def address(self, entry: Entry) -> Address:
        parent = b"" if entry.parent == UNKNOWN else entry.parent
        namespace = self.namespaces[entry.namespace]
        return Address(namespace, entry.signature, parent, entry.group, Shard.unpack(entry.shard))

    def entries(self, slot_ios: Sequence[SlotIO]) -> list[Entry]:
        """Return the entries that publish these records: new namespaces, then one put entry a record.

        Also sets `entry` of each.
        """
        new: dict[bytes, int] = {}
        for slot_io in slot_ios:
            address = slot_io.address
            number = self._numbers.get(address.namespace)
            if number is None:
                number = new.setdefault(address.namespace, self._next_number + len(new))
            slot_io.entry = slot_io.entry._replace(
                group=address.group,
                shard=address.shard.pack(),
                namespace=number,
                signature=address.signature,
                parent=address.parent or UNKNOWN,
                segment=slot_io.segment.number,
                slot=slot_io.slot,
                record_bytes=slot_io.record_bytes,
            )
        named = [Entry(NAMESPACE, namespace=number, signature=namespace) for namespace, number in new.items()]
        return named + [slot_io.entry for slot_io in slot_ios]

    def insert(self, slot_ios: Sequence[SlotIO]) -> None:
        """Make these records findable; the journal has their entries."""
        for slot_io in slot_ios:
            if slot_io.address.namespace not in self._numbers:
                self._name(slot_io.address.namespace, slot_io.entry.namespace)
            slot_io.segment.fill(slot_io.slot, slot_io.entry.pack())
            self.locations[slot_io.name] = slot_io.segment.number << 32 | slot_io.slot

    def delete(self, name: bytes, *, quarantine: bool = False) -> Segment:
        """Remove a record; return its segment."""
        location = self.locations.pop(name)
        segment = self.allocator.segments[location >> 32]
        self.allocator.clear(segment, location & 0xFFFFFFFF, quarantine=quarantine)
        return segment

    def _name(self, namespace: bytes, number: int) -> None:
        self._numbers[namespace] = number
        self.namespaces[number] = namespace
        self._next_number = max(self._next_number, number + 1)

    def addresses(self, segment: Segment) -> list[Address]:
        return [self.address(entry) for slot in range(segment.slots) if (entry := segment.row(slot)).kind == PUT]

    # Whole states: restart and checkpoint.

    def load(self, data: bytes, safe: int = 0) -> None:
        """Rebuild the index from the journal's entries, in order; a sync has covered the first `safe` of them."""
        entries = np.frombuffer(data, COLUMNS)
        kinds = entries["kind"]
        for row in entries[kinds == NAMESPACE]:
            self.namespaces[int(row["namespace"])] = row["signature"].tobytes()
        self._numbers = {namespace: number for number, namespace in self.namespaces.items()}
        self._next_number = max(self.namespaces, default=-1) + 1
        retired = set(entries["segment"][kinds == RETIRE].tolist())
        segments: dict[int, Segment] = {}
        for row in entries[kinds == SEGMENT]:
            number = int(row["segment"])
            if number not in retired and number not in segments:
                segments[number] = Segment(number, int(row["record_bytes"]), int(row["slot"]))
        if retired:
            self.allocator.next_number = max(self.allocator.next_number, max(retired) + 1)
        puts = self._load_records(entries, safe, segments)
        for segment in segments.values():
            self.allocator.claim(segment)
            self.allocator.add(segment)
        location = puts["segment"].astype(np.uint64) << np.uint64(32) | puts["slot"]
        self.locations = dict(zip(names(puts), location.tolist(), strict=True))
        if len(self.locations) != len(puts):
            self._drop_duplicate_names(puts)

    def _load_records(self, entries: NDArray[np.void], safe: int, segments: dict[int, Segment]) -> NDArray[np.void]:
        """Fill the rows of the segments; return the put entries that are valid."""
        kinds = entries["kind"]
        at = np.flatnonzero((kinds == PUT) | (kinds == REMOVE) | (kinds == QUARANTINE))
        location = entries["segment"][at].astype(np.uint64) << np.uint64(32) | entries["slot"][at]
        _, from_end = np.unique(location[::-1], return_index=True)
        at = at[len(at) - 1 - from_end]  # the last entry of each slot, ordered by segment and slot
        last = entries[at]
        named = np.isin(last["namespace"], list(self.namespaces))
        there = (last["kind"] == QUARANTINE) | ((last["kind"] == PUT) & named)
        last, synced = last[there], (at < safe)[there]
        segment, parts = np.ascontiguousarray(last["segment"]), []
        numbers = np.array(list(segments), np.uint32)
        bounds = zip(np.searchsorted(segment, numbers), np.searchsorted(segment, numbers, "right"), strict=True)
        unsynced_bytes = int(last["record_bytes"][~synced & (last["kind"] == PUT)].sum())
        for s, (begin, end) in zip(segments.values(), bounds, strict=True):
            mine = slice(begin, end)
            fits = last["slot"][mine] < s.slots
            parts.append(last[mine][fits])
            s.load(parts[-1], synced[mine][fits], rewrite_slots=unsynced_bytes <= RESYNC_BYTES)
        last = np.concatenate(parts) if parts else last[:0]
        puts: NDArray[np.void] = last[last["kind"] == PUT]
        return puts

    def _drop_duplicate_names(self, puts: NDArray[np.void]) -> None:
        """Keep one of two slots with the same name, and free the others. Only damage causes this."""
        for name, row in zip(names(puts), puts, strict=True):
            location = int(row["segment"]) << 32 | int(row["slot"])
            if self.locations[name] != location:
                self.allocator.clear(self.allocator.segments[location >> 32], location & 0xFFFFFFFF)

    def drop_segment(self, segment: Segment) -> int:
        """Drop a segment and all its records after a restart; return how many there were."""
        rows = segment.columns()
        removed = names(rows[rows["kind"] == PUT])
        for name in removed:
            del self.locations[name]
        self.allocator.retire(segment)
        return len(removed)

    def state(self, *, synced: bool) -> tuple[list[bytes], int]:
        """Return the whole state as entries, in pieces, and their number, for a checkpoint.

        Drops the numbers of namespaces without records.

        Args:
            synced: the store tracks which records a sync has covered.
        """
        rows = [s.state() for s in self.allocator.segments.values()]
        covered, others = [row[0] for row in rows], [row[1] for row in rows]
        used = {n for part in covered + others for n in np.unique(np.frombuffer(part, COLUMNS)["namespace"]).tolist()}
        self.namespaces = {number: namespace for number, namespace in self.namespaces.items() if number in used}
        self._numbers = {namespace: number for number, namespace in self.namespaces.items()}
        pieces = [s.entry.pack() for s in self.allocator.segments.values()]
        pieces += [
            Entry(NAMESPACE, namespace=n, signature=namespace).pack() for n, namespace in self.namespaces.items()
        ]
        pieces = [b"".join(pieces), *covered]
        if synced:
            pieces.append(Entry(SYNCED, write_id=sum(map(len, pieces)) // ENTRY_BYTES).pack())
        pieces += others
        return pieces, sum(map(len, pieces)) // ENTRY_BYTES

    def puts(self) -> tuple[NDArray[np.void], dict[int, bytes]]:
        """Return a copy of the put entries of all records, and the namespaces by number."""
        rows = [s.columns() for s in self.allocator.segments.values()]
        found = [columns[columns["kind"] == PUT] for columns in rows] or [np.zeros(0, COLUMNS)]
        return np.concatenate(found), dict(self.namespaces)


# Owners of namespaces: a file `owners` with one checksummed row a namespace. A torn or damaged row is ignored.

NAME = "owners"
_ROW = 32 + OWNER_BYTES


class OwnerFile:
    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        self._known: dict[bytes, Owner] | None = None

    def all(self) -> Mapping[bytes, Owner]:
        with self._lock:
            return dict(self._load())

    def note(self, namespace: bytes, owner: Owner) -> None:
        """Store the owner of a namespace.

        Raises:
            OSError: the file could not be written.
        """
        with self._lock:
            if self._load().get(namespace) != owner:
                self._write({**self._load(), namespace: owner})

    def forget(self, namespace: bytes) -> None:
        with self._lock:
            if namespace in self._load():
                self._write({name: owner for name, owner in self._load().items() if name != namespace})

    def _load(self) -> dict[bytes, Owner]:
        if self._known is None:
            self._known, data = {}, b""
            with suppress(OSError):
                data = bytes(self._directory.read(NAME))
            for at in range(0, len(data), _ROW + 8):
                row, checksum = data[at : at + _ROW], data[at + _ROW : at + _ROW + 8]
                owner = Owner.read(row[32:])
                if owner is not None and xxh3_64_digest(row) == checksum:
                    self._known[row[:32]] = owner
        return self._known

    def _write(self, rows: dict[bytes, Owner]) -> None:
        packed = (namespace + owner.pack() for namespace, owner in rows.items())
        self._directory.write(NAME, [b"".join(row + xxh3_64_digest(row) for row in packed)])
        self._known = rows

"""The host tier: records in slots of the arena, found by address.

Besides the tier's contract it hands out its slots, so that payloads move between an engine's pages, the arena and lower
tiers without another copy. A writer calls `allocate`, fills the slot and calls `publish`. A reader calls `acquire`,
reads the slot and calls `arena.release`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

from kvcache.block.record import (
    Address,
    RecordError,
    expiry_field,
    header_area,
    read_header,
    record_bytes,
    seal,
    verify,
)
from kvcache.errors import ClosedError
from kvcache.os_env import OsEnv
from kvcache.tier.host.arena import Arena, Slab, Slot
from kvcache.tier.tier import DEMAND, BlockingCalls, Op, Outcome, Segments, Ticket, Usage, check_segments, same_record


class HostRecord:
    """A published record: its address, slot and payload size."""

    __slots__ = ("address", "payload_bytes", "slot")

    def __init__(self, address: Address, slot: Slot, payload_bytes: int) -> None:
        self.address, self.slot, self.payload_bytes = address, slot, payload_bytes


def segments(held: HostRecord) -> tuple[memoryview, memoryview]:
    """Return header area and payload of a record, valid while the caller holds a reference."""
    view, area = held.slot.view, header_area(held.payload_bytes)
    return view[:area], view[area:]


class HostTier(BlockingCalls):
    name = "host"
    durable = shared = False

    def __init__(
        self,
        *,
        capacity_bytes: int,
        slab_bytes: int = 256 << 20,
        verify_arena: bool = False,
        shared: bool = False,
        quota: Callable[[str], int] | None = None,
        os_env: OsEnv | None = None,
    ) -> None:
        """`quota`: the most bytes of a tenant; all of the tier where None."""
        self._os_env = os_env or OsEnv()
        self._executor = self._os_env.executor(1, "host")
        self.arena = Arena(capacity_bytes, slab_bytes, self._executor, shared=shared, quota=quota)
        self._executor.submit(self.arena.prepare)
        self._verify = verify_arena
        self._closed = False
        self._records: dict[bytes, HostRecord] = {}
        self._lock = threading.Lock()

    # Slots.

    def allocate(self, record_bytes: int, tenant: str = "default") -> Slot | None:
        """Allocate a slot that only the caller sees; None where there is no capacity."""
        return self.arena.allocate(record_bytes, tenant)

    def publish(self, address: Address, slot: Slot, payload_bytes: int) -> bool:
        """Make a filled slot visible.

        Returns:
            True where the tier took over the caller's reference. False where a record of this name is here already:
            the caller keeps its reference.
        """
        return self.publish_all([address], [slot], payload_bytes)[0]

    def publish_all(self, addresses: Sequence[Address], slots: Sequence[Slot], payload_bytes: int) -> list[bool]:
        """As `publish`, for each of these."""
        made = []
        with self._lock:
            for address, slot in zip(addresses, slots, strict=True):
                name = address.name
                new = name not in self._records
                if new:
                    slot.name = name
                    self._records[name] = HostRecord(address, slot, payload_bytes)
                made.append(new)
        return made

    def acquire(self, address: Address) -> HostRecord | None:
        """Return the record with a reference for the caller to release; None where it is not here."""
        return self.acquire_all([address])[0]

    def acquire_all(self, addresses: Sequence[Address]) -> list[HostRecord | None]:
        """As `acquire`, for each of these."""
        with self._lock:
            present = self._find(addresses)
            self.arena.acquire(*[held.slot for held in present if held is not None])
        return present

    def unpublish(self, address: Address) -> bool:
        """Make a record invisible; its slot is freed with the last reference. False where it is not here."""
        with self._lock:
            (held,) = self._find([address])
            if held is None:
                return False
            del self._records[held.slot.name]
        self.arena.release(held.slot)
        return True

    def unpublish_named(self, names: Sequence[bytes], signatures: Sequence[bytes]) -> list[HostRecord | None]:
        """As `unpublish`, for each of these names; returns the records that were here."""
        removed: list[HostRecord | None] = []
        with self._lock:
            for name, signature in zip(names, signatures, strict=True):
                held = self._records.get(name)
                if held is not None and held.address.signature == signature:
                    del self._records[name]
                    removed.append(held)
                else:
                    removed.append(None)
        self.arena.release(*[held.slot for held in removed if held is not None])
        return removed

    def _find(self, addresses: Sequence[Address]) -> list[HostRecord | None]:
        found = (self._records.get(address.name) for address in addresses)
        return [
            held if held is not None and same_record(held.address, address) else None
            for held, address in zip(found, addresses, strict=True)
        ]

    def evacuate_slab(self, slot_bytes: int, tenant: str) -> bool:
        """Empty a slab of another class by moving its records to other slabs of that class.

        Returns:
            True where a slab was emptied. A slab is moved only if its records fit and no request holds one.
        """
        slab = self.arena.find_evacuable(slot_bytes, tenant)
        if slab is None:
            return False
        slab.closing = True
        try:
            for slot in list(slab.slots.values()):
                target = self.arena.allocate(*slab.kind, moving=True)
                if target is None or not self._move(slot, target):
                    return not slab.slots
        finally:
            slab.closing = False
        return not slab.slots

    def _move(self, slot: Slot, target: Slot) -> bool:
        """Move the record of a slot to another slot; False, and the target is released, where the record is in use."""
        with self._lock:  # no reference is acquired meanwhile, so the header is not written
            held = self._records.get(slot.name)
            if held is None or held.slot is not slot or slot.references != 1:
                removed, moved = target, held is None or held.slot is not slot
            else:
                target.view[:] = slot.view
                target.name, target.sealed, target.expires_ms = slot.name, slot.sealed, slot.expires_ms
                self._records[slot.name] = HostRecord(held.address, target, held.payload_bytes)
                removed, moved = slot, True
        self.arena.release(removed)
        return moved

    def seal(self, held: HostRecord) -> None:
        """Write the header and checksums, if not done yet.

        Background threads call this before a record is demoted. The caller holds a reference.
        """
        if not held.slot.sealed:
            header, payload = segments(held)
            fields = expiry_field(held.slot.expires_ms)
            seal(header, payload, held.address, stored_bytes=held.payload_bytes, fields=fields)
            held.slot.sealed = True

    def is_intact(self, held: HostRecord) -> bool:
        """Return whether a sealed record passes every check, with `verify_arena`.

        Without `verify_arena` return True. A damaged record is unpublished.
        """
        if not (self._verify and held.slot.sealed):
            return True
        try:
            verify(*segments(held), held.address)
        except RecordError:
            self.unpublish(held.address)
            return False
        return True

    # Handover between processes.

    def detach_slabs(self, within_s: float) -> dict[Slab, list[HostRecord]]:
        """Give up all records, and return those that another process may take over, by slab.

        Call this when only clients of this process still use the arena. A slab in which a client may still write is
        left out, and so are records that cannot be sealed within `within_s`.
        """
        end = self._os_env.clock.now() + within_s
        with self._lock:
            records, self._records = self._records, {}
        detached: dict[Slab, list[HostRecord]] = {}
        for slab in self.arena.slabs():
            present = [records.get(slot.name) for slot in slab.slots.values()]
            held = [h for h, slot in zip(present, slab.slots.values(), strict=True) if h is not None and h.slot is slot]
            if len(held) < len(slab.slots) or not slab.region.shared:
                continue
            for one in held:
                if self._os_env.clock.now() < end:
                    self.seal(one)
            detached[slab] = [one for one in held if one.slot.sealed]
        return detached

    def adopt(self, slab: Slab, rows: Sequence[tuple[int, Address, int, int]]) -> list[Address]:
        """Take over a slab that another process left.

        Args:
            rows: slot, address, payload bytes and expiry of each record.

        Returns:
            The addresses that are here now. A record whose header is damaged or of another address is left out.
        """
        if any(record_bytes(payload_bytes) != slab.slot_bytes for _, _, payload_bytes, _ in rows):
            return []
        slots = self.arena.adopt(slab, [i for i, _, _, _ in rows]) or []
        admitted = []
        for slot, (_, address, payload_bytes, expires_ms) in zip(slots, rows, strict=False):
            slot.sealed, slot.expires_ms = True, expires_ms
            held = HostRecord(address, slot, payload_bytes)
            if self._is_adoptable(held) and self.publish(address, slot, payload_bytes):
                admitted.append(address)
            else:
                self.arena.release(slot)
        return admitted

    def _is_adoptable(self, held: HostRecord) -> bool:
        header, payload = segments(held)
        try:
            found = verify(header, payload, held.address) if self._verify else read_header(header)
        except RecordError:
            return False
        return (
            same_record(found.address, held.address)
            and found.address.name == held.address.name
            and (found.codec, found.stored_bytes) == ("raw", held.payload_bytes)
        )

    # The tier contract.

    def submit(
        self,
        op: Op,
        addresses: Sequence[Address],
        segments: Sequence[Segments] = (),
        *,
        priority: int = DEMAND,
        deadline: float | None = None,
        on_outcome: Callable[[int, Outcome], None] | None = None,
    ) -> Ticket:
        """Settle every block before returning; memory needs no queue."""
        check_segments(op, addresses, segments)
        if self._closed:
            raise ClosedError("the host tier was closed; open the cache again")
        ticket = Ticket(len(addresses), on_outcome)
        late = deadline is not None and self._os_env.clock.now() > deadline
        for i, address in enumerate(addresses):
            if late:
                ticket.settle(i, Outcome.TIMED_OUT)
            elif op == "read":
                ticket.settle(i, *self._read(address, segments[i]))
            elif op == "write":
                ticket.settle(i, *self._write(address, segments[i]))
            elif op == "contains":
                with self._lock:
                    held = self._records.get(address.name)
                ticket.settle(i, Outcome.DONE if held and same_record(held.address, address) else Outcome.NOT_FOUND)
            else:
                ticket.settle(i, Outcome.DONE if self.unpublish(address) else Outcome.NOT_FOUND)
        return ticket

    def _read(self, address: Address, into: Segments) -> tuple[Outcome, str]:
        held = self.acquire(address)
        if held is None:
            return Outcome.NOT_FOUND, ""
        try:
            self.seal(held)
            header, payload = segments(held)
            try:
                verify(header, payload, address) if self._verify else read_header(header)
            except RecordError as error:
                self.unpublish(address)
                return Outcome.DAMAGED, error.check
            if sum(map(len, into)) < len(held.slot.view):
                return Outcome.FAILED, "length"
            at, view = 0, held.slot.view
            for segment in into:
                part = view[at : at + len(segment)]
                segment[: len(part)] = part
                at += len(part)
            return Outcome.DONE, ""
        finally:
            self.arena.release(held.slot)

    def _write(self, address: Address, record: Segments) -> tuple[Outcome, str]:
        with self._lock:
            held = self._records.get(address.name)
        if held is not None:
            return (Outcome.DONE, "") if same_record(held.address, address) else (Outcome.FAILED, "key")
        try:
            header = read_header(record[0])
        except RecordError as error:
            return Outcome.FAILED, error.check
        if not same_record(header.address, address):
            return Outcome.FAILED, "address"
        slot = self.allocate(record_bytes(header.stored_bytes))
        if slot is None:
            return Outcome.NO_CAPACITY, ""
        at, view = 0, slot.view
        for segment in record:
            part = segment[: len(view) - at]
            view[at : at + len(part)] = part
            at += len(part)
        slot.sealed = True
        if not self.publish(address, slot, header.stored_bytes):
            self.arena.release(slot)
        return Outcome.DONE, ""

    def free_slots(self, record_bytes: int) -> int:
        return self.arena.free_slots(record_bytes)

    def colocated(self, address: Address) -> list[Address]:
        with self._lock:
            held = self._records.get(address.name)
        return [] if held is None else self.records_in_slab(held.slot.slab)

    def records_in_slab(self, slab: Slab) -> list[Address]:
        """Return the records in a slab."""
        with self._lock:
            found = (self._records.get(slot.name) for slot in list(slab.slots.values()))
            return [held.address for held in found if held is not None and held.slot.slab is slab]

    def sample_slab(self, slab: Slab, most: int, turn: int) -> list[Address] | None:
        """As `records_in_slab` for at most `most` records.

        Another `turn` selects others. None where one is read or written.
        """
        names = self.arena.sample_names(slab, most, turn)
        if names is None:
            return None
        with self._lock:
            found = [self._records.get(name) for name in names]
        present = [held.address for held in found if held is not None and held.slot.slab is slab]
        return present if len(present) == len(names) else None

    def scan(self) -> Iterator[Address]:
        with self._lock:
            addresses = [held.address for held in self._records.values()]
        yield from addresses

    def health_issues(self) -> list[str]:
        return []

    def sync(self) -> bool:
        """Nothing to sync."""
        return True

    def wipe(self) -> bool:
        self.arena.wipe()
        return True

    def usage(self) -> Usage:
        return Usage(len(self._records), self.arena.used_bytes, self.arena.capacity_bytes)

    def check(self) -> list[str]:
        faults = self.arena.check()
        with self._lock:
            records = list(self._records.values())
            published = {id(held.slot) for held in records}
        if len(published) != len(records):
            faults.append("host: two records in one slot")
        for held in records:
            with self._lock:  # the cache runs meanwhile: a record that was moved or removed no longer owns its slot
                if self._records.get(held.address.name) is not held:
                    continue
                if held.slot.slab.slots.get(held.slot.i) is not held.slot:
                    faults.append(f"host: {held.address.name.hex()} stands in a slot that was released")
                    continue
                self.arena.acquire(held.slot)
            try:
                if held.slot.sealed:
                    verify(*segments(held), held.address)
            except RecordError as error:
                faults.append(f"host: {held.address.name.hex()}: {error}")
            finally:
                self.arena.release(held.slot)
        return faults

    def close(self) -> bool:
        if self._closed:
            return True
        self._closed = True
        self._executor.close()
        with self._lock:
            records, self._records = list(self._records.values()), {}
        self.arena.release(*[held.slot for held in records])
        return True

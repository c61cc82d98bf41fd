"""The contract of a tier: a place that holds records, batch by batch.

    ticket = tier.submit("read", addresses, segments, priority=WAITING, deadline=clock.now() + 0.2)
    ticket.outcomes        # one a block, readable as they come
    ticket.wait(0.2)

Promises, for every implementation (`tests/contract/test_tier.py` holds them to it):

- A read that says DONE filled the segments with the record written under that address, and its header, namespace,
  signature, parent (where both sides know it), lengths and checksums were compared. Anything else leaves the segments
  undefined and says why.
- A write that says DONE is visible to reads that start later, and only whole: no read ever sees a part of it.
  Writing where the same signature is held already says DONE and changes nothing.
- Nothing is raised for data, devices or deadlines: those are outcomes. Misuse (wrong number of segments, a closed
  tier) raises.
- What was submitted ends: DONE, another outcome, or LATE when the deadline passes before it began.
- All methods may be called from any thread.

Segments belong to the caller, who keeps them unchanged (write) or unread (read) until the block's outcome is there.
A block's first segment is the record's header area, the rest its payload, in order; see `kvcache/block/record.py`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol

from kvcache.block.cipher import RecordSigner
from kvcache.block.namespace import Owner
from kvcache.block.record import ALIGNMENT, KEYED_DIGEST, Address, Header, RecordError, read_header, with_field

Op = Literal["read", "write", "contains", "remove"]
Segments = Sequence[memoryview]
RecordFilter = Callable[[Header], bool]
"""Whether a sound record should not be there."""

DEMAND, PREFETCH, BACKGROUND = 0, 1, 2
"""Priorities: a request waits for it; it was asked for ahead of need; nobody waits."""


class Outcome(Enum):
    """What became of one block. `DONE` is the only one that gives bytes, visibility or presence."""

    PENDING = "pending"
    DONE = "done"
    NOT_FOUND = "absent"  # not here
    DAMAGED = "damaged"  # here, a check failed: a miss, and removed if still the same write
    INCOMPATIBLE = "foreign"  # here, of another version or not interpretable: a miss, left alone
    NO_CAPACITY = "no_room"  # a write that found none
    DROPPED = "dropped"  # a full queue
    TIMED_OUT = "late"  # the deadline passed
    FAILED = "failed"  # the device or the peer said so
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # that of Enum is written in Python, and each block's outcome is counted

    @property
    def settled(self) -> bool:
        return self is not PENDING


PENDING = Outcome.PENDING


class Ticket:
    """A batch under way: one outcome a block.

    `on_outcome(i, outcome)` is called once a block, from the thread that settles it, before waiters wake.
    """

    def __init__(self, count: int, on_outcome: Callable[[int, Outcome], None] | None = None) -> None:
        self._outcomes = [Outcome.PENDING] * count
        self._checks: dict[int, str] = {}
        self._left = count
        self._changed = threading.Condition()
        self._on_outcome = on_outcome
        self.cancelled = False

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(self._outcomes)

    @property
    def checks(self) -> dict[int, str]:
        """By block, the name of the check that a DAMAGED or FOREIGN record failed, or the error of a FAILED one."""
        return dict(self._checks)

    @property
    def done(self) -> bool:
        return self._left == 0

    def settled(self, i: int) -> bool:
        return self._outcomes[i].settled

    def settle(self, i: int, outcome: Outcome, check: str = "") -> None:
        """Called by the tier, once a block; a second call for a block changes nothing."""
        with self._changed:
            if self._outcomes[i].settled:
                return
            if check:
                self._checks[i] = check
            self._outcomes[i] = outcome
        if self._on_outcome is not None:
            self._on_outcome(i, outcome)
        with self._changed:
            self._left -= 1
            if not self._left:
                self._changed.notify_all()

    def settle_many(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """As `settle`, of the blocks from `first` on."""
        with self._changed:
            new = [(i, outcome) for i, outcome in enumerate(outcomes, first) if self._outcomes[i] is PENDING]
            for i, outcome in new:
                self._outcomes[i] = outcome
        if self._on_outcome is not None:
            for i, outcome in new:
                self._on_outcome(i, outcome)
        with self._changed:
            self._left -= len(new)
            if not self._left:
                self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every block is settled; False if time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._left == 0, timeout_s)

    def cancel(self) -> None:
        """What has not begun ends as CANCELLED; what has begun ends as it ends."""
        self.cancelled = True


@dataclass(frozen=True, slots=True)
class Usage:
    records: int
    used_bytes: int
    capacity_bytes: int
    """0 where nothing limits it, as in an object store."""


@dataclass(slots=True)
class ScrubReport:
    """What a scrub came to. A record that could not be read, or not be interpreted, stays where it is. One that is
    `unwanted` was sound, and is gone."""

    records: int = 0
    size_bytes: int = 0
    damaged: int = 0
    unread: int = 0
    foreign: int = 0
    unwanted: int = 0

    def add(self, other: ScrubReport) -> None:
        for name in ("records", "size_bytes", "damaged", "unread", "foreign", "unwanted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Tier(Protocol):
    name: str
    durable: bool  # what was written and synced is there after a restart
    shared: bool  # others read and write there too: what is in it, and its room, are not this process's to say

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
        """Begin; returns at once. `deadline` in seconds of the port's clock. `segments`: one list a block, for read
        and write."""

    def read(self, addresses: Sequence[Address], segments: Sequence[Segments]) -> tuple[Outcome, ...]: ...
    def write(self, addresses: Sequence[Address], segments: Sequence[Segments]) -> tuple[Outcome, ...]: ...
    def contains(self, addresses: Sequence[Address]) -> tuple[Outcome, ...]: ...
    def remove(self, addresses: Sequence[Address]) -> tuple[Outcome, ...]: ...

    def room(self, record_bytes: int) -> int:
        """How many more records of this size (header area and payload) fit now."""

    def colocated(self, address: Address) -> list[Address]:
        """The records that share a piece of memory or disk with this one: all must go before another size can use
        it."""

    def scan(self) -> Iterator[Address]:
        """What is here, heads before tails where the tier can tell; for a tier that outlives the process."""

    def on_loss(self, tell: Callable[[Address], object]) -> None:
        """From now on tell of each record that leaves though nobody asked for it: one that was found to be damaged
        while it was made safe, or whose file is gone. (What a read finds is the read's outcome.)"""

    def runs(self) -> Iterator[tuple[Address, bytes]]:
        """The same in fewer steps where the tier can: the address of a run's first record, and the signatures of it
        and of those that follow it in the same namespace, group and shard, one behind the other."""

    def health_issues(self) -> list[str]:
        """Why a part of it takes no new records for now: a line a device or server, none when well. Asks nobody."""

    def sync(self) -> bool:
        """Return when every write that said DONE is as durable as the tier makes it; False where that failed."""

    def usage(self) -> Usage: ...

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]] | None:
        """Records and bytes of each namespace, where the tier counts them itself; asks nobody."""

    def check(self) -> list[str]:
        """A full audit; one line a fault, none when sound."""

    def scrub(self, *, unwanted: RecordFilter | None = None) -> ScrubReport:
        """Read and verify every record; what is damaged leaves, and what is `unwanted`. Then a drive suspected for
        damage is trusted again."""

    def purge(self, namespace: bytes) -> int | None:
        """Remove all of a namespace, whatever knows of it; how many records there were. None where the tier has no
        other way than record by record."""

    def keep_files(self, keep: bool) -> None:
        """From True to False, give no file back to the file system, where `wipe` would not reach what lay in it."""

    def wipe(self) -> bool:
        """Overwrite what records that left have left behind; False where not all of it could be."""

    def expirations(self) -> Iterable[tuple[Address, int]]:
        """What is here and ends, and when, in milliseconds since 1970; of a tier that outlives the process and is its
        own. Takes its time."""

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        """Keep whose a namespace is for as long as its records, where they outlive the process. OSError where that
        could not be."""

    def owners(self) -> Mapping[bytes, Owner]:
        """What was noted and is not forgotten, by namespace, by whatever process."""

    def close(self) -> bool:
        """Run what was submitted, make it durable, let go of everything; False where not all became as durable as the
        tier makes it. Idempotent, with the same answer."""


class TierDefaults:
    """To inherit: the four waiting verbs over `submit`, runs over `scan`, no troubles, no losses, no
    holdings, no scrub."""

    submit: Callable[..., Ticket]
    scan: Callable[[], Iterator[Address]]

    def runs(self) -> Iterator[tuple[Address, bytes]]:
        for address in self.scan():
            yield address, address.signature

    def health_issues(self) -> list[str]:
        return []

    def on_loss(self, tell: Callable[[Address], object]) -> None:
        """Nothing leaves by itself."""

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]] | None:
        return None

    def scrub(self, *, unwanted: RecordFilter | None = None) -> ScrubReport:
        """Nothing here lies on a medium of its own."""
        return ScrubReport()

    def purge(self, namespace: bytes) -> int | None:
        return None

    def keep_files(self, keep: bool) -> None:
        """There are none."""

    def wipe(self) -> bool:
        """What left is gone."""
        return True

    def expirations(self) -> Iterable[tuple[Address, int]]:
        return ()

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        """Nothing here outlives the process."""

    def owners(self) -> Mapping[bytes, Owner]:
        return {}

    def _submit_and_wait(
        self, op: Op, addresses: Sequence[Address], segments: Sequence[Segments] = ()
    ) -> tuple[Outcome, ...]:
        ticket = self.submit(op, addresses, segments)
        ticket.wait()
        return ticket.outcomes

    def read(self, addresses: Sequence[Address], segments: Sequence[Segments]) -> tuple[Outcome, ...]:
        return self._submit_and_wait("read", addresses, segments)

    def write(self, addresses: Sequence[Address], segments: Sequence[Segments]) -> tuple[Outcome, ...]:
        return self._submit_and_wait("write", addresses, segments)

    def contains(self, addresses: Sequence[Address]) -> tuple[Outcome, ...]:
        return self._submit_and_wait("contains", addresses)

    def remove(self, addresses: Sequence[Address]) -> tuple[Outcome, ...]:
        return self._submit_and_wait("remove", addresses)


def check_segments(op: Op, addresses: Sequence[Address], segments: Sequence[Segments]) -> None:
    """ValueError where the segments of a call do not fit it: that is misuse, not a fault of the data."""
    expected = len(addresses) if op in {"read", "write"} else 0
    if len(segments) != expected:
        raise ValueError(f"{len(segments)} lists of segments to {op} {len(addresses)} blocks: expected {expected}")
    for pieces in segments:
        if len(pieces) < 2 or len(pieces[0]) % ALIGNMENT or sum(map(len, pieces)) % ALIGNMENT:
            raise ValueError(
                f"segments of {[len(piece) for piece in pieces]} bytes: expected a header area, then the payload, "
                f"in multiples of {ALIGNMENT}"
            )


def same_record(one: Address, other: Address) -> bool:
    """The whole identity, not only the key: two signatures may share a key. Parents count where both are known."""
    return (
        one.signature == other.signature
        and one.namespace == other.namespace
        and (not one.parent or not other.parent or one.parent == other.parent)
    )


# Bytes in several pieces, cut without copying; a record as it goes out, in such pieces.


def flatten(segments: Segments, size: int) -> list[memoryview]:
    """The first `size` bytes, as plain bytes."""
    return slice_segments([segment.cast("B") for segment in segments], 0, size)


def sealed_record(
    address: Address, segments: Segments, signer: RecordSigner | None
) -> tuple[Header, bytes, list[memoryview]]:
    """A record for a server: its header, the header's bytes, signed where there is somebody to, and the payload.
    RecordError where it is not that of the address."""
    header = read_header(segments[0])
    if header.address.name != address.name or not same_record(header.address, address):
        raise RecordError("address", "the header names another record than the call")
    payload = flatten(segments[1:], header.stored_bytes)
    if sum(map(len, payload)) < header.stored_bytes:
        raise RecordError("length", f"{header.stored_bytes} stored bytes: fewer are there")
    head = bytes(segments[0][: header.header_bytes])
    if signer is not None:
        head = with_field(head, header, KEYED_DIGEST, signer.sign(head, header, payload))
    return header, head, payload


def slice_segments(pieces: Sequence[memoryview], start: int, size: int) -> list[memoryview]:
    """Bytes `start` to `start + size` of pieces that follow each other, or as many as are there."""
    sliced = []
    for piece in pieces:
        if start < len(piece) and size > 0:
            sliced.append(piece[start : start + size])
            size -= len(sliced[-1])
        start = max(0, start - len(piece))
    return sliced


# Heads before tails, for tiers that tell what they have.


def parents_first(addresses: Sequence[Address]) -> list[Address]:
    """Each behind its parent, where both are here."""
    present = {(address.signature, address.group, address.shard) for address in addresses}
    children: dict[object, list[Address]] = {}
    ordered = []
    for address in addresses:
        parent = (address.parent, address.group, address.shard)
        if parent in present:
            children.setdefault(parent, []).append(address)
        else:
            ordered.append(address)
    for address in ordered:  # grows while it is walked
        ordered += children.pop((address.signature, address.group, address.shard), ())
    return ordered

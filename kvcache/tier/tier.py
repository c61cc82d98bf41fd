"""The contract of a tier: a store of records, accessed in batches.

    ticket = tier.submit("read", addresses, segments, priority=DEMAND, deadline=clock.now() + 0.2)
    ticket.outcomes        # one a block, readable as they arrive
    ticket.wait(0.2)

The life of a record, as a sequence of calls:

1. `free_slots` before a write. Without it, a write to a full tier ends with NO_CAPACITY and the block is lost there.
2. `submit("write")`, heads before tails, and `wait`. A caller that frees the segments earlier corrupts the record.
3. `sync` before a caller is told that the record is durable. Without it, a crash loses records that said DONE.
4. `submit("remove")`, tails before heads. Without it, the record keeps its space until the tier is full.
5. `close`. Without it, threads, connections and the lock of a directory stay until the process ends.

Guarantees of every implementation, tested by `kvcache.testing.tier`:

- A read that says DONE filled the segments with the record written under that address. Its header, namespace,
  signature, parent (where both sides know it), lengths and checksums were compared. Any other outcome leaves the
  segments undefined and says why.
- A write that says DONE is visible to reads that start later, and only as a whole: no read sees a part of it. Writing a
  signature that the tier holds already says DONE and changes nothing.
- No method raises for data, devices or deadlines: those are outcomes. Misuse (a wrong number of segments, a closed
  tier) raises.
- Every submitted block gets an outcome: DONE, another one, or TIMED_OUT when the deadline passes before it starts.
- All methods may be called from any thread.

Segments belong to the caller. The caller keeps them unchanged (write) or unread (read) until the block has its outcome.
A block's first segment is the record's header area; the others are its payload, in order; see
`kvcache/block/record.py`.

What only some tiers can do is a protocol of its own (`SupportsColocation` to `SupportsOwners`). The cache tests for
each with `isinstance`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, Protocol, runtime_checkable

from kvcache.block.cipher import RecordSigner
from kvcache.block.namespace import Owner
from kvcache.block.record import ALIGNMENT, KEYED_DIGEST, Address, Header, RecordError, read_header, with_field

Op = Literal["read", "write", "contains", "remove"]
Segments = Sequence[memoryview]
RecordFilter = Callable[[Header], bool]
"""Returns whether a sound record is unwanted."""

DEMAND, PREFETCH, BACKGROUND = 0, 1, 2
"""Priorities: a request waits for it; it is prefetched; no request waits for it."""


class Outcome(Enum):
    """The result of one block. Only `DONE` grants bytes, visibility or presence."""

    PENDING = "pending"
    DONE = "done"
    NOT_FOUND = "absent"  # the tier does not hold it
    DAMAGED = "damaged"  # a check failed: a miss; removed if it is still the same write
    INCOMPATIBLE = "foreign"  # of another version or not interpretable: a miss; kept
    NO_CAPACITY = "no_room"  # a write that found no capacity
    DROPPED = "dropped"  # the queue was full
    TIMED_OUT = "late"  # the deadline passed
    FAILED = "failed"  # the device or the peer failed
    CANCELLED = "cancelled"

    __hash__ = object.__hash__  # the hash of Enum is written in Python and slow, and every block's outcome is counted

    @property
    def settled(self) -> bool:
        return self is not PENDING


PENDING = Outcome.PENDING


class Ticket:
    """A batch in progress, with one outcome a block.

    `on_outcome(i, outcome)` is called once a block, by the thread that settles it, before waiters wake.
    """

    def __init__(self, count: int, on_outcome: Callable[[int, Outcome], None] | None = None) -> None:
        self._outcomes = [Outcome.PENDING] * count
        self._checks: dict[int, str] = {}
        self._unsettled = count
        self._changed = threading.Condition()
        self._on_outcome = on_outcome
        self.cancelled = False

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        return tuple(self._outcomes)

    @property
    def checks(self) -> dict[int, str]:
        """By block: the check that a DAMAGED or INCOMPATIBLE record failed, or the error of a FAILED one."""
        return dict(self._checks)

    @property
    def done(self) -> bool:
        return self._unsettled == 0

    def settled(self, i: int) -> bool:
        return self._outcomes[i].settled

    def settle(self, i: int, outcome: Outcome, check: str = "") -> None:
        """Set a block's outcome; called by the tier. A second call for a block changes nothing."""
        with self._changed:
            if self._outcomes[i].settled:
                return
            if check:
                self._checks[i] = check
            self._outcomes[i] = outcome
        if self._on_outcome is not None:
            self._on_outcome(i, outcome)
        with self._changed:
            self._unsettled -= 1
            if not self._unsettled:
                self._changed.notify_all()

    def settle_many(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """As `settle`, for consecutive blocks from `first` on."""
        with self._changed:
            new = [(i, outcome) for i, outcome in enumerate(outcomes, first) if self._outcomes[i] is PENDING]
            for i, outcome in new:
                self._outcomes[i] = outcome
        if self._on_outcome is not None:
            for i, outcome in new:
                self._on_outcome(i, outcome)
        with self._changed:
            self._unsettled -= len(new)
            if not self._unsettled:
                self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until every block is settled; False where time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unsettled == 0, timeout_s)

    def cancel(self) -> None:
        """Cancel: work that has not started ends as CANCELLED, work in progress ends normally."""
        self.cancelled = True


@dataclass(frozen=True, slots=True)
class Usage:
    records: int
    used_bytes: int
    capacity_bytes: int
    """0 where no limit applies, as in an object store."""


@dataclass(slots=True)
class ScrubReport:
    """The result of a scrub.

    Records that cannot be read or interpreted are kept. `unwanted` counts sound records that were removed.
    """

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
    durable: bool  # written and synced records are there after a restart
    shared: bool  # other processes read and write it too; they can change its contents and its capacity

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
        """Start a batch and return at once.

        Args:
            segments: one list a block, for read and write.
            deadline: in seconds of the clock of `OsEnv`.
        """

    def free_slots(self, record_bytes: int) -> int:
        """Return how many more records of this size (header area and payload) fit now."""

    def scan(self) -> Iterator[Address]:
        """Yield the addresses of all records, heads before tails where the tier knows.

        For tiers that outlive the process.
        """

    def health_issues(self) -> list[str]:
        """Return why a part of the tier takes no new records now, one line a device or server.

        Empty where it works. No I/O.
        """

    def sync(self) -> bool:
        """Return when every write that said DONE is as durable as the tier makes it; False where that failed."""

    def usage(self) -> Usage: ...

    def check(self) -> list[str]:
        """Audit the tier; return one line a fault."""

    def close(self) -> bool:
        """Finish what was submitted, make it durable, and release everything.

        Idempotent. Returns False where not everything became as durable as the tier makes it; later calls return the
        same.
        """


@runtime_checkable
class SupportsColocation(Protocol):
    """A tier that frees memory or disk space only in units of several records."""

    def colocated(self, address: Address) -> list[Address]:
        """Return the records that share a slab or a segment with this one; empty if the record is absent.

        All of them must be removed before records of another size can use the memory or disk.
        """


@runtime_checkable
class SupportsRestore(Protocol):
    """A tier of this cache alone that has its records again after a restart."""

    def runs(self) -> Iterator[tuple[Address, bytes]]:
        """Yield all records in runs, in fewer steps than `scan`.

        Yields a run's first address, and the signatures of its records, concatenated. The records of a run share
        namespace, group and shard, and each follows its parent.
        """

    def on_loss(self, tell: Callable[[Address], object]) -> None:
        """Set the callback for records that are lost without a request.

        A record is lost where a sync or scrub finds it damaged, or where its file is missing. A loss that a read finds
        is that read's outcome.
        """

    def expirations(self) -> Iterable[tuple[Address, int]]:
        """Return the records that expire, with their expiry in milliseconds since 1970. Takes long."""


@runtime_checkable
class SupportsNamespaceUsage(Protocol):
    """A tier that counts its records by namespace."""

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]]:
        """Return records and bytes by namespace. No I/O."""


@runtime_checkable
class SupportsWipe(Protocol):
    """A tier on memory or a drive of this host, whose free space can be overwritten."""

    def wipe(self) -> bool:
        """Overwrite the remains of removed records; False where some could not be overwritten."""


@runtime_checkable
class SupportsScrub(SupportsWipe, Protocol):
    """A tier of files on a drive."""

    def scrub(self, *, unwanted: RecordFilter | None = None) -> ScrubReport:
        """Verify every record.

        Remove the damaged and the unwanted ones. A drive suspected of damage is trusted again afterwards.
        """

    def keep_files(self, keep: bool) -> None:
        """Between True and False, return no file to the file system: `wipe` could not reach its former bytes."""


@runtime_checkable
class SupportsPurge(Protocol):
    """A shared tier that keeps more of a namespace than its records."""

    def purge(self, namespace: bytes) -> int:
        """Remove the rest of a namespace after its records; return how many more records that removed.

        Raises:
            OSError: the server does not answer or refuses.
        """


@runtime_checkable
class SupportsOwners(Protocol):
    """A tier that keeps the owner of each namespace with its records, because those outlive the process."""

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        """Keep the owner of a namespace.

        Raises:
            OSError: the owner could not be kept.
        """

    def owners(self) -> Mapping[bytes, Owner]:
        """Return the noted owners by namespace, those of earlier processes included.

        Raises:
            OSError: the server does not answer or refuses.
        """


def call(tier: Tier, op: Op, addresses: Sequence[Address], segments: Sequence[Segments] = ()) -> tuple[Outcome, ...]:
    """Submit a batch and wait for its outcomes."""
    ticket = tier.submit(op, addresses, segments)
    ticket.wait()
    return ticket.outcomes


class BlockingCalls:
    """A mixin for tiers: `read`, `write`, `contains` and `remove` wait for their outcomes."""

    def read(self: Tier, addresses: Sequence[Address], segments: Sequence[Segments]) -> tuple[Outcome, ...]:
        return call(self, "read", addresses, segments)

    def write(self: Tier, addresses: Sequence[Address], segments: Sequence[Segments]) -> tuple[Outcome, ...]:
        return call(self, "write", addresses, segments)

    def contains(self: Tier, addresses: Sequence[Address]) -> tuple[Outcome, ...]:
        return call(self, "contains", addresses)

    def remove(self: Tier, addresses: Sequence[Address]) -> tuple[Outcome, ...]:
        return call(self, "remove", addresses)


def check_segments(op: Op, addresses: Sequence[Address], segments: Sequence[Segments]) -> None:
    """Check that the segments fit the call.

    Raises:
        ValueError: they do not; that is misuse, not a fault of the data.
    """
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
    """Compare the whole identity, since two signatures may share a key. Parents are compared where both are known."""
    return (
        one.signature == other.signature
        and one.namespace == other.namespace
        and (not one.parent or not other.parent or one.parent == other.parent)
    )


# Records as pieces of bytes, cut without copying.


def flatten(segments: Segments, size: int) -> list[memoryview]:
    """Return the first `size` bytes as views of plain bytes."""
    return slice_segments([segment.cast("B") for segment in segments], 0, size)


def sealed_record(
    address: Address, segments: Segments, signer: RecordSigner | None
) -> tuple[Header, bytes, list[memoryview]]:
    """Return a record for a server: its header, the header's bytes (signed where there is a signer), and the payload.

    Raises:
        RecordError: the record is not that of the address, or is cut short.
    """
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
    """Return bytes `start` to `start + size` of consecutive pieces, or fewer where the pieces end."""
    sliced = []
    for piece in pieces:
        if start < len(piece) and size > 0:
            sliced.append(piece[start : start + size])
            size -= len(sliced[-1])
        start = max(0, start - len(piece))
    return sliced


# Heads before tails.


def parents_first(addresses: Sequence[Address]) -> list[Address]:
    """Return the addresses with each after its parent, where both are here."""
    present = {(address.signature, address.group, address.shard) for address in addresses}
    children: dict[object, list[Address]] = {}
    ordered = []
    for address in addresses:
        parent = (address.parent, address.group, address.shard)
        if parent in present:
            children.setdefault(parent, []).append(address)
        else:
            ordered.append(address)
    for address in ordered:  # `ordered` grows during the loop
        ordered += children.pop((address.signature, address.group, address.shard), ())
    return ordered

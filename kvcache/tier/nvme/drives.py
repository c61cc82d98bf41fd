"""Several drives as one tier: one directory and one `NvmeTier` a drive, with blocks spread over them by key.

Rendezvous hashing orders the drives for each key, and a block belongs to the first drive in its order. So adding or
removing a drive moves no block between the others. Where the first drive has no capacity or takes no new records, the
next one stores the block. Reads find a block on any drive, since each tier knows its records in memory. So a faulty
drive costs its own blocks only.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from xxhash import xxh3_64_intdigest

from kvcache.block.namespace import Owner
from kvcache.block.record import Address
from kvcache.errors import ClosedError, StoreError
from kvcache.os_env import OsEnv
from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.io_queue import DeadlineTicket
from kvcache.tier.nvme.restore_order import runs, scan
from kvcache.tier.nvme.tier import NvmeTier
from kvcache.tier.tier import (
    DEMAND,
    BlockingCalls,
    Op,
    Outcome,
    RecordFilter,
    ScrubReport,
    Segments,
    Ticket,
    Usage,
    check_segments,
)

_log = logging.getLogger("kvcache.tier.nvme")


def open_drives(
    settings: NvmeSettings, *, served_address: str = "", os_env: OsEnv | None = None
) -> NvmeTier | MultiDriveTier:
    """Open the tier over the directories of `settings`, which share capacity and queue in equal parts.

    A drive that does not answer is left out until the next start and listed in `health_issues`, if another drive works.

    Args:
        served_address: as in `NvmeTier`.

    Raises:
        ConfigError: an equal part of the capacity is too small.
        StoreError: no directory can be used, or one is in use or holds something else.
    """
    paths = [str(path) for path in settings.directories]
    of_drive = settings.model_copy(
        update={
            "capacity_bytes": settings.capacity_bytes // len(paths),
            "queue_bytes": max(1, settings.queue_bytes // len(paths)),
        }
    )
    tiers: list[NvmeTier] = []
    health_issues: list[str] = []
    try:
        for path in paths:
            try:
                tiers.append(NvmeTier(path, of_drive, served_address=served_address, os_env=os_env))
            except StoreError as error:
                alone = path == paths[-1] and not tiers
                if alone or not isinstance(error.__cause__, OSError):
                    raise
                _log.warning("%s; the other drives are used", error)
                health_issues.append(str(error))
    except BaseException:
        for tier in tiers:
            tier.close()
        raise
    return tiers[0] if len(paths) == 1 else MultiDriveTier(tiers, health_issues, os_env or OsEnv())


class MultiDriveTier(BlockingCalls):
    name = "nvme"
    durable = True
    shared = False

    def __init__(self, tiers: Sequence[NvmeTier], health_issues: Sequence[str], os_env: OsEnv) -> None:
        """Take ownership of the tiers. `health_issues` describes the drives that are missing."""
        self.tiers = list(tiers)
        self._troubles, self._os_env = list(health_issues), os_env
        self._seeds = [xxh3_64_intdigest(tier.path.encode()) for tier in tiers]
        self._closed = False
        self._drop_duplicates()

    def _drop_duplicates(self) -> None:
        """Keep one copy of the blocks that two drives hold because one of them was missing for a while."""
        for i, tier in enumerate(self.tiers):
            for other in self.tiers[:i]:
                tier.remove(tier.duplicates_of(other))

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
        if self._closed:
            raise ClosedError("nvme tier: it was closed")
        check_segments(op, addresses, segments)
        ticket = _SplitTicket(len(addresses), on_outcome, deadline, self._expire, self._os_env)
        parts: dict[int, list[int]] = {}
        for i, drive in enumerate(self._assign_drives(op, addresses, segments)):
            parts.setdefault(drive, []).append(i)
        for drive, blocks in parts.items():
            part = self.tiers[drive].submit(
                op,
                [addresses[i] for i in blocks],
                [segments[i] for i in blocks] if segments else (),
                priority=priority,
                deadline=deadline,
                on_outcome=partial(ticket.settle_part, blocks),
            )
            ticket.parts.append((blocks, part))
        return ticket

    def _assign_drives(self, op: Op, addresses: Sequence[Address], segments: Sequence[Segments]) -> Iterator[int]:
        """Yield the number of each block's drive: the one that holds it, or the one that should."""
        held = [tier.has_names(addresses) for tier in self.tiers]
        room: dict[tuple[int, int], int] = {}
        refusing = [bool(tier.health_issues()) for tier in self.tiers] if op == "write" else []
        for i, address in enumerate(addresses):
            there = next((drive for drive, has in enumerate(held) if has[i]), None)
            order = self._order(address.key)
            if there is None and op == "write":
                size = sum(map(len, segments[i]))
                there = next((d for d in order if not refusing[d] and self._has_room(d, size, room)), None)
            yield order[0] if there is None else there

    def _order(self, key: bytes) -> list[int]:
        """Return all drives in this key's order."""
        weights = [xxh3_64_intdigest(key, seed) for seed in self._seeds]
        return sorted(range(len(weights)), key=weights.__getitem__, reverse=True)

    def _has_room(self, drive: int, size: int, room: dict[tuple[int, int], int]) -> bool:
        """Count down the capacity of a drive for this size; False when it is used up."""
        remaining = room[drive, size] = room.get((drive, size), self.tiers[drive].free_slots(size)) - 1
        return remaining >= 0

    def _expire(self) -> None:
        for tier in self.tiers:
            tier.expire()

    @property
    def counters(self) -> dict[str, int]:
        """Event counts of all drives since the tier was opened, by name."""
        return dict(sum((Counter(tier.counters) for tier in self.tiers), Counter()))

    def on_loss(self, tell: Callable[[Address], object]) -> None:
        for tier in self.tiers:
            tier.on_loss(tell)

    def health_issues(self) -> list[str]:
        return self._troubles + [line for tier in self.tiers for line in tier.health_issues()]

    def free_slots(self, record_bytes: int) -> int:
        return sum(tier.free_slots(record_bytes) for tier in self.tiers if not tier.health_issues())

    def colocated(self, address: Address) -> list[Address]:
        return [sibling for tier in self.tiers for sibling in tier.colocated(address)]

    def runs(self) -> Iterator[tuple[Address, bytes]]:
        """Yield all records in runs, as `NvmeTier.runs` does.

        A chain is one run even where its blocks are on several drives.
        """
        numbers: dict[bytes, int] = {}
        parts = []
        for tier in self.tiers:
            entries, namespaces = tier.puts()
            renumbered = np.zeros(max(namespaces, default=-1) + 1, np.uint32)
            for number, namespace in namespaces.items():
                renumbered[number] = numbers.setdefault(namespace, len(numbers))
            entries["namespace"] = renumbered[entries["namespace"]] if len(entries) else 0
            parts.append(entries)
        return runs(np.concatenate(parts), {number: namespace for namespace, number in numbers.items()})

    def scan(self) -> Iterator[Address]:
        return scan(self.runs())

    def sync(self) -> bool:
        synced = [tier.sync() for tier in self.tiers]  # sync each drive even where another failed
        return all(synced)

    def usage(self) -> Usage:
        each = [tier.usage() for tier in self.tiers]
        return Usage(
            sum(usage.records for usage in each),
            sum(usage.used_bytes for usage in each),
            sum(usage.capacity_bytes for usage in each),
        )

    def usage_by_namespace(self) -> dict[bytes, tuple[int, int]]:
        total: dict[bytes, tuple[int, int]] = {}
        for tier in self.tiers:
            for namespace, (records, size) in tier.usage_by_namespace().items():
                had = total.get(namespace, (0, 0))
                total[namespace] = had[0] + records, had[1] + size
        return total

    def check(self) -> list[str]:
        return [fault for tier in self.tiers for fault in tier.check()]

    def scrub(self, *, unwanted: RecordFilter | None = None) -> ScrubReport:
        total = ScrubReport()
        for tier in self.tiers:
            total.add(tier.scrub(unwanted=unwanted))
        return total

    def expirations(self) -> Iterator[tuple[Address, int]]:
        for tier in self.tiers:
            yield from tier.expirations()

    def keep_files(self, keep: bool) -> None:
        for tier in self.tiers:
            tier.keep_files(keep)

    def wipe(self) -> bool:
        wiped = [tier.wipe() for tier in self.tiers]
        return all(wiped)

    def note_owner(self, namespace: bytes, owner: Owner) -> None:
        for tier in self.tiers:
            tier.note_owner(namespace, owner)

    def owners(self) -> Mapping[bytes, Owner]:
        return {namespace: owner for tier in self.tiers for namespace, owner in tier.owners().items()}

    def close(self) -> bool:
        self._closed = True
        closed = [tier.close() for tier in self.tiers]
        return all(closed)


class _SplitTicket(DeadlineTicket):
    """A ticket whose blocks are settled by the tickets of several tiers."""

    def __init__(
        self,
        count: int,
        on_outcome: Callable[[int, Outcome], None] | None,
        deadline: float | None,
        expire: Callable[[], None],
        os_env: OsEnv,
    ) -> None:
        super().__init__(count, on_outcome, deadline, expire, os_env)
        self.parts: list[tuple[list[int], Ticket]] = []  # for each ticket, the numbers of the blocks that it settles

    def settle_part(self, blocks: Sequence[int], i: int, outcome: Outcome) -> None:
        self.settle(blocks[i], outcome)

    @property
    def checks(self) -> dict[int, str]:
        return {blocks[i]: check for blocks, part in self.parts for i, check in part.checks.items()}

    def cancel(self) -> None:
        super().cancel()
        for _, part in self.parts:
            part.cancel()

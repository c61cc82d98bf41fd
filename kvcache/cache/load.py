"""One load: copies blocks from any tier into an engine's pages, in order, and reads ahead of the copy.

A load works in windows of a bounded number of bytes. While one window is copied, the reads of the next are in progress.
The first block that does not arrive ends the prefix: the rest is a miss, and the engine recomputes it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import repeat
from operator import itemgetter

from kvcache.block.record import Address
from kvcache.cache.context import CacheContext
from kvcache.cache.holds import HOLD_DIVISOR, Holds
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.promote import InflightRead
from kvcache.cache.slot_copy import PeerAbortedError, SlotCopy, wait_all
from kvcache.cache.tier_manager import TierManager
from kvcache.index.block_run import ChainView
from kvcache.log import RequestContext, log_faults, logger, request_context
from kvcache.tier.host.tier import HostRecord
from kvcache.tier.tier import DEMAND, Outcome

WINDOW_BYTES = 64 << 20

LoadEntry = tuple[int, int, "HostRecord | InflightRead | Outcome"]  # block, group, and the source of its bytes

_log = logger("kvcache.load")


@dataclass(kw_only=True)
class Load:
    context: CacheContext
    tier_manager: TierManager
    work: RequestContext
    namespace: bytes
    slot_copy: SlotCopy
    chains: Sequence[ChainView]  # by group
    needs: Sequence[range]  # by group, the blocks that the prefix needs
    blocks: range  # the blocks to load; other block numbers in this class count from the first of them
    tenant: str
    before: int
    begun: float
    deadline: float
    claim: Holds.Claim
    transfer: BlockTransfer
    _host_only: bool = True
    _brought: dict[str, tuple[int, int]] = field(default_factory=dict)  # by tier: records, bytes; not counted yet

    @staticmethod
    def window_bytes(context: CacheContext) -> int:
        """Bytes of a window.

        Two windows are in progress at a time: together at most the share of host that requests may hold.
        """
        return min(WINDOW_BYTES, context.host.arena.capacity_bytes // HOLD_DIVISOR // 2)

    def run(self) -> None:
        """Run the load. Never raises: a cache fault never fails a request.

        When a waiter sees the transfer as done, the holds are released and the duration is set.
        """
        failed, whole = None, False
        with request_context(self.work):
            try:
                with log_faults(_log, "load failed; its blocks count as misses"):
                    try:
                        failed = self._run()
                        whole = failed is None
                    except PeerAbortedError as error:
                        _log.debug("load ended: %s", error)
            finally:
                try:
                    self._account(whole=whole)
                finally:
                    if failed is not None:
                        block, outcome = failed
                        self.transfer.settle_run(block, block + 1, outcome)
                        self.transfer.settle_rest(block, Outcome.NOT_FOUND)
                    # a complete load also settles blocks that no group needs
                    self.transfer.settle_rest(0, Outcome.DONE if whole else Outcome.FAILED)

    def _account(self, *, whole: bool) -> None:
        """Release the holds and report the duration, from which the plan learns how long a load from host alone takes.

        An error here does not change the load's outcome.
        """
        with log_faults(_log, "accounting of a load failed"):
            self.transfer.seconds = seconds = self.context.os_env.clock.now() - self.begun
            self.context.holds.release(self.claim)
            if self._host_only and whole:
                sizes = (
                    chain.payload_bytes * (min(need.stop, self.blocks.stop) - max(need.start, self.blocks.start))
                    for chain, need in zip(self.chains, self.needs, strict=True)
                )
                self.context.plan.copied(sum(size for size in sizes if size > 0), seconds)

    def _run(self) -> tuple[int, Outcome] | None:
        """The block that ended the prefix, and why; None if all blocks arrived. The last block is not settled yet."""
        windows, count = self._windows(), len(self.blocks)
        current = self._start(next(windows, range(0)))
        while current:
            with ExitStack() as undo:
                undo.callback(self._release, current)
                following = self._start(next(windows, range(0)))
                undo.pop_all()
                undo.callback(self._release, following)
                failed = self._finish(current)
                if failed is None:
                    undo.pop_all()
            if failed is not None:
                block, outcome = failed
                self.context.counters.add("load_failures", count - block, outcome=outcome.value)
                return failed
            current = following
        return None

    def _windows(self) -> Iterator[range]:
        """Ranges of blocks, each within the window's bytes or one block long."""
        limit, first, size = self.window_bytes(self.context), 0, 0
        for i in range(len(self.blocks)):
            block = self.blocks[i]
            of_block = sum(c.payload_bytes for c, need in zip(self.chains, self.needs, strict=True) if block in need)
            size += of_block
            if size > limit and i > first:
                yield range(first, i)
                first, size = i, of_block
        if first < len(self.blocks):
            yield range(first, len(self.blocks))

    def _start(self, blocks: range) -> list[LoadEntry]:
        """Acquire the records in host; start to read the others."""
        parts: list[tuple[int, int, Address, HostRecord | None]] = []
        for group, (chain, need) in enumerate(zip(self.chains, self.needs, strict=True)):
            group_blocks = [i for i in blocks if self.blocks[i] in need]
            addresses = chain.addresses([self.blocks[i] for i in group_blocks])
            parts += zip(group_blocks, repeat(group), addresses, self.context.host.acquire_all(addresses))
        if len(self.chains) > 1:
            parts.sort(key=itemgetter(0, 1))
        entries: list[LoadEntry] = []
        below: list[tuple[int, Address, int]] = []  # position in entries, address, bytes
        for i, group, address, held in parts:
            if held is not None and self.context.expiry.is_expired(
                held.slot.expires_ms
            ):  # expired, but not yet removed: a sweep removes a limited number at a time
                self.context.host.arena.release(held.slot)
                entries.append((i, group, Outcome.NOT_FOUND))
                continue
            if held is None:
                below.append((len(entries), address, self.chains[group].payload_bytes))
            entries.append((i, group, held if held is not None else Outcome.PENDING))
        if below:
            self._host_only = False
            try:
                answers = self.tier_manager.promoter.begin(
                    [(address, payload_bytes) for _, address, payload_bytes in below],
                    lambda count, size: self.tier_manager.slots(count, size, self.tenant, before=self.before),
                    priority=DEMAND,
                    deadline=self.deadline,
                )
            except BaseException:
                self._release(entries)
                raise
            for (at, _, _), answer in zip(below, answers, strict=True):
                entries[at] = (*entries[at][:2], answer)
        return entries

    def _finish(self, entries: Sequence[LoadEntry]) -> tuple[int, Outcome] | None:
        """Copy a window's blocks as they arrive and release its records; the first missing block, and why."""
        ready: list[tuple[int, int, HostRecord]] = []
        taken = 0  # entries handled: their slots are in `ready` or released
        try:
            for i, group, source in entries:
                taken += 1
                held, outcome = self._arrived(i, group, source, ready)
                if held is None:
                    ready = self._copy(ready, i)
                    return i, outcome
                ready.append((i, group, held))
            ready = self._copy(ready, len(self.blocks))
            return None
        finally:
            self._release(entries[taken:])
            self.context.host.arena.release(*[held.slot for _, _, held in ready])

    def _arrived(
        self, i: int, group: int, source: HostRecord | InflightRead | Outcome, ready: list[tuple[int, int, HostRecord]]
    ) -> tuple[HostRecord | None, Outcome]:
        if self.transfer.cancelled or self.context.bypass.loads:
            if isinstance(source, HostRecord):
                self.context.host.arena.release(source.slot)
            return None, Outcome.CANCELLED
        if isinstance(source, HostRecord):
            if self.context.host.is_intact(source):
                self._add_loaded(self.context.host.name, source.payload_bytes)
                return source, Outcome.DONE
            self.context.host.arena.release(source.slot)
            self.context.index.discard(source.address, self.context.host.name)
            check = Outcome.DAMAGED.value
            self.context.counters.add("refused_records", tier=self.context.host.name, check=check)
            self.context.events.add("refused", tier=self.context.host.name, namespace=self.namespace, reason=check)
            self.context.miss_explainer.refused(self.context.host.name, source.address.signature, check)
            return None, Outcome.DAMAGED
        if isinstance(source, Outcome):
            return None, source
        if not source.outcome.settled:  # use the wait: copy the blocks that are ready
            ready[:] = self._copy(ready, i)
        outcome = self.tier_manager.promoter.wait(source, self.deadline - self.context.os_env.clock.now())
        if outcome is not Outcome.DONE:
            return None, outcome
        self._add_loaded(source.source, source.payload_bytes)
        held = self.context.host.acquire(source.address)
        return held, Outcome.DONE if held is not None else Outcome.NOT_FOUND

    def _copy(self, ready: list[tuple[int, int, HostRecord]], end: int) -> list[tuple[int, int, HostRecord]]:
        """Copy, settle and release the records of blocks before `end`; the remaining records.

        The load's last block is not settled, because that completes the transfer.
        """
        whole = ready if end == len(self.blocks) else [r for r in ready if r[0] < end]
        if whole:
            copies = self.slot_copy.scatter([(i, group, held.slot) for i, group, held in whole])
            self.transfer.begun(end if end < len(self.blocks) else whole[-1][0] + 1, copies)
            wait_all(copies)
        self._count()
        self.context.host.arena.release(*[held.slot for _, _, held in whole])
        if whole:
            self.transfer.settle_run(whole[0][0], min(whole[-1][0] + 1, len(self.blocks) - 1), Outcome.DONE)
        return ready[len(whole) :]

    def _add_loaded(self, tier: str, size: int) -> None:
        records, before = self._brought.get(tier, (0, 0))
        self._brought[tier] = records + 1, before + size

    def _count(self) -> None:
        """Count the loaded records before any waiter sees their blocks as done."""
        for tier, (records, size) in self._brought.items():
            self.context.counters.add("loaded_blocks", records, tier=tier)
            self.context.counters.add("loaded_bytes", size, tier=tier)
            self.context.events.add("loaded", tier=tier, namespace=self.namespace, blocks=records, bytes=size)
        self._brought.clear()

    def _release(self, entries: Sequence[LoadEntry]) -> None:
        self.context.host.arena.release(*[source.slot for _, _, source in entries if isinstance(source, HostRecord)])

"""Prefetch: promotes one chain to host memory before a request needs it, head first, at the lowest priority."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from kvcache.cache.promote import InflightRead
from kvcache.cache.request import CacheNamespace
from kvcache.index.block_run import ALL_BLOCKS, BlockRun, ChainView, wanted
from kvcache.tier.tier import BACKGROUND, Outcome

WINDOW_BYTES = 16 << 20
"""Bytes in progress at a time. Reads that a request waits for have priority."""
MAX_WAIT_S = 5.0
"""The longest wait for the answers of shared tiers, and for one record."""
_POLL_S = 0.002


class ByteBudget:
    """A byte limit shared by the prefetches of several chains.

    Thread safety: any thread.
    """

    def __init__(self, max_bytes: int) -> None:
        self._remaining_bytes = max_bytes
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> bool:
        with self._lock:
            if size_bytes > self._remaining_bytes:
                return False
            self._remaining_bytes -= size_bytes
            return True

    def release(self, size_bytes: int) -> None:
        """Return bytes that were taken and will not be read."""
        with self._lock:
            self._remaining_bytes += size_bytes


class Prefetcher:
    """Prefetches one chain.

    Host memory limits it. It evicts no record used after the prefetch began.

    Args:
        packed: the chain's signatures, from its first block.
        budget: a shared byte limit, or None.
        ends: returns True to stop; called now and then.
        most_blocks: the most blocks of the chain.
    """

    def __init__(
        self,
        handle: CacheNamespace,
        packed: bytes,
        budget: ByteBudget | None,
        ends: Callable[[], bool],
        *,
        most_blocks: int = ALL_BLOCKS,
    ) -> None:
        self._most_blocks = most_blocks
        self._context, self._tier_manager = handle.context, handle.tier_manager
        self._handle, self._packed, self._budget, self._ends = handle, packed, budget, ends
        self.blocks = self.bytes = 0  # prefetched
        self.full = False  # the byte limit or host memory had no space for the rest

    def prefetch(self, id: str) -> bool:
        """Whether all cached blocks of the chain are in host memory. `id`: names the prefetch in logs."""
        handle, index = self._handle, self._context.index
        with handle.request(id=id, deadline_s=MAX_WAIT_S) as request:
            hit = request.match(signatures=self._packed, head=handle.id)
            clock, pause = self._context.os_env.clock, threading.Event()
            end = clock.now() + MAX_WAIT_S
            while hit.pending and clock.now() < end and not self._ends():
                pause.wait(_POLL_S)
                hit = request.match()
            before = request.begin()
        # all cached blocks, whether or not the plan would load them
        lookup = index.lookup(handle.shard_keys, handle.needs)
        lookup.match(self._packed)
        blocks = min(lookup.blocks, self._most_blocks)
        return bool(blocks) and self._prefetch(blocks, before)

    def _prefetch(self, blocks: int, before: int) -> bool:
        tier_manager, handle, packed = self._tier_manager, self._handle, self._packed
        need = wanted(handle.layout, blocks)
        chains = [ChainView(handle.id, packed, p.group, p.shard, p.payload_bytes, handle.id) for p in handle.all_shards]
        step = max(1, WINDOW_BYTES // sum(chain.payload_bytes for chain in chains))
        for first in range(0, blocks, step):
            lower_tier_blocks = []
            for ref, chain in zip(handle.all_shards, chains, strict=True):
                part = range(max(first, need[ref.group].start), min(first + step, blocks))
                masks = (
                    self._context.index.tier_masks(BlockRun(ref.key, packed).part(part.start, part.stop))
                    if part
                    else b""
                )
                lower_tier_blocks += [
                    (chain[i], chain.payload_bytes) for i, mask in zip(part, masks, strict=True) if not mask & 1
                ]
            size = sum(payload for _, payload in lower_tier_blocks)
            if self._budget is not None and not self._budget.take(size):
                self.full = True
                return False
            reads = tier_manager.promoter.begin(
                lower_tier_blocks,
                lambda count, size: tier_manager.slots(count, size, handle.tenant, before=before),
                priority=BACKGROUND,
                deadline=None,
            )
            if not self._came(reads, [payload for _, payload in lower_tier_blocks]) or self._ends():
                return False
        return True

    def _came(self, reads: Sequence[InflightRead | Outcome], sizes: Sequence[int]) -> bool:
        """Whether all reads succeeded. After one read is late, later ones are not waited for; they may still arrive."""
        promoter, patience_s, whole = self._tier_manager.promoter, MAX_WAIT_S, True
        for read, size in zip(reads, sizes, strict=True):
            outcome = read if isinstance(read, Outcome) else promoter.wait(read, patience_s)
            if outcome is Outcome.DONE:
                self.blocks, self.bytes = self.blocks + 1, self.bytes + size
                continue
            whole, self.full = False, self.full or outcome is Outcome.NO_CAPACITY
            if isinstance(read, InflightRead) and not read.outcome.settled:
                patience_s = 0.0
            elif self._budget is not None:
                self._budget.release(size)
        return whole

"""Holds of requests or of pins, which protect blocks from eviction; requests hold at most a quarter of each tier.

Of a shared tier only the index entry is held: this cache cannot keep its server from evicting.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from kvcache.block.record import record_bytes
from kvcache.evict.quotas import UNLIMITED
from kvcache.index.block_run import BlockRun
from kvcache.index.index import Index
from kvcache.tier.tier import Tier

HOLD_DIVISOR = 4


class Holds:
    """A bounded set of claims.

    A claim lists the blocks held of each run, head first, within the share. It is released as a whole. An abandoned
    claim (`abandon`) is released by the next call.

    Thread safety: any thread.
    """

    Claim = list[tuple[BlockRun, tuple[int, ...], int]]  # the held run, its blocks by fastest tier, bytes of each

    def __init__(self, index: Index, tiers: Sequence[Tier], *, share: int = HOLD_DIVISOR) -> None:
        """`share`: all claims hold at most 1/share of each tier."""
        self._index, self._tiers, self._share = index, tiers, share
        self._held_bytes = [0] * len(tiers)
        self._lock = threading.Lock()
        self._abandoned: deque[Holds.Claim] = deque()

    def abandon(self, claim: Claim) -> None:
        """Release a claim later.

        Callable anywhere, even in garbage collection, where waiting for a lock is not allowed.
        """
        if claim:
            self._abandoned.append(claim)

    def take(self, wanted: Sequence[tuple[BlockRun, int]]) -> Claim:
        """Hold these (blocks, payload bytes of each), each counted at the fastest tier that has it.

        The claim ends at the first block that no tier has or that exceeds the share.
        """
        claim: Holds.Claim = []
        self._sweep()
        with self._lock:
            for run, payload_bytes in wanted:
                size = record_bytes(payload_bytes)
                held = self._index.hold(run, [free_bytes // size for free_bytes in self._holdable_bytes()])
                if any(held):
                    claim.append((run.part(0, sum(held)), held, size))
                    self._count(held, size)
                if sum(held) < run.blocks:
                    break
        return claim

    def release(self, claim: Claim) -> None:
        self._sweep()
        self._give_back(claim)

    def _sweep(self) -> None:
        while self._abandoned:
            with suppress(IndexError):  # another thread was faster
                self._give_back(self._abandoned.popleft())

    def _give_back(self, claim: Claim) -> None:
        with self._lock:
            for run, held, size in claim:
                self._index.release(run)
                self._count(held, -size)
        claim.clear()

    def _count(self, blocks: Sequence[int], size: int) -> None:
        for t, count in enumerate(blocks):
            self._held_bytes[t] += count * size

    def _holdable_bytes(self) -> list[int]:
        return [
            UNLIMITED if tier.shared else max(0, tier.usage().capacity_bytes // self._share - held)
            for tier, held in zip(self._tiers, self._held_bytes, strict=True)
        ]

    def holdable_bytes(self) -> dict[str, int]:
        """By tier, the bytes of records that can still be held."""
        self._sweep()
        with self._lock:
            return {tier.name: free_bytes for tier, free_bytes in zip(self._tiers, self._holdable_bytes(), strict=True)}

    def held_bytes(self) -> dict[str, int]:
        self._sweep()
        return {tier.name: size for tier, size in zip(self._tiers, self._held_bytes, strict=True)}

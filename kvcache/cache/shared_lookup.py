"""Lookups in shared tiers: how much of a prompt they have, found in the background, never on a matching thread.

The index stores the answers like the contents of the cache's own tiers at start. The number of these entries
is bounded, and they are not trusted: a block may have been removed since. Its read then returns NOT_FOUND and the
prefix is shorter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from typing import Protocol, overload

from kvcache.block.record import Address
from kvcache.errors import ClosedError
from kvcache.index.block_run import ALL_BLOCKS, ChainView
from kvcache.index.index import Index
from kvcache.log import log_faults, logger
from kvcache.os_env import OsEnv
from kvcache.tier.tier import Outcome, Tier

MAX_PENDING_LOOKUPS = 64
"""The most lookups in progress; further prompts are matched against the index only."""

_log = logger("kvcache.ask")


class SharedTier(Tier, Protocol):
    @property
    def faults(self) -> Mapping[str, int]:
        """Counts of failures since the tier was opened, by kind."""

    def match_prefix(self, addresses: Sequence[Address], *, deadline: float | None = None) -> Future[int]:
        """The number of leading blocks of a chain that the tier has; 0 if that is not known in time. Returns at once.

        Raises:
            ClosedError: the tier is closed.
        """


class PendingLookup:
    """A lookup of one prompt's chains in every shared tier."""

    def __init__(
        self, chains: Sequence[ChainView], needs: Sequence[int], first: int, tiers: int, deadline: float, os_env: OsEnv
    ) -> None:
        """`chains` and `needs` by group. Blocks before `first` are known."""
        self.chains, self.needs, self.first, self.deadline = chains, needs, first, deadline
        self._unanswered, self._os_env = tiers, os_env
        self._answer = "nothing"
        self._lock = threading.Lock()

    @property
    def pending(self) -> bool:
        """Whether a tier may still answer in time. Found blocks are in the index before this turns False."""
        return self._unanswered > 0 and self._os_env.clock.now() < self.deadline

    @property
    def answer(self) -> str:
        """The result, as in the table of reasons."""
        return "late" if self._unanswered else self._answer

    def answered(self, answer: str) -> None:
        with self._lock:
            self._unanswered -= 1
            if self._answer != "found":
                self._answer = answer


class SharedLookup:
    """Runs lookups.

    `max_known_blocks`: the most blocks of a shared tier in the index; the least valuable are removed.
    """

    def __init__(
        self,
        tiers: Sequence[SharedTier],
        *,
        index: Index,
        os_env: OsEnv,
        max_known_blocks: int,
        deadline_s: float,
    ) -> None:
        self._tiers, self._index, self._os_env = tiers, index, os_env
        self._max_known_blocks = max_known_blocks
        self.deadline_s = deadline_s
        self._executors = [os_env.executor(1, f"{tier.name}-ask") for tier in tiers]
        self._open = 0
        self._lock = threading.Lock()
        self._closed = False

    def begin(
        self, chains: Sequence[ChainView], needs: Sequence[int], first: int, deadline: float
    ) -> PendingLookup | None:
        """Start a lookup of these chains from block `first` on. None if there is no tier or no block to look up."""
        if not self._tiers or first >= len(chains[0]):
            return None
        with self._lock:
            if self._closed:
                return None
            lookup = PendingLookup(chains, needs, first, len(self._tiers), deadline, self._os_env)
            if self._open >= MAX_PENDING_LOOKUPS:
                for _ in self._tiers:
                    lookup.answered("dropped")
                return lookup
            self._open += 1
        for tier, executor in zip(self._tiers, self._executors, strict=True):
            executor.submit(lambda tier=tier: self._answer(tier, lookup))  # type: ignore[misc]  # a default binds it to this turn
        return lookup

    def _answer(self, tier: SharedTier, lookup: PendingLookup) -> None:
        answer = "nothing"
        with (
            log_faults(_log, "lookup in %s failed; its blocks count as misses", tier.name),
            suppress(ClosedError),  # the cache is closing, so no caller waits for the answer
        ):
            if self._os_env.clock.now() >= lookup.deadline:
                answer = "late"
            elif self._find(tier, lookup):
                answer = "found"
        lookup.answered(answer)
        with self._lock:
            if tier is self._tiers[-1]:
                self._open -= 1

    def _find(self, tier: SharedTier, lookup: PendingLookup) -> int:
        """Index the blocks of this prompt that the tier has; the number of additional blocks."""
        first, chains, needs = lookup.first, lookup.chains, lookup.needs
        whole = [chain for chain, need in zip(chains, needs, strict=True) if need >= ALL_BLOCKS] or chains
        futures = [tier.match_prefix(ChainTail(chain, first), deadline=lookup.deadline) for chain in whole]
        reached = first + min(future.result() for future in futures)
        if reached == first:
            return 0
        for chain, need in zip(chains, needs, strict=True):
            if chain in whole:
                self.index_blocks(tier, chain, first, reached)
                continue
            wanted = range(max(0, reached - need), reached)
            ticket = tier.submit("contains", [chain[i] for i in wanted], deadline=lookup.deadline)
            ticket.wait()
            for i, outcome in zip(wanted, ticket.outcomes, strict=True):
                if outcome is Outcome.DONE:
                    self.index_blocks(tier, chain, i, i + 1)
        self.trim_index(tier)
        return reached - first

    def index_blocks(self, tier: Tier, chain: ChainView, first: int, end: int) -> None:
        self._index.insert_run(chain.run(first, end), chain.parent(first), tier.name)

    def trim_index(self, tier: Tier) -> None:
        """Remove the tier's entries beyond `max_known_blocks`, and some more, so that this runs rarely."""
        excess = self._index.resident(tier.name) - self._max_known_blocks
        if excess > 0:
            self._index.evict(tier.name, excess + self._max_known_blocks // 16)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the lookups begun before this call, so that no later answer reports blocks removed since."""
        with self._lock:
            flushes = [] if self._closed else [executor.submit(lambda: None) for executor in self._executors]
        return not wait_for(flushes, timeout_s).not_done

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for executor in self._executors:
            executor.close()


class ChainTail(Sequence[Address]):
    """The blocks of a chain from `first` on; addresses are built on access."""

    def __init__(self, chain: ChainView, first: int) -> None:
        self._chain, self._first = chain, first

    def __len__(self) -> int:
        return len(self._chain) - self._first

    @overload
    def __getitem__(self, i: int) -> Address: ...
    @overload
    def __getitem__(self, i: slice) -> list[Address]: ...
    def __getitem__(self, i: int | slice) -> Address | list[Address]:
        if isinstance(i, slice):
            return [self[k] for k in range(*i.indices(len(self)))]
        if not 0 <= i < len(self):
            raise IndexError(i)
        return self._chain[self._first + i]

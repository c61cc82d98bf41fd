"""What a tier that others write to has of a prompt: asked in the background, never by who matches.

The answer becomes knowledge in the index, as if the tier had told it at start. That is bounded, and it is never
trusted: a block may have left meanwhile, and then its read says ABSENT and the prefix is shorter.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from typing import Protocol, overload

from kvcache.block.record import Address
from kvcache.errors import ClosedError
from kvcache.index.block_run import ALL, Chained
from kvcache.index.index import Index
from kvcache.log import logger
from kvcache.os_env import Port
from kvcache.tier.tier import Outcome, Tier

MOST_QUESTIONS = 64
"""Under way at a time; a prompt beyond them is matched with what is known."""

_log = logger("kvcache.ask")


class SharedTier(Tier, Protocol):
    @property
    def faults(self) -> Mapping[str, int]:
        """What has failed since it was opened, by a word for it."""

    def leading(self, addresses: Sequence[Address], *, deadline: float | None = None) -> Future[int]:
        """How many of a chain are there, from its head; 0 where that cannot be told in time. Returns at once.
        ClosedError where it is closed."""


class Question:
    """How far the chains of one prompt reach in each shared tier."""

    def __init__(
        self, chains: Sequence[Chained], needs: Sequence[int], first: int, tiers: int, deadline: float, port: Port
    ) -> None:
        """`chains` and `needs` by group. Blocks before `first` are known."""
        self.chains, self.needs, self.first, self.deadline = chains, needs, first, deadline
        self._left, self._port = tiers, port
        self._answer = "nothing"
        self._lock = threading.Lock()

    @property
    def pending(self) -> bool:
        """Some tier may still answer in time. What they found is in the index before this turns False."""
        return self._left > 0 and self._port.clock.now() < self.deadline

    @property
    def answer(self) -> str:
        """What came of it, as the table of reasons has it."""
        return "late" if self._left else self._answer

    def answered(self, answer: str) -> None:
        with self._lock:
            self._left -= 1
            if self._answer != "found":
                self._answer = answer


class Ask:
    """`most_known`: blocks that the index knows of a shared tier at most; those least worth are forgotten."""

    def __init__(
        self,
        tiers: Sequence[SharedTier],
        *,
        index: Index,
        port: Port,
        most_known: int,
        deadline_s: float,
    ) -> None:
        self._tiers, self._index, self._port = tiers, index, port
        self._most_known = most_known
        self.deadline_s = deadline_s
        self._executors = [port.executor(1, f"{tier.name}-ask") for tier in tiers]
        self._open = 0
        self._lock = threading.Lock()
        self._closed = False

    def begin(self, chains: Sequence[Chained], needs: Sequence[int], first: int, deadline: float) -> Question | None:
        """Ask how far these chains go on from block `first`. None where there is nobody or nothing to ask."""
        if not self._tiers or first >= len(chains[0]):
            return None
        with self._lock:
            if self._closed:
                return None
            question = Question(chains, needs, first, len(self._tiers), deadline, self._port)
            if self._open >= MOST_QUESTIONS:
                for _ in self._tiers:
                    question.answered("dropped")
                return question
            self._open += 1
        for tier, executor in zip(self._tiers, self._executors, strict=True):
            executor.submit(lambda tier=tier: self._answer(tier, question))  # type: ignore[misc]  # a default binds it to this turn
        return question

    def _answer(self, tier: SharedTier, question: Question) -> None:
        answer = "nothing"
        try:
            if self._port.clock.now() >= question.deadline:
                answer = "late"
            elif self._find(tier, question):
                answer = "found"
        except ClosedError:
            pass  # the cache is closing: nobody waits for this
        except Exception:  # noqa: BLE001  law: never in the way
            _log.exception("a lookup in %s failed; what it has is a miss", tier.name)
        finally:
            question.answered(answer)
            with self._lock:
                if tier is self._tiers[-1]:
                    self._open -= 1

    def _find(self, tier: SharedTier, question: Question) -> int:
        """Put into the index what the tier has of this prompt; how many blocks more."""
        first, chains, needs = question.first, question.chains, question.needs
        whole = [chain for chain, need in zip(chains, needs, strict=True) if need >= ALL] or chains
        futures = [tier.leading(Rest(chain, first), deadline=question.deadline) for chain in whole]
        reach = first + min(future.result() for future in futures)
        if reach == first:
            return 0
        for chain, need in zip(chains, needs, strict=True):
            if chain in whole:
                self.know(tier, chain, first, reach)
                continue
            wanted = range(max(0, reach - need), reach)
            ticket = tier.submit("contains", [chain[i] for i in wanted], deadline=question.deadline)
            ticket.wait()
            for i, outcome in zip(wanted, ticket.outcomes, strict=True):
                if outcome is Outcome.DONE:
                    self.know(tier, chain, i, i + 1)
        self.bound(tier)
        return reach - first

    def know(self, tier: Tier, chain: Chained, first: int, end: int) -> None:
        self._index.insert_run(chain.run(first, end), chain.parent(first), tier.name)

    def bound(self, tier: Tier) -> None:
        """Forget what is known of the tier beyond the bound, and a little more, so that this is seldom."""
        over = self._index.resident(tier.name) - self._most_known
        if over > 0:
            self._index.evict(tier.name, over + self._most_known // 16)

    def wait(self, timeout_s: float) -> bool:
        """Until what was asked by now was answered, and no answer tells of what has gone since."""
        with self._lock:
            told = [] if self._closed else [executor.submit(lambda: None) for executor in self._executors]
        return not wait_for(told, timeout_s).not_done

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for executor in self._executors:
            executor.close()


class Rest(Sequence[Address]):
    """The blocks of a chain from one on: only those asked for are made."""

    def __init__(self, chain: Chained, first: int) -> None:
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

"""The scheduler: which tokens of which sequences the next step computes.

Continuous batching: every step is planned anew. Sequences that need one token are first, so that a long prompt delays
the next token of others by at most a step. Then prompts follow in order of arrival, in chunks of the remaining token
budget. Then waiting sequences start, while pages are available.

When the pages run out, the latest arrival is preempted. Its pages are released and its published blocks can still be
found. It is computed again from the blocks that remain. The first arrival is never preempted, so there is always
progress.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcache.engine.pool import PagePool
from kvcache.engine.prefix import PrefixCache
from kvcache.engine.sequence import FinishReason, Sequence, SequenceState
from kvcache.errors import ConfigError

if TYPE_CHECKING:
    import torch

StepPlan = dict[Sequence, int]
"""For each sequence, how many of its missing tokens the step computes."""


class Scheduler:
    def __init__(self, pool: PagePool, prefix: PrefixCache, *, max_batch_tokens: int, max_sequences: int) -> None:
        if max_batch_tokens < 1 or max_sequences < 1:
            raise ConfigError(f"max_batch_tokens = {max_batch_tokens}, max_sequences = {max_sequences}: expected 1 up")
        self._pool = pool
        self._prefix = prefix
        self._max_batch_tokens = max_batch_tokens
        self._max_sequences = max_sequences
        self.waiting: list[Sequence] = []  # both in order of arrival
        self.active: list[Sequence] = []  # LOADING or RUNNING: those that hold pages

    def add(self, sequence: Sequence) -> None:
        self._prefix.open(sequence)
        insort(self.waiting, sequence, key=_arrival)

    def schedule(self) -> StepPlan:
        """Return the next step; empty while nothing can be computed."""
        self._pool.poll()
        for sequence in self.active:
            if sequence.state is SequenceState.LOADING:
                self._prefix.finish_load(sequence)
        plan: StepPlan = {}
        running = [s for s in self.active if s.state is SequenceState.RUNNING]
        for sequence in sorted(running, key=lambda s: s.missing > 1):
            while sequence.state is SequenceState.RUNNING and not self._place(sequence, plan):
                if running[-1].arrival <= sequence.arrival:
                    break  # loads and stores that are running will free pages
                victim = running.pop()
                plan.pop(victim, None)
                self._preempt(victim)
        self._start(plan)
        return plan

    def _start(self, plan: StepPlan) -> None:
        for sequence in list(self.waiting):
            if len(self.active) == self._max_sequences:
                break
            promised = sum(max(0, self._prefix.blocks(len(s.tokens)) - len(s.pages)) for s in self.active)
            begun = self._prefix.begin(sequence, promised)
            if begun is None:
                continue
            if not begun:
                break
            self.waiting.remove(sequence)
            insort(self.active, sequence, key=_arrival)
            if sequence.state is SequenceState.RUNNING:
                self._place(sequence, plan)

    def _place(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Add as much of the sequence as the budget allows to the plan; return False where it gets no pages."""
        length = min(sequence.missing, self._max_batch_tokens - sum(plan.values()))
        if length == 0:
            return True
        needed = self._prefix.blocks(sequence.computed + length) - len(sequence.pages)
        pages = self._pool.allocate(max(0, needed))
        if pages is None:
            return False
        sequence.pages += pages
        plan[sequence] = length
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._prefix.drop(sequence)
        sequence.state = SequenceState.WAITING
        sequence.preemptions += 1
        self.active.remove(sequence)
        insort(self.waiting, sequence, key=_arrival)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Remove a sequence in any state, and release what it holds."""
        (self.waiting if sequence.state is SequenceState.WAITING else self.active).remove(sequence)
        self._prefix.close(sequence)
        sequence.state = SequenceState.FINISHED
        sequence.finish = reason

    def check(self) -> list[str]:
        """Audit the scheduler; return one line for each fault."""
        faults = self._pool.check()
        references = [0] * self._pool.pages
        for sequence in self.active:
            for page in sequence.pages:
                references[page] += 1
            if self._prefix.blocks(sequence.computed) > len(sequence.pages):
                faults.append(f"{sequence.id}: {sequence.computed} tokens computed, {len(sequence.pages)} pages")
            if (sequence.state is SequenceState.LOADING) != (sequence.transfer is not None):
                faults.append(f"{sequence.id} is {sequence.state.value} with transfer {sequence.transfer}")
        for page, count in enumerate(references):
            if count != self._pool.references(page):
                faults.append(f"page {page}: {self._pool.references(page)} references, in {count} block tables")
        for name, queue, states in (
            ("waiting", self.waiting, {SequenceState.WAITING}),
            ("active", self.active, {SequenceState.LOADING, SequenceState.RUNNING}),
        ):
            if [s.arrival for s in queue] != sorted({s.arrival for s in queue}):
                faults.append(f"{name} is not in order of arrival, each once")
            faults += [f"{s.id} is {s.state.value} among the {name}" for s in queue if s.state not in states]
            faults += [f"{s.id} waits with {len(s.pages)} pages" for s in queue if name == "waiting" and s.pages]
        return faults


def _arrival(sequence: Sequence) -> int:
    return sequence.arrival


# The input of a model in one step: rows of several sequences, one after the other, without padding.


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's part of a step: rows `start` to `start + length` of the flat batch.

    `page_ids` are the pages of the sequence's first `context + length` tokens, in order; more may follow. The first
    `context` tokens are already in them; the model writes the others.
    """

    start: int
    length: int
    context: int
    page_ids: list[int]


@dataclass(frozen=True, slots=True)
class Batch:
    """The spans of a step, in the order of their rows. Together they cover every row once.

    Two spans may read the same page. No page is written by one span and read or written by another in the same step.
    """

    token_ids: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64: position of each row in its sequence
    spans: list[Span]
    logits_at: torch.Tensor  # (R,) int64: the rows whose logits are needed

"""How one server's work on blocks of a batch ends: told to the ticket and counted, or kept for another server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from kvcache.tier.counters import Counters
from kvcache.tier.queue import Batch
from kvcache.tier.redis.pool import ELSEWHERE
from kvcache.tier.redis.wire import Wrong
from kvcache.tier.tier import Op, Outcome

OPS: tuple[Op, ...] = ("read", "write", "contains", "remove")
_NAMES = {op: {outcome: f"{op}_{outcome.value}" for outcome in Outcome} for op in OPS}


class Settling:
    """`blocks`: the numbers that the batch's own ticket has for those of this part, where they differ from the part's.
    `follow`: what turns out to be at another server is not settled, but stands in `moved`, with the place that the
    server named, if it did. `doubtful`: what is known of the servers is no longer so."""

    def __init__(
        self, batch: Batch, counters: Counters, *, blocks: Sequence[int] | None = None, follow: bool = False
    ) -> None:
        self._batch, self._counters, self._blocks, self._follow = batch, counters, blocks, follow
        self._names = _NAMES[batch.op]
        self.moved: dict[int, str] = {}
        self.doubtful = False

    def __call__(self, i: int, outcome: Outcome, check: str = "") -> None:
        block = i if self._blocks is None else self._blocks[i]
        if self._follow and check in ELSEWHERE:
            self.moved[block] = check.place if isinstance(check, Wrong) else ""
            self.doubtful = self.doubtful or check != "ASK"
            return
        self._counters.add(self._names[outcome])
        if outcome is Outcome.DONE and self._batch.segments:
            self._counters.add(f"{self._batch.op}_bytes", self._batch.size_bytes(block))
        self._batch.ticket.settle(block, outcome, check)

    def many(self, first: int, outcomes: Sequence[Outcome]) -> None:
        """Blocks from `first` on, of a batch without segments, each for a reason that is no other server's."""
        if self._blocks is not None:
            for i, outcome in enumerate(outcomes, first):
                self(i, outcome)
            return
        for outcome, count in Counter(outcomes).items():
            self._counters.add(self._names[outcome], count)
        self._batch.ticket.settle_many(first, outcomes)

    def rest(self, outcome: Outcome, check: str = "") -> None:
        """Those that nobody has settled, and that are not kept for another server."""
        ticket = self._batch.ticket
        for i in self._batch.blocks if self._blocks is None else range(len(self._blocks)):
            block = i if self._blocks is None else self._blocks[i]
            if not ticket.settled(block) and block not in self.moved:
                self(i, outcome, check)

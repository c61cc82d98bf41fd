"""A load or a store under way, as the caller sees it."""

from __future__ import annotations

from kvcache.tier.tier import Outcome, Ticket


class BlockTransfer(Ticket):
    """One outcome a block, with the count that a caller wants: how far the prefix reached."""

    @property
    def blocks(self) -> int:
        outcomes = self.outcomes
        return next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.DONE), len(outcomes))

    @property
    def failure(self) -> tuple[int, Outcome] | None:
        """The first block that will not come, and why not."""
        outcomes = self.outcomes
        if outcomes.count(Outcome.DONE) == len(outcomes):
            return None
        ended = ((i, o) for i, o in enumerate(outcomes) if o.settled and o is not Outcome.DONE)
        return next(ended, None)

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """On a CPU blocks arrive whole: a layer is there when all of them are."""
        return self.wait(timeout_s)

    def settle_run(self, first: int, end: int, outcome: Outcome) -> None:
        """Give every block of these that has no outcome yet this one."""
        with self._changed:
            for i in range(first, end):
                if not self._outcomes[i].settled:
                    self._outcomes[i] = outcome
                    self._left -= 1
            if not self._left:
                self._changed.notify_all()

    def settle_rest(self, first: int, outcome: Outcome) -> None:
        """The same of all from `first` on."""
        self.settle_run(first, len(self._outcomes), outcome)

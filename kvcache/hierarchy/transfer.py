"""A load or a store under way, as the caller sees it."""

from __future__ import annotations

from kvcache.tier.tier import Outcome, Ticket


class BlockTransfer(Ticket):
    """One outcome a block, with the count that a caller wants: how far the prefix reached."""

    @property
    def blocks(self) -> int:
        outcomes = self.outcomes
        return next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.DONE), len(outcomes))

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """On a CPU blocks arrive whole: a layer is there when all of them are."""
        return self.wait(timeout_s)

    def settle_rest(self, first: int, outcome: Outcome) -> None:
        """Give every block from `first` on that has no outcome yet this one."""
        for i in range(first, len(self._outcomes)):
            self.settle(i, outcome)

"""A load or a store under way, as the caller sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvcache.tier.tier import Outcome, Ticket
from kvcache.transfer.copier import CopyHandle


class BlockTransfer(Ticket):
    """One outcome a block, with the count that a caller wants: how far the prefix reached."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._copies: list[CopyHandle] = []
        self._begun = 0  # blocks from the front whose copies are among these, or were not needed

    seconds = 0.0
    """What a load took, once it is done."""

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

    def begun(self, end: int, copies: Sequence[CopyHandle]) -> None:
        """These bring blocks before `end`, behind those that were told before."""
        with self._changed:
            self._copies += copies
            self._begun = end
            self._changed.notify_all()

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Counted within each group's shard; where blocks arrive whole a layer is there when all of them are."""
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def left() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        with self._changed:
            if not self._changed.wait_for(lambda: not self._left or self._begun == len(self._outcomes), left()):
                return False
            copies = list(self._copies)
        try:
            return all(copy.wait_layer(layer, left()) for copy in copies)
        except Exception:  # noqa: BLE001  law: never in the way; the device failed, and so will the transfer
            return self.wait(left())

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

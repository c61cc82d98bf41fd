"""A load or a store in progress, as its caller sees it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvcache.tier.tier import Outcome, Ticket
from kvcache.transfer.copier import CopyHandle


class BlockTransfer(Ticket):
    """One outcome per block, and the number of leading blocks that are done."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._copies: list[CopyHandle] = []
        self._begun = 0  # leading blocks whose copies are in `_copies` or were not needed

    seconds = 0.0
    """The duration of a load, once it is done."""

    @property
    def blocks(self) -> int:
        outcomes = self.outcomes
        return next((i for i, outcome in enumerate(outcomes) if outcome is not Outcome.DONE), len(outcomes))

    @property
    def failure(self) -> tuple[int, Outcome] | None:
        """The first block that failed, and its outcome."""
        outcomes = self.outcomes
        if outcomes.count(Outcome.DONE) == len(outcomes):
            return None
        ended = ((i, o) for i, o in enumerate(outcomes) if o.settled and o is not Outcome.DONE)
        return next(ended, None)

    def begun(self, end: int, copies: Sequence[CopyHandle]) -> None:
        """Add the copies of blocks before `end`, after those added before."""
        with self._changed:
            self._copies += copies
            self._begun = end
            self._changed.notify_all()

    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """As `Transfer.wait_layer`.

        Layers count within each group's shard. Blocks that arrive whole have a layer when they have all.
        """
        end = None if timeout_s is None else time.monotonic() + timeout_s

        def remaining() -> float | None:
            return None if end is None else max(0.0, end - time.monotonic())

        with self._changed:
            if not self._changed.wait_for(
                lambda: not self._unsettled or self._begun == len(self._outcomes), remaining()
            ):
                return False
            copies = list(self._copies)
        try:
            return all(copy.wait_layer(layer, remaining()) for copy in copies)
        except Exception:  # noqa: BLE001  boundary to foreign code: the device failed, and the transfer reports it
            return self.wait(remaining())

    def settle_run(self, first: int, end: int, outcome: Outcome) -> None:
        """Set this outcome for each of these blocks that has none yet."""
        with self._changed:
            for i in range(first, end):
                if not self._outcomes[i].settled:
                    self._outcomes[i] = outcome
                    self._unsettled -= 1
            if not self._unsettled:
                self._changed.notify_all()

    def settle_rest(self, first: int, outcome: Outcome) -> None:
        """Set this outcome for each block from `first` on that has none yet."""
        self.settle_run(first, len(self._outcomes), outcome)

"""A ticket that knows the time: whoever looks at it sees LATE once that is true, even while every thread hangs."""

from __future__ import annotations

from collections.abc import Callable

from kvcache.os_env import Port
from kvcache.tier.tier import Outcome, Ticket


class TimedTicket(Ticket):
    def __init__(
        self,
        count: int,
        on_outcome: Callable[[int, Outcome], None] | None,
        deadline: float | None,
        expire: Callable[[], None],
        port: Port,
    ) -> None:
        """`expire` ends what waited past its deadline, this ticket's blocks among others."""
        super().__init__(count, on_outcome)
        self._changed = port.condition()
        self._deadline, self._expire, self._clock = deadline, expire, port.clock

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        self._look()
        return super().outcomes

    @property
    def done(self) -> bool:
        self._look()
        return super().done

    def _look(self) -> None:
        if self._deadline is not None and self._left and self._clock.now() > self._deadline:
            self._expire()

    def wait(self, timeout_s: float | None = None) -> bool:
        if self._deadline is None:
            return super().wait(timeout_s)
        self._look()
        first = max(0.0, self._deadline - self._clock.now())
        if timeout_s is not None and timeout_s <= first:
            return super().wait(timeout_s)
        if super().wait(first):
            return True
        self._expire()  # what is left has begun, and ends when the device says so
        return super().wait(None if timeout_s is None else timeout_s - first)

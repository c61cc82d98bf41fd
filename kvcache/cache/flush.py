"""`flush`: waits for writes to lower tiers, offers again the blocks that a tier refused, and reports the result.

A `Watch` represents one caller and holds the counts already reported to it, so that each caller gets each lost block
once. Callers that only need the end of queued writes (an audit, an erasure) use `TierManager.settle`. It offers no
block again and takes no report from any caller.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import TimeoutError as LateError
from dataclasses import dataclass, field

from kvcache.block.record import Address
from kvcache.cache.api import TierFlush
from kvcache.cache.refused import Scope, since
from kvcache.cache.write_back import WriteBackQueue
from kvcache.os_env import Executor

SYNC_S = 1.0
"""The least time for a sync, however little is left: a sync of data that is already durable takes none."""

Left = Callable[[], float | None]
"""Seconds until the deadline; None without one."""
Counts = dict[str, dict[bytes, int]]
"""Blocks by tier and namespace."""


Submit = Callable[[Callable[[], None]], object]
"""Runs a call, inline or elsewhere; `Executor.submit` is one."""


class Stores:
    """Stores in progress: `flush` waits for those that began before it.

    Thread safety: any thread.
    """

    def __init__(self, changed: threading.Condition) -> None:
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._changed = changed

    def submit(self, call: Callable[[], None], submit: Submit) -> None:
        """Have `submit` run a call that stores. It counts as in progress until it ends, however it ends."""
        number = self.begin()

        def run() -> None:
            try:
                call()
            finally:
                self.end(number)

        try:
            submit(run)
        except BaseException:
            self.end(number)
            raise

    def begin(self) -> int:
        """Begin a store; the number for `end`."""
        with self._changed:
            number = next(self._numbers)
            self._open.add(number)
        return number

    def end(self, number: int) -> None:
        with self._changed:
            self._open.discard(number)
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> int:
        """Wait for the stores in progress now; how many have not ended in time."""
        with self._changed:
            begun = set(self._open)
            self._changed.wait_for(lambda: begun.isdisjoint(self._open), timeout_s)
            return len(begun & self._open)


@dataclass(slots=True)
class Watch:
    """The counts reported to one caller. `clock`: the index's clock at the last report."""

    reached: Counts = field(default_factory=dict)
    lost: Counts = field(default_factory=dict)
    clock: int = 0

    @classmethod
    def begin(cls, lanes: Sequence[WriteBackQueue], clock: int, told: Counts | None = None) -> Watch:
        """A watch that counts from now on. Losses count from `told`, those reported to any caller, if given."""
        counts = {lane.tier.name: lane.refused.counts() for lane in lanes}
        lost = {tier: lost for tier, (_, lost) in counts.items()}
        if told is not None:
            lost = {tier: dict(told.get(tier, {})) for tier in counts}
        return cls({tier: reached for tier, (reached, _) in counts.items()}, lost, clock)


class Barrier:
    """One flush of one tier: the blocks queued at its start, and those that the tier refused before."""

    def __init__(self, lane: WriteBackQueue, scope: Scope | None) -> None:
        self._lane, self._scope = lane, scope
        self._missing = lane.refused.kept(scope)
        self._names = lane.queued(scope)
        self._tried: set[bytes] = set()
        self.synced = True

    def offer_again(self, left: Left) -> None:
        """Queue the blocks that the tier refused, heads first, until time runs out."""
        for address in self._missing:
            if address.name in self._tried:
                continue
            heads = self._lane.heads(address, self._tried)
            for each in () if heads is None else (*heads, address):
                if not self._lane.offer_again(each, left()):
                    return
                self._tried.add(each.name)
            self._tried.add(address.name)  # counts as tried: the tier cannot have it without its head

    def wait(self, executor: Executor, left: Left) -> None:
        """Wait until the blocks are written or refused and the written ones are durable, or time runs out."""
        if not self._lane.wait_written(self._names | self._tried, left()):
            return
        left_s = left()
        try:
            synced = executor.submit(self._lane.tier.sync).result(None if left_s is None else max(SYNC_S, left_s))
            self.synced = bool(synced)
        except LateError:
            self.synced = False

    def report(self, watch: Watch, told: Counts, used_since: Callable[[Address], bool]) -> TierFlush:
        """The result for these blocks, and for all that `watch` has not had reported."""
        tier = self._lane.tier.name
        reached, lost = self._lane.refused.counts()
        meant = self._names.union(address.name for address in self._missing)
        queued = self._lane.queued(self._scope) & meant
        kept = [a for a in self._lane.refused.kept(self._scope) if a.name in meant - queued and used_since(a)]
        had = self._tried | self._names
        untried = sum(address.name not in had for address in kept)
        gone = since(lost, watch.lost.setdefault(tier, {}), self._scope, anybodys=True)
        _tell(told.setdefault(tier, {}), watch.lost[tier])
        return TierFlush(
            reached=since(reached, watch.reached.setdefault(tier, {}), self._scope, anybodys=False),
            refused=len(kept) - untried + gone,
            waiting=len(queued) + untried,
            lost=gone,
            synced=self.synced,
        )


def _tell(told: dict[bytes, int], counts: dict[bytes, int]) -> None:
    for namespace, count in counts.items():
        told[namespace] = max(count, told.get(namespace, 0))


def settled(lanes: Collection[WriteBackQueue], left: Left) -> bool:
    """Whether the blocks queued now were written or refused in time."""
    queued = [(lane, lane.queued()) for lane in lanes]
    return all(lane.wait_written(names, left()) for lane, names in queued)

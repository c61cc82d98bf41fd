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

Remaining = Callable[[], float | None]
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
    def begin(cls, queues: Sequence[WriteBackQueue], clock: int, reported: Counts | None = None) -> Watch:
        """A watch that counts from now on. Losses count from `reported`, counts reported to any caller, if given."""
        counts = {queue.tier.name: queue.refused.counts() for queue in queues}
        lost = {tier: lost for tier, (_, lost) in counts.items()}
        if reported is not None:
            lost = {tier: dict(reported.get(tier, {})) for tier in counts}
        return cls({tier: reached for tier, (reached, _) in counts.items()}, lost, clock)


class Barrier:
    """One flush of one tier: the blocks queued at its start, and those that the tier refused before."""

    def __init__(self, queue: WriteBackQueue, scope: Scope | None) -> None:
        self._queue, self._scope = queue, scope
        self._missing = queue.refused.kept(scope)
        self._names = queue.queued(scope)
        self._tried: set[bytes] = set()
        self.synced = True

    def offer_again(self, remaining: Remaining) -> None:
        """Queue the blocks that the tier refused, heads first, until time runs out."""
        for address in self._missing:
            if address.name in self._tried:
                continue
            heads = self._queue.heads(address, self._tried)
            for each in () if heads is None else (*heads, address):
                if not self._queue.offer_again(each, remaining()):
                    return
                self._tried.add(each.name)
            self._tried.add(address.name)  # counts as tried: the tier cannot have it without its head

    def wait(self, executor: Executor, remaining: Remaining) -> None:
        """Wait until the blocks are written or refused and the written ones are durable, or time runs out."""
        if not self._queue.wait_written(self._names | self._tried, remaining()):
            return
        remaining_s = remaining()
        try:
            synced = executor.submit(self._queue.tier.sync).result(
                None if remaining_s is None else max(SYNC_S, remaining_s)
            )
            self.synced = bool(synced)
        except LateError:
            self.synced = False

    def report(self, watch: Watch, reported: Counts, used_since: Callable[[Address], bool]) -> TierFlush:
        """The result for these blocks, and for all that `watch` has not had reported."""
        tier = self._queue.tier.name
        reached, lost = self._queue.refused.counts()
        meant = self._names.union(address.name for address in self._missing)
        queued = self._queue.queued(self._scope) & meant
        kept = [a for a in self._queue.refused.kept(self._scope) if a.name in meant - queued and used_since(a)]
        had = self._tried | self._names
        untried = sum(address.name not in had for address in kept)
        newly_lost = since(lost, watch.lost.setdefault(tier, {}), self._scope, include_unattributed=True)
        _merge_reported(reported.setdefault(tier, {}), watch.lost[tier])
        return TierFlush(
            reached=since(reached, watch.reached.setdefault(tier, {}), self._scope, include_unattributed=False),
            refused=len(kept) - untried + newly_lost,
            waiting=len(queued) + untried,
            lost=newly_lost,
            synced=self.synced,
        )


def _merge_reported(reported: dict[bytes, int], counts: dict[bytes, int]) -> None:
    for namespace, count in counts.items():
        reported[namespace] = max(count, reported.get(namespace, 0))


def settled(queues: Collection[WriteBackQueue], remaining: Remaining) -> bool:
    """Whether the blocks queued now were written or refused in time."""
    queued = [(queue, queue.queued()) for queue in queues]
    return all(queue.wait_written(names, remaining()) for queue, names in queued)

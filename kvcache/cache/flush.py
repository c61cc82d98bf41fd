"""`flush`: wait for what goes down, offer again what a tier refused, and report what became of it.

A caller is represented by a `Watch`, which holds what that caller was told before: a lost block is reported to each of
them once. Callers that only need what is queued to be over (an audit, an erasure) use `Flow.settle` instead: it offers
nothing again and takes no report away from anybody.
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
"""For a tier to make its writes durable, however little time there is: a sync of what is durable takes none."""

Left = Callable[[], float | None]
"""Seconds until the deadline; None where there is none."""
Counts = dict[str, dict[bytes, int]]
"""Blocks by tier and namespace."""


Submit = Callable[[Callable[[], None]], object]
"""Runs a call, here or elsewhere; `Executor.submit` is one."""


class Stores:
    """Calls that store: `flush` waits for those that were begun before it. Thread-safe."""

    def __init__(self, changed: threading.Condition) -> None:
        self._numbers = itertools.count()
        self._open: set[int] = set()
        self._changed = changed

    def submit(self, call: Callable[[], None], submit: Submit) -> None:
        """Have `submit` run a call that stores: it is begun from now on, until it ends, however it ends."""
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
        """The number to end it by."""
        with self._changed:
            number = next(self._numbers)
            self._open.add(number)
        return number

    def end(self, number: int) -> None:
        with self._changed:
            self._open.discard(number)
            self._changed.notify_all()

    def wait(self, timeout_s: float | None) -> int:
        """Until those that were begun by now have ended; how many have not, where time ran out."""
        with self._changed:
            begun = set(self._open)
            self._changed.wait_for(lambda: begun.isdisjoint(self._open), timeout_s)
            return len(begun & self._open)


@dataclass(slots=True)
class Watch:
    """What one caller was told. `clock`: the index's at its last report."""

    reached: Counts = field(default_factory=dict)
    lost: Counts = field(default_factory=dict)
    clock: int = 0

    @classmethod
    def begin(cls, lanes: Sequence[WriteBackQueue], clock: int, told: Counts | None = None) -> Watch:
        """Counts from now on; of lost blocks, from what was `told` to any caller, where that is given."""
        counts = {lane.tier.name: lane.refused.counts() for lane in lanes}
        lost = {tier: lost for tier, (_, lost) in counts.items()}
        if told is not None:
            lost = {tier: dict(told.get(tier, {})) for tier in counts}
        return cls({tier: reached for tier, (reached, _) in counts.items()}, lost, clock)


class Barrier:
    """One flush of one tier: the blocks that are queued when it begins, and those that the tier refused before."""

    def __init__(self, lane: WriteBackQueue, scope: Scope | None) -> None:
        self._lane, self._scope = lane, scope
        self._missing = lane.refused.kept(scope)
        self._names = lane.queued(scope)
        self._tried: set[bytes] = set()
        self.synced = True

    def offer_again(self, left: Left) -> None:
        """Queue what the tier refused, heads first, until time runs out."""
        for address in self._missing:
            if address.name in self._tried:
                continue
            heads = self._lane.heads(address, self._tried)
            for each in () if heads is None else (*heads, address):
                if not self._lane.offer_again(each, left()):
                    return
                self._tried.add(each.name)
            self._tried.add(address.name)  # where a head is nowhere, the tier cannot have it

    def wait(self, executor: Executor, left: Left) -> None:
        """Until the blocks were written or refused, and what was written is durable; or time runs out."""
        if not self._lane.wait_written(self._names | self._tried, left()):
            return
        left_s = left()
        try:
            synced = executor.submit(self._lane.tier.sync).result(None if left_s is None else max(SYNC_S, left_s))
            self.synced = bool(synced)
        except LateError:
            self.synced = False

    def report(self, watch: Watch, told: Counts, used_since: Callable[[Address], bool]) -> TierFlush:
        """What became of them, and of all that `watch` was not told of."""
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
    """Whether what is queued now was written, or could not be, in time."""
    queued = [(lane, lane.queued()) for lane in lanes]
    return all(lane.wait_written(names, left()) for lane, names in queued)

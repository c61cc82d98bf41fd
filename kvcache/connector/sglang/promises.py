"""What a lookup may promise: pages that lie in host memory and are held there until they are loaded, or given up.

SGLang answers a load that fails with an error, so that nothing is promised of what lies lower: it begins to move up,
and a later lookup of the same request finds it. What was looked up and never loaded is given back after a while, or
when too many are.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvcache.hierarchy.face import Bound, Request

HOST = "host"
MOST = 256
LONGEST_S = 60.0
AGAIN_S, POLL_S = 0.25, 0.001


@dataclass(slots=True)
class _Promise:
    keys: tuple[str, ...]
    request: Request
    since: float


class Promises:
    """Not for use by several threads at once: SGLang's scheduler asks, and waits `wait_s` at the first lookup of a
    request, where something is on its way, so that one on an idle server need not be computed."""

    def __init__(self, bound: Bound, wait_s: float, now: Callable[[], float] = time.monotonic) -> None:
        self._bound, self._wait_s, self._now = bound, wait_s, now
        self._open: OrderedDict[str, _Promise] = OrderedDict()

    def __len__(self) -> int:
        return len(self._open)

    def pages(self, rid: str, keys: Sequence[str]) -> int:
        """How many of these pages, from the first on, can be loaded for certain."""
        self._expire()
        promise, wanted = self._open.get(rid), tuple(keys)
        until = self._now()
        if promise is None or promise.keys != wanted:
            until += self._wait_s
            self._begin(rid, wanted)
        elif until - promise.since > AGAIN_S:
            self._begin(rid, wanted)  # a request brings as much as a load has under way: the next part
        request = self._open[rid].request
        while True:
            hit = request.match()
            if not hit.pending:
                request.admit()
            near = hit.by_tier.get(HOST, 0)
            if (near == hit.blocks and not hit.pending) or self._now() >= until:
                return self._near(wanted, hit.blocks, near)
            time.sleep(POLL_S)

    def _begin(self, rid: str, keys: tuple[str, ...]) -> None:
        before = self._open.pop(rid, None)
        request = self._bound.request()
        request.match(digests=_digests(keys), after=b"")
        self._open[rid] = _Promise(keys, request, self._now())
        if before is not None:
            before.request.close()  # after the new one holds what it held

    def take(self, rid: str, keys: Sequence[str]) -> Request | None:
        """The request of these pages, now the caller's; None where one of them is not in host memory any more."""
        promise = self._open.pop(rid, None)
        if promise is None:
            return None
        if promise.keys[: len(keys)] == tuple(keys):
            hit = promise.request.match()
            if self._near(promise.keys, hit.blocks, hit.by_tier.get(HOST, 0)) >= len(keys):
                return promise.request
        promise.request.close()
        return None

    def give_up(self, rid: str) -> None:
        promise = self._open.pop(rid, None)
        if promise is not None:
            promise.request.close()

    def clear(self) -> None:
        for rid in list(self._open):
            self.give_up(rid)

    def _near(self, keys: Sequence[str], blocks: int, in_host: int) -> int:
        """Leading blocks in host memory, given how many of the leading ones are there and how many lie in host."""
        if blocks == in_host:
            return blocks
        low, high = 0, blocks
        digests = _digests(keys[:blocks])
        with self._bound.request() as probe:
            while low < high:
                middle = (low + high + 1) // 2
                hit = probe.match(digests=digests[:middle], after=b"")
                if hit.by_tier.get(HOST, 0) == middle:
                    low = middle
                else:
                    high = middle - 1
        return low

    def _expire(self) -> None:
        limit = self._now() - LONGEST_S
        while self._open and (len(self._open) >= MOST or next(iter(self._open.values())).since < limit):
            self.give_up(next(iter(self._open)))


def _digests(keys: Sequence[str]) -> list[bytes]:
    return [bytes.fromhex(key) for key in keys]

"""One pool of SGLang's over the cache: is it there, bring it, keep it, each within a deadline, from any thread.

Never raises: what fails is a miss, said once in the log and counted by the cache.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvcache.connector.sglang.pool import Described
from kvcache.hierarchy.face import Bound, Request, Transfer
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import Pages

POLL_S = 0.0005

_log = logging.getLogger("kvcache.sglang")
T = TypeVar("T")


class Depot:
    def __init__(self, bound: Bound, described: Described, deadline_s: float) -> None:
        self.bound, self.described, self.deadline_s = bound, described, deadline_s

    def leading(self, keys: Sequence[str], before: Sequence[str] | None = None) -> int:
        """How many of these pages are there, from the first on. What lies low begins to move up."""

        def ask(request: Request, until: float) -> int:
            blocks = self._match(request, keys, before, until)
            request.admit()
            return blocks

        return self._safely(ask, 0)

    def present(self, keys: Sequence[str]) -> list[bool]:
        """Of each of these pages whether it is there."""
        found: list[bool] = []

        def ask(request: Request, until: float) -> None:
            while len(found) < len(keys) and time.monotonic() < until:
                rest = keys[len(found) :]
                run = self._match(request, rest, None, until)
                found.extend([True] * run + [False] * (run < len(rest)))

        self._safely(ask, None)
        return found + [False] * (len(keys) - len(found))

    def fetch(
        self,
        keys: Sequence[str],
        page_ids: Sequence[int],
        before: Sequence[str] | None = None,
        pages: Pages | None = None,
    ) -> list[bool]:
        """Bring these pages; true from the first on, as far as they came."""

        def bring(request: Request, until: float) -> int:
            self._match(request, keys, before, until)
            transfer = request.load(len(keys), pages or self.described.pages, self._ids(page_ids))
            self._end(transfer, until)
            return transfer.blocks

        count = self._safely(bring, 0)
        return [i < count for i in range(len(keys))]

    def keep(
        self,
        keys: Sequence[str],
        page_ids: Sequence[int],
        before: Sequence[str] | None = None,
        pages: Pages | None = None,
    ) -> list[bool]:
        """Take these pages; true for each that can be found from now on."""

        def take(request: Request, until: float) -> list[bool]:
            request.match(digests=[bytes.fromhex(key) for key in keys], after=_after(before))
            transfer = request.store(pages or self.described.pages, self._ids(page_ids))
            self._end(transfer, until)
            return [outcome is Outcome.DONE for outcome in transfer.outcomes]

        return self._safely(take, [False] * len(keys))

    def _match(self, request: Request, keys: Sequence[str], before: Sequence[str] | None, until: float) -> int:
        """Blocks from the first on, once all tiers have answered or the time is over."""
        hit = request.match(digests=[bytes.fromhex(key) for key in keys], after=_after(before))
        while hit.pending and time.monotonic() < until:
            time.sleep(POLL_S)
            hit = request.match()
        return hit.blocks

    def _end(self, transfer: Transfer, until: float) -> None:
        """Afterwards the pages are SGLang's again. What has not begun by the deadline does not begin."""
        if not transfer.wait(max(0.0, until - time.monotonic())):
            transfer.cancel()
            transfer.wait(self.deadline_s)

    def _ids(self, page_ids: Sequence[int]) -> list[Sequence[int]]:
        return [page_ids] * len(self.described.pages)

    def _safely(self, work: Callable[[Request, float], T], otherwise: T) -> T:
        try:
            with self.bound.request(deadline_s=self.deadline_s) as request:
                return work(request, time.monotonic() + self.deadline_s)
        except Exception:  # noqa: BLE001  law: never in the way
            _log.exception("the cache failed; its pages are a miss")
            return otherwise


def _after(before: Sequence[str] | None) -> bytes | None:
    """The digest before the first: none where it is the prefix's first, empty where SGLang does not tell."""
    if before is None:
        return b""
    return bytes.fromhex(before[-1]) if before else None

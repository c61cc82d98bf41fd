"""One pool of SGLang's over the cache: match, load and store, each within a deadline, from any thread.

Never raises: a failure is a miss, logged once a kind. `until` is the end of a call over several pools. Each operation
takes at most `deadline_s`, and as long again where a running transfer has to end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from kvcache.cache.api import NamespaceHandle, Request, Transfer
from kvcache.connector.guard import log_once, recover
from kvcache.connector.sglang.host_pools import PoolLayout
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import Pages


def release(requests: Iterable[Request]) -> None:
    """Close all of these requests, even where closing one fails."""
    for request in requests:
        recover(
            request.close,
            lambda error: log_once("request was not closed; its holds are released at garbage collection", error),
        )


POLL_S = 0.0005

T = TypeVar("T")


class PoolStore:
    def __init__(self, handle: NamespaceHandle, described: PoolLayout, deadline_s: float) -> None:
        self.handle, self.described, self.deadline_s = handle, described, deadline_s

    def match_prefix(self, keys: Sequence[str], before: Sequence[str] | None = None, until: float | None = None) -> int:
        """Return the number of leading pages that are present, and begin the promotion of those in lower tiers."""

        def ask(request: Request, until: float) -> int:
            blocks = self._match(request, keys, before, until)
            request.admit()
            return blocks

        return self._safely(ask, 0, until)

    def present(self, keys: Sequence[str], until: float | None = None) -> list[bool]:
        """Return for each of these pages whether it is present."""
        found: list[bool] = []

        def ask(request: Request, until: float) -> None:
            while len(found) < len(keys) and time.monotonic() < until:
                rest = keys[len(found) :]
                run = self._match(request, rest, None, until)
                found.extend([True] * run + [False] * (run < len(rest)))

        self._safely(ask, None, until)
        return found + [False] * (len(keys) - len(found))

    def load(
        self,
        keys: Sequence[str],
        page_ids: Sequence[int],
        before: Sequence[str] | None = None,
        pages: Pages | None = None,
        until: float | None = None,
    ) -> list[bool]:
        """Load these pages; true for the leading ones that arrived."""

        def bring(request: Request, until: float) -> int:
            self._match(request, keys, before, until)
            transfer = request.load(len(keys), pages or self.described.pages, self._ids(page_ids))
            self._end(transfer, until)
            return min(transfer.blocks, len(keys))

        count = self._safely(bring, 0, until)
        return [i < count for i in range(len(keys))]

    def store(
        self,
        keys: Sequence[str],
        page_ids: Sequence[int],
        before: Sequence[str] | None = None,
        pages: Pages | None = None,
        until: float | None = None,
    ) -> list[bool]:
        """Store these pages; true for each that can be found from now on."""

        def take(request: Request, until: float) -> list[bool]:
            request.match(digests=[bytes.fromhex(key) for key in keys], after=_after(before))
            transfer = request.store(pages or self.described.pages, self._ids(page_ids))
            self._end(transfer, until)
            outcomes = transfer.outcomes
            if len(outcomes) != len(keys):
                raise ValueError(f"{len(outcomes)} outcomes of {len(keys)} pages")
            return [outcome is Outcome.DONE for outcome in outcomes]

        return self._safely(take, [False] * len(keys), until)

    def _match(self, request: Request, keys: Sequence[str], before: Sequence[str] | None, until: float) -> int:
        """Return the number of leading blocks, once all tiers have answered or the deadline has passed."""
        hit = request.match(digests=[bytes.fromhex(key) for key in keys], after=_after(before))
        while hit.pending and time.monotonic() < until:
            time.sleep(POLL_S)
            hit = request.match()
        return min(hit.blocks, len(keys))

    def _end(self, transfer: Transfer, until: float) -> None:
        """End a transfer; afterwards SGLang owns the pages again. Copies that have not begun by the deadline do not
        begin."""
        if not transfer.wait(max(0.0, until - time.monotonic())):
            transfer.cancel()
            transfer.wait(max(0.0, until + self.deadline_s - time.monotonic()))

    def _ids(self, page_ids: Sequence[int]) -> list[Sequence[int]]:
        return [page_ids] * len(self.described.pages)

    def _safely(self, work: Callable[[Request, float], T], default: T, until: float | None) -> T:
        now = time.monotonic()
        until = now + self.deadline_s if until is None else min(until, now + self.deadline_s)
        if until <= now:
            return default
        end = until

        def call() -> T:
            with self.handle.request(deadline_s=end - now) as request:
                return work(request, end)

        def miss(error: Exception) -> T:
            log_once("call to the cache failed; its pages count as a miss", error)
            return default

        return recover(call, miss)


def _after(before: Sequence[str] | None) -> bytes | None:
    """Return the digest before the first page: None for the first page of a prefix, empty where SGLang does not give
    it."""
    if before is None:
        return b""
    return bytes.fromhex(before[-1]) if before else None


# Possible lengths of a prefix for a pool beside the first, from the pages present. All lengths are returned, not the
# longest: each rank holds its own shard, and SGLang takes a length that all ranks have.


def lengths_with_all_pages(present: Sequence[bool]) -> set[int]:
    """Return the lengths for a pool that needs every page."""
    end = next((i for i, is_present in enumerate(present) if not is_present), len(present))
    return set(range(1, end + 1))


def lengths_with_last_pages(present: Sequence[bool], last: int) -> set[int]:
    """Return the lengths for a pool that needs only the last pages of a prefix: a window, or one state."""
    lengths, run = set(), 0
    for i, is_present in enumerate(present):
        run = run + 1 if is_present else 0
        if run >= min(last, i + 1):
            lengths.add(i + 1)
    return lengths

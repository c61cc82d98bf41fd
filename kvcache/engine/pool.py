"""The pages of the engine's own memory: references, and pages that can be found by signature.

A page is in one of four states:

    free    not referenced, without a published block
    held    in the block tables of `references` sequences; a full block may be shared, a partial one never is
    idle    not referenced, with a published block: found by signature until the pool needs the page
    leaving not referenced, without a published block, and a transfer still reads or writes it

A page is not allocated while a transfer uses it. Idle pages are evicted in the order in which they became idle. A
sequence releases its pages tail first, so that the head of a prefix outlives its tail. The pool knows no tensors: a
page is a number.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import Protocol

from kvcache.errors import ConfigError


class PendingTransfer(Protocol):
    """A load or store, as the pool sees it; `Transfer` of the cache implements it."""

    @property
    def done(self) -> bool: ...


class PagePool:
    def __init__(self, pages: int) -> None:
        if pages < 1:
            raise ConfigError(f"pages = {pages}: expected at least 1")
        self.pages = pages
        self._references = [0] * pages
        self._signatures: list[bytes | None] = [None] * pages
        self._by_signature: dict[bytes, int] = {}
        self._free = list(range(pages))[::-1]
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._transfers: list[tuple[PendingTransfer, list[int]]] = []
        self._busy: Counter[int] = Counter()  # page: number of running transfers

    @property
    def available(self) -> int:
        """Number of pages that `allocate` can return now."""
        return len(self._free) + len(self._idle) - sum(page in self._idle for page in self._busy)

    @property
    def held(self) -> int:
        return sum(count > 0 for count in self._references)

    @property
    def idle(self) -> int:
        return len(self._idle)

    @property
    def busy(self) -> bool:
        """Whether a transfer is running: `poll` may then make more pages available."""
        return bool(self._transfers)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int) -> list[int] | None:
        """Return `count` pages with one reference each, or None where too few are available. Free pages first, then the
        longest idle."""
        if count > len(self._free) and count > self.available:  # the second test is slower
            return None
        given = [self._free.pop() for _ in range(min(count, len(self._free)))]
        if len(given) < count:
            ready = (page for page in self._idle if page not in self._busy)
            evicted = [next(ready) for _ in range(count - len(given))]
            for page in evicted:
                self._forget(page)
            given += evicted
        for page in given:
            self._references[page] = 1
        return given

    def acquire(self, signatures: Sequence[bytes]) -> list[int]:
        """Return the pages of the longest prefix of these blocks in the pool, with one more reference each."""
        found: list[int] = []
        for signature in signatures:
            page = self._by_signature.get(signature)
            if page is None:
                break
            self._idle.pop(page, None)
            self._references[page] += 1
            found.append(page)
        return found

    def publish(self, page: int, signature: bytes) -> int:
        """Make a held page's block findable; return the page to use from now on.

        An earlier page with the same block replaces this one, and the reference moves there. So a block has one page,
        and a chain is evicted tail first.
        """
        earlier = self._by_signature.setdefault(signature, page)
        if earlier == page:
            self._signatures[page] = signature
            return page
        self._idle.pop(earlier, None)
        self._references[earlier] += 1
        self.release([page])
        return earlier

    def release(self, pages: Sequence[int]) -> None:
        """Release one reference to each page; `pages` is in the order of the blocks."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            if self._signatures[page] is not None:
                self._idle[page] = None
            elif page not in self._busy:
                self._free.append(page)

    def watch(self, transfer: PendingTransfer, pages: Sequence[int]) -> None:
        """Keep these pages from being allocated until the transfer is done."""
        if not transfer.done:
            self._transfers.append((transfer, list(pages)))
            self._busy.update(pages)

    def poll(self) -> None:
        """Release the pages whose transfers are done."""
        under_way = []
        for transfer, pages in self._transfers:
            if not transfer.done:
                under_way.append((transfer, pages))
                continue
            for page in pages:
                self._busy[page] -= 1
                if not self._busy[page]:
                    del self._busy[page]
                    if not self._references[page] and self._signatures[page] is None:
                        self._free.append(page)
        self._transfers = under_way

    def clear(self) -> None:
        """Evict every idle block, as if other requests had needed the pages."""
        for page in list(self._idle):
            self._forget(page)
            if page not in self._busy:
                self._free.append(page)

    def _forget(self, page: int) -> None:
        del self._idle[page]
        signature = self._signatures[page]
        if signature is not None:
            del self._by_signature[signature]
        self._signatures[page] = None

    def check(self) -> list[str]:
        """Audit the pool; return one line for each fault."""
        faults = []
        free = Counter(self._free)
        for page in range(self.pages):
            count, signature = self._references[page], self._signatures[page]
            states = {
                "held": count > 0,
                "idle": page in self._idle,
                "free": free[page] > 0,
                "leaving": not count and signature is None and page in self._busy,
            }
            if sum(states.values()) != 1:
                faults.append(f"page {page} is {[s for s, there in states.items() if there]}: expected one state")
            if count < 0 or free[page] > 1:
                faults.append(f"page {page}: {count} references, {free[page]} times free")
            if count > 1 and signature is None:
                faults.append(f"page {page} is shared {count} times but not published")
            if page in self._idle and signature is None:
                faults.append(f"page {page} is idle without a signature")
            if signature is not None and self._by_signature.get(signature) != page:
                faults.append(f"page {page} is published, but its signature leads elsewhere")
        if len(self._by_signature) != sum(s is not None for s in self._signatures):
            faults.append(f"{len(self._by_signature)} signatures lead to pages: expected one a published page")
        if self._busy != Counter(page for _, pages in self._transfers for page in pages):
            faults.append("the count of busy pages is not that of the transfers under way")
        return faults

"""Reuse of prefixes: blocks from the engine's own pool first, then from the cache.

`begin` gives a sequence the pages of its prefix, and starts the load of blocks that the pool lacks. `finish_load` ends
the load. `publish_and_store` publishes and stores the blocks that a step filled. Without a cache nothing is hashed and
nothing is reused.

At least one token is always left to compute, because the logits of the last token are not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from kvcache.block.chain import page_digests
from kvcache.cache.api import Hit, NamespaceHandle, Request
from kvcache.engine.pool import PagePool
from kvcache.engine.sequence import Sequence, SequenceState
from kvcache.os_env import Clock
from kvcache.transfer.pages import Pages


class PrefixCache:
    """Reuses the prefixes of sequences.

    Args:
        patience_s: longest wait for a lookup or a load; then the blocks are computed.
        shared: name blocks as SGLang names its pages.
    """

    def __init__(
        self,
        pool: PagePool,
        handle: NamespaceHandle | None,
        pages: Pages,
        *,
        block_tokens: int,
        clock: Clock,
        patience_s: float,
        shared: bool = False,
    ) -> None:
        self._pool = pool
        self._handle = handle
        self._pages = pages
        self._block_tokens = block_tokens
        self._clock = clock
        self._patience_s = patience_s
        self._shared = shared

    def blocks(self, tokens: int) -> int:
        """Return the number of pages for this many tokens."""
        return -(-tokens // self._block_tokens)

    def open(self, sequence: Sequence) -> None:
        """Hash the prompt and match it, so that blocks in lower tiers are promoted while the sequence waits."""
        if self._handle is not None:
            request = self._handle.request(id=sequence.id)
            sequence.request = request
            sequence.hashed = len(sequence.tokens)
            sequence.wait_until_s = self._clock.now() + self._patience_s
            if self._shared:
                hit = request.match(sequence.tokens, digests=page_digests(sequence.tokens, self._block_tokens))
            else:
                hit = request.match(sequence.tokens)
            if not hit.pending:
                request.admit()
                sequence.tiers = _tiers(hit)

    def begin(self, sequence: Sequence, spare: int) -> bool | None:
        """Give the sequence the pages of its prefix: afterwards it is LOADING or RUNNING.

        Args:
            spare: pages of the pool that are promised to other sequences.

        Returns:
            False where the pool has too few pages for its tokens; None while a lookup is pending.
        """
        request = sequence.request
        limit = (len(sequence.tokens) - 1) // self._block_tokens
        pool_pages = self._pool.acquire(request.signatures[:limit]) if request is not None else []
        if self.blocks(len(sequence.tokens)) - len(pool_pages) > self._pool.available - spare:
            self._pool.release(pool_pages)
            return False
        hit = request.match() if request is not None else Hit(tokens=0, blocks=0)
        if hit.pending and self._clock.now() < sequence.wait_until_s:
            self._pool.release(pool_pages)
            return None
        if not sequence.preemptions:
            sequence.start_s = self._clock.now() - sequence.added_s
        sequence.pages = pool_pages
        sequence.published = len(pool_pages)
        sequence.stored = min(hit.blocks, len(pool_pages))
        sequence.computed = len(pool_pages) * self._block_tokens
        sequence.state = SequenceState.RUNNING
        self._count(sequence, {"hbm": len(pool_pages)})
        if request is not None:
            request.admit()
            if min(hit.blocks, limit) > len(pool_pages):
                sequence.tiers += _tiers(hit)[len(sequence.tiers) :]  # not where `admit` has promoted it since
                self._load(sequence, request, min(hit.blocks, limit))
        return True

    def _load(self, sequence: Sequence, request: Request, end: int) -> None:
        first = len(sequence.pages)
        pages = self._pool.allocate(end - first)
        assert pages is not None, "begin made sure of room"
        sequence.pages = sequence.pages + pages
        sequence.wait_until_s = self._clock.now() + self._patience_s
        sequence.transfer = request.load(end, self._pages, [pages], first_block=first)
        sequence.state = SequenceState.LOADING
        self._pool.watch(sequence.transfer, pages)

    def finish_load(self, sequence: Sequence) -> bool:
        """End a load that is done or exceeded its deadline. The sequence is then RUNNING from the first block not
        loaded.

        Returns False while the load goes on.
        """
        transfer = sequence.transfer
        assert transfer is not None, "only a LOADING sequence is settled"
        ended = transfer.done
        if not ended and self._clock.now() < sequence.wait_until_s:
            return False
        loaded_blocks = transfer.blocks
        end = sequence.published + loaded_blocks
        if not ended:
            transfer.cancel()
            self._pool.release(sequence.pages[end:])  # released when the transfer has ended
            del sequence.pages[end:]
        self._count(sequence, Counter(sequence.tiers[sequence.published : end]))
        sequence.transfer = None
        sequence.state = SequenceState.RUNNING
        sequence.computed = end * self._block_tokens
        sequence.stored = end
        self._publish(sequence, end)
        return True

    def publish_and_store(self, sequence: Sequence) -> None:
        """Publish and store the blocks that have become full.

        Blocks before them that the cache has evicted are stored again: the cache keeps no block without its parent.
        """
        request, end = sequence.request, sequence.computed // self._block_tokens
        if request is None or end == sequence.published:
            return
        if end > len(request.signatures):
            if self._shared:
                digests = page_digests(sequence.tokens, self._block_tokens)
                request.extend(digests=digests[len(request.signatures) :])
            else:
                request.extend(sequence.tokens[sequence.hashed :])
            sequence.hashed = len(sequence.tokens)
        self._publish(sequence, end)
        pages = sequence.pages[sequence.stored : end]
        self._pool.watch(request.store(self._pages, [pages], first_block=sequence.stored), pages)
        sequence.stored = end

    def computed(self, tokens: int, seconds: float) -> None:
        """Report the duration of a step to the cache. Steps that only decode say nothing about prompts and are
        skipped."""
        if self._handle is not None and tokens > self._block_tokens:
            self._handle.computed(tokens, seconds)

    def drop(self, sequence: Sequence) -> None:
        """Release the sequence's pages. Blocks that it published can still be found."""
        if sequence.transfer is not None:
            sequence.transfer.cancel()
            sequence.transfer = None
        self._pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.published = sequence.stored = 0

    def close(self, sequence: Sequence) -> None:
        """Release the pages and close the cache's request."""
        self.drop(sequence)
        if sequence.request is not None:
            sequence.request.close()
            sequence.request = None

    def _publish(self, sequence: Sequence, end: int) -> None:
        assert sequence.request is not None, "without a cache there are no signatures"
        for i in range(sequence.published, end):
            sequence.pages[i] = self._pool.publish(sequence.pages[i], sequence.request.signatures[i])
        sequence.published = end

    def _count(self, sequence: Sequence, blocks: Mapping[str, int]) -> None:
        if not sequence.preemptions:  # later it finds its own blocks
            for tier, count in blocks.items():
                if count:
                    sequence.reused[tier] = sequence.reused.get(tier, 0) + count * self._block_tokens


def _tiers(hit: Hit) -> list[str]:
    """Return the tier of each block, as estimated from counts: blocks at the front are assigned first."""
    return [tier for tier, count in hit.by_tier.items() for _ in range(count)]

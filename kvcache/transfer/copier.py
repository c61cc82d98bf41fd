"""The contract of a copier: between an engine's pages and block bytes, in the layout's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from kvcache.transfer.pages import GroupPages


class Copy(Protocol):
    """Something to wait for. After it is done the pages (gather) or the buffers (scatter) may change again."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...
    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Until this layer, counted within the shard, of every block has been copied."""


class Copier(Protocol):
    """Moves whole blocks. `buffers[i]` is the payload of one block, contiguous, of the layout's size for that shard;
    `page_ids[i]` the page that holds the block. Pages and buffers belong to the caller.

    `after` is a mark: what the engine had put to its device before it was made comes before the copy. Without one that
    is what it had put there before the call.
    """

    def mark(self) -> Any:
        """Where the engine is now; to be called on the thread by which it gives its device work."""

    def gather(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: Any = None
    ) -> Copy:
        """Pages to buffers."""

    def scatter(
        self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview], *, after: Any = None
    ) -> Copy:
        """Buffers to pages."""

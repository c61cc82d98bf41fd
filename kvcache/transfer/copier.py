"""The contract of a copier: between an engine's pages and block bytes, in the layout's order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from kvcache.transfer.pages import GroupPages


class Copy(Protocol):
    """Something to wait for. After it is done the pages (gather) or the buffers (scatter) may change again."""

    @property
    def done(self) -> bool: ...
    def wait(self, timeout_s: float | None = None) -> bool: ...


class Copier(Protocol):
    """Moves whole blocks. `buffers[i]` is the payload of one block, contiguous, of the layout's size for that shard;
    `page_ids[i]` the page that holds the block. Pages and buffers belong to the caller.
    """

    def gather(self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview]) -> Copy:
        """Pages to buffers."""

    def scatter(self, pages: GroupPages, page_ids: Sequence[int], buffers: Sequence[memoryview]) -> Copy:
        """Buffers to pages."""

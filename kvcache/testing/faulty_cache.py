"""Caches that fail in one chosen way: `FaultyCache` in ways that the API allows, `RaisingProxy` in ways that it does
not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal

from kvcache.block.layout import KVLayout
from kvcache.cache.api import Extras, Hit, NamespaceFields, NamespaceSpec, PageIds
from kvcache.cache.operation import BlockTransfer
from kvcache.testing.naive_cache import NaiveCache, NaiveNamespace, NaiveRequest
from kvcache.tier.tier import Outcome
from kvcache.transfer.cpu import ReferenceCopier
from kvcache.transfer.pages import Pages

if TYPE_CHECKING:
    from typing_extensions import Unpack

Fault = Literal["none", "asking", "gone", "damaged", "hung", "full"]
"""In order: no lookup is answered; promised blocks are missing; half the blocks are loaded and the other pages hold
arbitrary bytes; loads never end unless cancelled; stores are dropped."""

FAULTS: tuple[Fault, ...] = ("asking", "gone", "damaged", "hung", "full")


class FaultyCache(NaiveCache):
    """A cache with one fault; `fault` may change while the cache is in use."""

    def __init__(self, fault: Fault = "none") -> None:
        super().__init__()
        self.fault: Fault = fault

    def namespace(self, spec: KVLayout | NamespaceSpec, **fields: Unpack[NamespaceFields]) -> FaultyNamespace:
        return FaultyNamespace(self, NamespaceSpec.of(spec, fields))


class FaultyNamespace(NaiveNamespace):
    cache: FaultyCache

    def request(
        self,
        id: str | None = None,
        *,
        agent: str | None = None,
        session: str | None = None,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
    ) -> FaultyRequest:
        request = FaultyRequest(self, id or str(next(self._ids)))
        self.cache.register.add((self.id, request.id), request)
        return request


class FaultyRequest(NaiveRequest):
    def __init__(self, handle: FaultyNamespace, id: str) -> None:
        super().__init__(handle, id)
        self._cache = handle.cache

    def match(
        self,
        token_ids: Any = None,
        *,
        extras: Extras | None = None,
        digests: Sequence[bytes] | None = None,
        after: bytes | None = None,
    ) -> Hit:
        hit = super().match(token_ids, extras=extras, digests=digests, after=after)
        return Hit(tokens=0, blocks=0, pending=True) if self._cache.fault == "asking" else hit

    def load(self, blocks: int, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        fault, count = self._cache.fault, blocks - first_block
        if fault not in {"gone", "damaged", "hung"} or not count:
            return super().load(blocks, pages, page_ids, first_block=first_block)
        transfer, good = _Unending(count), count // 2 if fault == "damaged" else 0
        whole = super().load(blocks, pages, page_ids, first_block=first_block)
        for i in range(good):
            transfer.settle(i, whole.outcomes[i])
        for group_pages, ids in zip(pages, page_ids, strict=True):
            anything = memoryview(b"\xff" * group_pages.block_bytes)
            ReferenceCopier().scatter(group_pages, ids[good:], [anything] * (count - good))
        if fault != "hung":
            transfer.settle_rest(good, Outcome.DAMAGED if fault == "damaged" else Outcome.NOT_FOUND)
        return transfer

    def store(self, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        if self._cache.fault != "full":
            return super().store(pages, page_ids, first_block=first_block)
        transfer = BlockTransfer(len(page_ids[0]))
        transfer.settle_rest(0, Outcome.DROPPED)
        return transfer


class _Unending(BlockTransfer):
    def cancel(self) -> None:
        super().cancel()
        self.settle_rest(0, Outcome.CANCELLED)


# A cache of which any call may raise. The API does not allow that, and a connector has to survive it.

FAILING_CALLS = frozenset({"namespace", "request", "join", "load", "store"})
"""Calls whose results raise in the same way."""
PLAIN_ATTRIBUTES = frozenset({"id", "layout", "outcomes", "done", "blocks", "signatures"})


class RaisingProxy:
    """A proxy of a cache and of its namespaces, requests and transfers.

    `fails` decides by name for each call, and for each property of a transfer. A call that raises has had no effect.
    """

    def __init__(self, inner: Any, fails: Callable[[str], bool]) -> None:
        self._inner, self._fails = inner, fails

    def __getattr__(self, name: str) -> Any:
        if name in PLAIN_ATTRIBUTES:
            if name not in {"id", "layout"}:
                self._maybe_raise(name)
            return getattr(self._inner, name)
        method = getattr(self._inner, name)

        @wraps(method)
        def call(*args: Any, **named: Any) -> Any:
            self._maybe_raise(name)
            answer = method(*args, **named)
            return RaisingProxy(answer, self._fails) if name in FAILING_CALLS else answer

        return call

    def _maybe_raise(self, name: str) -> None:
        if self._fails(name):
            raise ZeroDivisionError(f"{name} fails, as configured")

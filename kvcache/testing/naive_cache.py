"""The cache as a dict of bytes, without tiers, threads or limit. It proves the API and is the model of its tests."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from kvcache.block.chain import Chain
from kvcache.block.layout import KVLayout, Shard
from kvcache.block.record import KEY_BYTES
from kvcache.cache.api import (
    Extras,
    FlushReport,
    Hit,
    NamespaceFields,
    NamespaceSpec,
    PageIds,
    check_origin,
    check_shards,
    check_transfer,
    check_ttl,
)
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.request import OpenRequests
from kvcache.errors import ClosedError
from kvcache.index.block_run import needs, usable_prefix, wanted
from kvcache.os_env import Clock, SystemClock
from kvcache.tier.tier import Outcome
from kvcache.transfer.cpu import ReferenceCopier
from kvcache.transfer.pages import Pages

if TYPE_CHECKING:
    from typing_extensions import Unpack

Name = tuple[bytes, int, Shard]


class NaiveCache:
    def __init__(self, clock: Clock | None = None) -> None:
        self.blocks: dict[Name, bytes] = {}
        self.ends: dict[Name, float] = {}
        self.clock: Clock = clock or SystemClock()
        self.owners: dict[Name, bytes] = {}  # the namespace of each
        self.register: OpenRequests[NaiveRequest] = OpenRequests()
        self.closed = False

    def namespace(
        self,
        spec: KVLayout | NamespaceSpec,
        **fields: Unpack[NamespaceFields],
    ) -> NaiveNamespace:
        if self.closed:
            raise ClosedError("this cache was closed; open another one")
        return NaiveNamespace(self, NamespaceSpec.of(spec, fields))

    def sweep(self) -> None:
        """Remove the blocks that have expired."""
        for name in [name for name, end in self.ends.items() if end <= self.clock.wall()]:
            del self.ends[name]
            self.blocks.pop(name, None)

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        return FlushReport()

    def stats(self) -> dict[str, Any]:
        return {"tiers": {"host": {"records": len(self.blocks)}}}

    def check(self) -> list[str]:
        return []

    def close(self) -> FlushReport:
        self.blocks.clear()
        self.closed = True
        return FlushReport()

    def __enter__(self) -> NaiveCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class NaiveNamespace:
    _ids = itertools.count()

    def __init__(self, cache: NaiveCache, spec: NamespaceSpec) -> None:
        self.cache, self.id, self.layout, self.ttl_s = cache, spec.namespace().id, spec.layout, spec.ttl_s
        self.shards, self.all_shards = check_shards(spec.layout, spec.shards, spec.ranks)

    def request(
        self,
        id: str | None = None,
        *,
        agent: str | None = None,
        session: str | None = None,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
    ) -> NaiveRequest:
        request = NaiveRequest(self, id or str(next(self._ids)))
        request.ttl_s = check_ttl(self.ttl_s if ttl_s is None else ttl_s)
        self.cache.register.add((self.id, request.id), request)
        return request

    def computed(self, tokens: int, seconds: float) -> None:
        pass

    def event_signature(self, signature: bytes) -> bytes:
        return signature

    def clear(self) -> int:
        mine = [name for name in self.cache.blocks if self.cache.owners[name] == self.id]
        for name in mine:
            del self.cache.blocks[name]
        return len(mine)

    def join(self, id: str) -> NaiveRequest:
        return NaiveRequest(self, id, self.cache.register.find((self.id, id)))


class NaiveRequest:
    def __init__(self, handle: NaiveNamespace, id: str, origin: NaiveRequest | None = None) -> None:
        self.id, self._handle, self._copier, self._origin = id, handle, ReferenceCopier(), origin
        self.ttl_s: float | None = handle.ttl_s if origin is None else origin.ttl_s
        self._own = Chain(handle.id, handle.layout.block_tokens)

    @property
    def chain(self) -> Chain:
        """The chain of this request, or of the request that it joined."""
        return self._origin.chain if self._origin is not None else self._own

    @property
    def signatures(self) -> Sequence[bytes]:
        return self.chain.signatures

    def _name(self, block: int, group: int, shard: Shard | None = None) -> Name:
        return self.signatures[block][:KEY_BYTES], group, shard or self._handle.shards[group]

    def _on_all_ranks(self, block: int, group: int) -> bool:
        blocks = self._handle.cache.blocks
        return all(self._name(block, group, shard) in blocks for shard in self._handle.all_shards[group])

    def match(
        self,
        token_ids: Any = None,
        *,
        extras: Extras | None = None,
        digests: Sequence[bytes] | None = None,
        after: bytes | None = None,
    ) -> Hit:
        layout = self._handle.layout
        check_origin(self._origin, token_ids, digests)
        self._handle.cache.sweep()
        if digests is not None:
            self._own = Chain.from_digests(self._handle.id, digests, layout.block_tokens, after=after)
        elif token_ids is not None:
            self._own = Chain(self._handle.id, layout.block_tokens)
            self._own.extend(token_ids, extras)
        count = len(self.signatures)
        found = usable_prefix(
            needs(layout), [[self._on_all_ranks(i, g) for i in range(count)] for g in range(len(layout.groups))]
        )
        return Hit(
            tokens=found * layout.block_tokens,
            blocks=found,
            by_tier={"host": found} if found else {},
            reason="" if found == count else "cold",
        )

    def extend(
        self, token_ids: Any = None, *, extras: Extras | None = None, digests: Sequence[bytes] | None = None
    ) -> None:
        check_origin(self._origin, token_ids, digests)
        if digests is not None:
            self.chain.extend_digests(digests)
        else:
            self.chain.extend(token_ids, extras)

    def admit(self) -> None:
        pass

    def load(self, blocks: int, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        check_transfer(
            self._handle.layout, self._handle.shards, pages, page_ids, first_block, blocks, len(self.signatures)
        )
        transfer = BlockTransfer(blocks - first_block)
        parts = wanted(self._handle.layout, blocks)
        for i in range(first_block, blocks):
            for group, group_pages in enumerate(pages):
                if i in parts[group]:
                    payload = self._handle.cache.blocks.get(self._name(i, group))
                    if payload is None:
                        transfer.settle_rest(i - first_block, Outcome.NOT_FOUND)
                        return transfer
                    self._copier.scatter(group_pages, [page_ids[group][i - first_block]], [memoryview(payload)])
            transfer.settle(i - first_block, Outcome.DONE)
        return transfer

    def store(self, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        count = len(page_ids[0]) if page_ids else 0
        check_transfer(
            self._handle.layout,
            self._handle.shards,
            pages,
            page_ids,
            first_block,
            first_block + count,
            len(self.signatures),
        )
        transfer = BlockTransfer(count)
        for i in range(count):
            for group, group_pages in enumerate(pages):
                payload = bytearray(group_pages.block_bytes)
                self._copier.gather(group_pages, [page_ids[group][i]], [memoryview(payload)])
                name = self._name(first_block + i, group)
                if name not in self._handle.cache.blocks and self.ttl_s is not None:
                    self._handle.cache.ends[name] = self._handle.cache.clock.wall() + self.ttl_s
                self._handle.cache.blocks.setdefault(name, bytes(payload))
                self._handle.cache.owners[name] = self._handle.id
            transfer.settle(i, Outcome.DONE)
        return transfer

    def _check(self, pages: Pages, page_ids: PageIds, first: int, end: int) -> None:
        handle = self._handle
        check_transfer(handle.layout, handle.shards, pages, page_ids, first, end, len(self.signatures))

    def close(self) -> None:
        self._handle.cache.register.remove((self._handle.id, self.id), self)

    def __enter__(self) -> NaiveRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

"""The public interface of a cache: the same names and promises in the caller's process or behind a socket.

    cache = kvcache.open("kvcache.toml")
    ns = cache.namespace(layout, model="SmolLM2", revision=revision)
    with ns.request(id="42") as r:
        hit = r.match(prompt)                                   # changes nothing
        r.admit()                                               # counts the use once, starts a prefetch
        t = r.load(hit.blocks, pages, [page_ids])               # a Transfer
        t.wait()
        ...                                                     # the engine computes the blocks that t did not load
        r.extend(answer)                                        # hashes only new blocks
        r.store(pages, [page_ids], first_block=hit.blocks)      # a Transfer

Promises of every implementation (`tests/contract/test_cache.py` tests them):

- A block with outcome DONE has in its pages exactly the bytes stored under the same namespace, tokens and extras (after
  the codec's declared loss). Every other outcome is a miss: the pages of that block and of the rest of the prefix are
  undefined for this request.
- No call raises for data, devices, deadlines or capacity. Misuse (invalid token ids, pages of another shape, a closed
  cache) raises a KVCacheError and changes nothing.
- No call waits for I/O. `Transfer.wait` and `flush` do.
- A successful flush covers every block stored before it (`FlushReport`).
- Closing a request releases its holds (`admit`, `load`), however it is closed.
- A store never blocks for capacity. Blocks without a slot are dropped, tails first, and counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypedDict, runtime_checkable

from kvcache.block.layout import KVLayout, Shard
from kvcache.block.namespace import Namespace
from kvcache.errors import LayoutError, RequestError, TokenError
from kvcache.index.kv_events import EventBatch
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import Pages

if TYPE_CHECKING:
    from typing_extensions import Unpack

PageIds = Sequence[Sequence[int]]
"""One list per group: the page id of each block, in order."""

Extras = Sequence[Sequence[tuple[bytes, bytes]]]
"""One list per block: (tag, bytes) pairs that are part of its identity beside its tokens (media, an engine's salt)."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest usable prefix, counted from the first block.

    `by_tier` counts each block at the fastest tier that has it.
    """

    tokens: int
    blocks: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""  # why the prefix ends; "" where all full blocks were found
    pending: bool = False  # lookups in shared tiers have no answer yet: match again


@dataclass(frozen=True, slots=True)
class TierFlush:
    """Counts of the blocks intended for one tier. A block counts once for each shard and group, as in `stats`.

    `reached` and `lost` count since the caller's last report; the other counts are current. A block that the tier took
    and later evicted or expired has reached it.
    """

    reached: int = 0
    refused: int = 0  # not in the tier: refused again while still in host memory, or lost
    waiting: int = 0  # queued or being written; or not offered again yet for lack of time
    lost: int = 0  # of `refused`: evicted from host memory before the tier took them
    synced: bool = True  # False where a sync of the blocks that reached the tier failed or timed out


@dataclass(frozen=True, slots=True)
class FlushReport:
    """The result of `flush` and `close`. True if every block stored before is in each tier that it is intended for.

    `tiers`: the tiers under host memory that take blocks, by name. `fault`: why the counts are incomplete, else empty.
    """

    tiers: Mapping[str, TierFlush] = field(default_factory=dict)
    fault: str = ""

    def __bool__(self) -> bool:
        return not self.fault and all(t.synced and not t.refused and not t.waiting for t in self.tiers.values())


class Transfer(Protocol):
    """A load or a store in progress."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One per block, readable early. A block counts when it and all blocks before it are DONE."""

    @property
    def done(self) -> bool: ...
    @property
    def blocks(self) -> int:
        """The number of leading blocks that are DONE."""

    def wait(self, timeout_s: float | None = None) -> bool: ...
    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until this layer of every block is in its pages or is known to be missing."""

    def cancel(self) -> None:
        """Start no further block. Pages and buffers may be changed once `done` is true."""


class Request(Protocol):
    """One prompt in an engine; owns holds. Thread safety: one thread at a time."""

    id: str

    @property
    def signatures(self) -> Sequence[bytes]:
        """32 bytes for each full block of the tokens known so far."""

    def match(
        self,
        token_ids: Any = None,
        *,
        extras: Extras | None = None,
        digests: Sequence[bytes] | None = None,
        after: bytes | None = None,
    ) -> Hit:
        """The longest usable prefix of these tokens (any integer buffer or sequence), or of an engine's own digests.

        Without arguments the request looks again and hashes nothing.

        Args:
            token_ids: beside `digests`, tokens from the first block's first token on. They identify nothing; a miss can
                then be explained by its token.
            after: the digest of the block before the first of `digests` if these begin inside a prefix; empty where it
                is unknown. Blocks then count from the first digest; the caller has the earlier ones. A store after a
                known block that no tier has is dropped.
        """

    def extend(
        self, token_ids: Any = None, *, extras: Extras | None = None, digests: Sequence[bytes] | None = None
    ) -> None:
        """Append tokens to those of `match` and hash the blocks that become full.

        After a `match` with digests, append digests.
        """

    def admit(self) -> None:
        """Declare that the engine uses this prefix: count the use once, hold the blocks, start a prefetch."""

    def load(self, blocks: int, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> Transfer:
        """Copy blocks `first_block` to `blocks` (excluded) into pages; `page_ids` has one entry for each."""

    def store(self, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> Transfer:
        """Copy full blocks from `first_block` on, one for each page id.

        The pages must not change until the transfer is done.
        """

    def close(self) -> None:
        """Release all holds. A Transfer in progress still ends, and callers can still wait for it."""

    def __enter__(self) -> Request: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class NamespaceHandle(Protocol):
    """A cache bound to one namespace."""

    id: bytes
    layout: KVLayout

    def request(
        self,
        id: str | None = None,
        *,
        agent: str | None = None,
        session: str | None = None,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
    ) -> Request:
        """Open a request.

        Args:
            id: names the request to the engine's ranks and in logs and events; generated where None.
            agent: a label of events, traces and miss reasons; no part of a key.
            session: as `agent`.
            ttl_s: seconds after which newly stored blocks are a miss in every tier, for every reader, and are then
                removed. Overrides the namespace's. Blocks that are already stored keep their end.
        """

    def computed(self, tokens: int, seconds: float) -> None:
        """Report that the engine computed this many prompt tokens in one step of `seconds`.

        Call it now and then. A match then returns only blocks that load faster than the engine computes them.
        """

    def event_signature(self, signature: bytes) -> bytes:
        """The cache's own signature of a block, as in `KVEvent`. It differs only for a daemon that isolates tenants."""

    def clear(self) -> int:
        """Remove every record of this namespace from every tier, shared ones included; the count, where it is known.

        Waits for stores in progress and for the tiers. Do not call it on a scheduler's thread.
        """

    def join(self, id: str) -> Request:
        """A rank's handle on the open request with this id in this namespace.

        Each call uses the blocks that the scheduler's request knows at that time. `load` and `store` move this
        process's shards, and uses count only once. The handle owns its holds; close it like any other request.

        Raises:
            RequestError: no request with this id is open, or several are.
        """


@runtime_checkable
class SupportsCanary(Protocol):
    """A `NamespaceHandle` whose loaded blocks can be compared with recomputed ones."""

    def canary(self, recompute: Callable[[Sequence[int]], Sequence[bytes | bytearray | memoryview]]) -> None:
        """Register the function that recomputes blocks, for the share of loads that `canary.sample_rate` selects.

        Args:
            recompute: computes these tokens (whole blocks) apart from the engine's work and from any cache. It returns
                the last block's payload, one per group, in the layout's order. It is called on another thread.
        """


@runtime_checkable
class SupportsKVEvents(Protocol):
    """A `KVCache` that reports blocks stored in and removed from its tiers, for routers."""

    def kv_events(self, after: int | None, handles: Sequence[NamespaceHandle]) -> EventBatch:
        """Changes in these namespaces after event number `after`; None starts recording.

        Nothing is recorded before the first call, and earlier contents of the tiers are not reported. Do not call it on
        a scheduler's thread: with a daemon it waits for an answer.
        """


@dataclass(frozen=True)
class NamespaceSpec:
    """The namespace that an engine binds to, and the part of its blocks that this process holds.

    `layout` to `facts` identify the namespace (`kvcache.block.namespace.Namespace`); the other fields do not.

    Args:
        shards: the shards of this process, one per group; default: all of the layout.
        ranks: the shards of each rank, one list per rank, equal in every process of the engine. A match then counts a
            block only if the shards of all ranks are cached. A scheduler, which has no pages, gives only `ranks`. A
            rank gives both, or only `shards` if it only joins requests. A shard that several ranks list (a latent that
            every rank has) is stored once, by the first.
        ttl_s: the default of requests without their own.
    """

    layout: KVLayout
    _: KW_ONLY
    model: str
    revision: str
    adapter: str | None = None
    tenant: str = "default"
    cache_salt: str = field(default="", repr=False)
    facts: Mapping[str, Any] | None = None
    shards: Sequence[Shard] | None = None
    ranks: Sequence[Sequence[Shard]] | None = None
    ttl_s: float | None = None

    @classmethod
    def of(cls, spec: KVLayout | NamespaceSpec, fields: NamespaceFields) -> NamespaceSpec:
        """The arguments of `KVCache.namespace` as one value. Raises RequestError for an invalid `ttl_s`."""
        made = replace(spec, **fields) if isinstance(spec, NamespaceSpec) else cls(spec, **fields)
        check_ttl(made.ttl_s)
        return made

    def namespace(self, cache_facts: Mapping[str, Any] | None = None) -> Namespace:
        """The namespace. `cache_facts`: facts that the cache adds to the engine's."""
        facts = {} if self.facts is None else self.facts
        if cache_facts and isinstance(facts, Mapping):  # `Namespace` refuses anything else
            facts = {**facts, **cache_facts}
        return Namespace(
            self.layout,
            model=self.model,
            revision=self.revision,
            adapter=self.adapter,
            tenant=self.tenant,
            cache_salt=self.cache_salt,
            facts=facts,
        )


class NamespaceFields(TypedDict, total=False):
    """The keyword form of `NamespaceSpec`, for type checkers."""

    model: str
    revision: str
    adapter: str | None
    tenant: str
    cache_salt: str
    facts: Mapping[str, Any] | None
    shards: Sequence[Shard] | None
    ranks: Sequence[Sequence[Shard]] | None
    ttl_s: float | None


class KVCache(Protocol):
    def namespace(
        self,
        spec: KVLayout | NamespaceSpec,
        **fields: Unpack[NamespaceFields],
    ) -> NamespaceHandle:
        """Bind to a namespace: `namespace(spec)`, or `namespace(layout, model=..., revision=..., ...)` for short.

        Args:
            spec: all that the namespace needs, or only its layout.
            fields: the other fields of `NamespaceSpec`; they replace those of `spec`.

        Raises:
            NamespaceError, LayoutError, RequestError: a field is invalid.
            ClosedError: the cache was closed.
        """

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Wait until every block stored before is in each tier that its write mode intends, as durable as that tier is.

        First the flush offers again blocks that a tier refused and host memory still has. No flush succeeds until such
        a block is in the tier, evicted from host memory or erased. A block evicted before the tier took it fails the
        caller's next flush only. If no flush has reported it yet, it also fails the first flush of a client that
        connects later.

        Write-through intends a tier at store time, on-second-use at the next use, write-back at eviction from host
        memory. Before that, a block's absence from the lower tier is no failure.
        """

    def stats(self) -> dict[str, Any]: ...
    def check(self) -> list[str]:
        """A full audit; one line per fault, empty if sound."""

    def close(self) -> FlushReport:
        """Flush, end threads and free memory. Returns the flush report; idempotent, with the same report.

        In write-back mode, blocks that only host memory has are lost: `close` does not write them.
        """

    def __enter__(self) -> KVCache: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# Validation of arguments, before a call changes anything.

MAX_TTL_S = 100 * 365 * 86_400.0


def check_shards(
    layout: KVLayout, shards: Sequence[Shard] | None, ranks: Sequence[Sequence[Shard]] | None
) -> tuple[tuple[Shard, ...], tuple[tuple[Shard, ...], ...]]:
    """The shards of this process, one per group, and for each group the shards of all ranks, each once."""
    rank_shards = [tuple(of_rank) for of_rank in ranks or ()]
    held = tuple(shards or (rank_shards[0] if rank_shards else layout.whole))
    if rank_shards and shards and held not in rank_shards:
        raise LayoutError(f"shards {held}: no rank in `ranks` holds these; give what this process holds to both")
    for of_rank in (held, *rank_shards):
        if len(of_rank) != len(layout.groups):
            raise LayoutError(
                f"{len(of_rank)} shards: expected one for each of the layout's {len(layout.groups)} groups"
            )
        for shard, group in zip(of_rank, layout.groups, strict=True):
            if shard.end_layer > group.layers or shard.end_head > group.kv_heads:
                raise LayoutError(f"{shard} reaches past the group's {group.layers} layers, {group.kv_heads} heads")
    return held, tuple(tuple(dict.fromkeys(shards)) for shards in zip(*(rank_shards or [held]), strict=True))


def check_transfer(
    layout: KVLayout,
    shards: Sequence[Shard],
    pages: Pages,
    page_ids: PageIds,
    first: int,
    end: int,
    known: int,
) -> None:
    """Raise LayoutError if blocks `first` to `end`, of `known` hashed ones, do not fit the pages and their ids."""
    groups = len(layout.groups)
    if len(pages) != groups or len(page_ids) != groups:
        raise LayoutError(
            f"{len(pages)} pages, {len(page_ids)} lists of page ids: expected one for each of {groups} groups"
        )
    check_blocks(first, end, known)
    for group, (group_pages, ids) in enumerate(zip(pages, page_ids, strict=True)):
        if group_pages.layout != layout or group_pages.group != group:
            raise LayoutError(
                f"pages of group {group_pages.group} where group {group} of the request's layout was expected"
            )
        if group_pages.shard != shards[group]:
            raise LayoutError(f"pages of {group_pages.shard} in group {group}: this process holds {shards[group]}")
        if len(ids) != end - first:
            raise LayoutError(f"{len(ids)} page ids in group {group}: expected {end - first}, one a block")
        group_pages.check_ids(ids)


def check_blocks(first: int, end: int, known: int) -> None:
    if not 0 <= first <= end <= known:
        raise LayoutError(f"blocks {first} to {end}: the request knows {known} full blocks; match or extend first")


def check_ttl(ttl_s: float | None) -> float | None:
    """`ttl_s` itself. Raises RequestError if it is not a positive time."""
    if ttl_s is not None and not (isinstance(ttl_s, (int, float)) and 0 < ttl_s < MAX_TTL_S):
        raise RequestError(f"ttl_s = {ttl_s!r:.40}: expected seconds above 0, or None for no end")
    return ttl_s


def check_origin(origin: object | None, *tokens: object | None) -> None:
    """Raise TokenError if a joined request is given tokens: only the request that it joined may add them."""
    if origin is not None and any(rank_shards is not None for rank_shards in tokens):
        raise TokenError("this request was joined: only its opener gives tokens; call match without arguments")

"""What callers see of a cache, in their own process or behind a socket: the same names, the same promises.

    cache = kvcache.open("kvcache.toml")
    ns = cache.namespace(layout, model="SmolLM2", revision=revision)
    with ns.request(id="42") as r:
        hit = r.match(prompt)                                   # changes nothing
        r.admit()                                               # counts the use once, begins to bring blocks near
        t = r.load(hit.blocks, pages, [page_ids])               # a Transfer
        t.wait()
        ...                                                     # the engine computes what t did not bring
        r.extend(answer)                                        # only new blocks are hashed
        r.store(pages, [page_ids], first_block=hit.blocks)      # a Transfer

Promises, for every implementation (`tests/contract/test_cache.py` holds them to it):

- A block whose load says DONE has in its pages exactly the bytes that were stored under the same namespace, tokens and
  extras (after the codec's declared loss). Every other outcome is a miss: the pages of that block are undefined, and
  so is the rest of the prefix for this request.
- Nothing here raises for data, devices, deadlines or room. Misuse at the edge (token ids that are none, pages of
  another shape, a closed cache) raises a KVCacheError and changes nothing.
- No call waits for I/O. `Transfer.wait` and `flush` do.
- A flush that is true is true of every block stored before it (`FlushReport`).
- What a request holds (`admit`, `load`) comes back when it is left, however it is left.
- A store never blocks for room: what finds none is dropped, tails first, and counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from kvcache.block.layout import KVLayout, Shard
from kvcache.errors import LayoutError, RequestError, TokenError
from kvcache.index.kv_events import EventBatch
from kvcache.tier.tier import Outcome
from kvcache.transfer.pages import Pages

PageIds = Sequence[Sequence[int]]
"""One list a group: the page of each block, in order."""

Extras = Sequence[Sequence[tuple[bytes, bytes]]]
"""One list a block: (tag, bytes) pairs that are part of its identity beside its tokens (media, an engine's salt)."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest usable prefix. `blocks` from the front; `by_tier` counts each at the nearest tier that has it."""

    tokens: int
    blocks: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    reason: str = ""  # why no more: "" where all full blocks were found
    pending: bool = False  # tiers are still being asked: match again


@dataclass(frozen=True, slots=True)
class TierFlush:
    """Blocks that one tier was meant to take. A block is counted once for each shard and group, as in `stats`.

    `reached` and `lost` count from the caller's last report on, the others are of this moment. A block that the tier
    took and evicted later, for room or by its end, has reached it.
    """

    reached: int = 0
    refused: int = 0  # not in the tier: host memory has them still and the tier refused them again, or they are lost
    waiting: int = 0  # queued or being written; or, for lack of time, not offered again yet
    lost: int = 0  # of those refused: evicted from host memory before the tier took them
    synced: bool = True  # False where what reached it could not be made as durable as the tier makes it, in time


@dataclass(frozen=True, slots=True)
class FlushReport:
    """What `flush` and `close` report; true where every block stored before is in each tier that it is meant for.

    `tiers`: those below host memory that take blocks, by name. `fault`: why the counts are not the whole answer, empty
    where they are.
    """

    tiers: Mapping[str, TierFlush] = field(default_factory=dict)
    fault: str = ""

    def __bool__(self) -> bool:
        return not self.fault and all(t.synced and not t.refused and not t.waiting for t in self.tiers.values())


class Transfer(Protocol):
    """A load or a store under way."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """One a block, readable early: a block counts when it and all before it are DONE."""

    @property
    def done(self) -> bool: ...
    @property
    def blocks(self) -> int:
        """Blocks from the front that are DONE: what a load brought for certain."""

    def wait(self, timeout_s: float | None = None) -> bool: ...
    def wait_layer(self, layer: int, timeout_s: float | None = None) -> bool:
        """Wait until this layer of every block is in its pages (or known to be missing)."""

    def cancel(self) -> None:
        """What has not begun does not begin. Pages and buffers are free to change once `done`."""


class Request(Protocol):
    """One prompt on its way through an engine; owns holds. Not for use by several threads at once."""

    id: str

    @property
    def signatures(self) -> Sequence[bytes]:
        """32 bytes a full block of the tokens known so far."""

    def match(
        self,
        token_ids: Any = None,
        *,
        extras: Extras | None = None,
        digests: Sequence[bytes] | None = None,
        after: bytes | None = None,
    ) -> Hit:
        """The longest usable prefix of these tokens (any integer buffer or sequence), or of an engine's own digests.

        `after`: the digest of the block before the first of `digests` where those begin within a prefix, empty where
        it is not known. Blocks are counted from the first of them, as far as they are there; whoever asks has those
        before. A store behind a known block that nobody has is dropped. `token_ids` beside `digests`, from the first
        of their tokens on, name nothing: they let a miss be told by its token.

        Called again without arguments it looks again, hashing nothing."""

    def extend(
        self, token_ids: Any = None, *, extras: Extras | None = None, digests: Sequence[bytes] | None = None
    ) -> None:
        """More tokens behind those of `match`: hashes the blocks that become full. Or, where `match` was given digests,
        those of more blocks."""

    def admit(self) -> None:
        """The engine will use this prefix: count the use once, hold the blocks, begin to bring them near."""

    def load(self, blocks: int, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> Transfer:
        """Bring blocks `first_block` to `blocks` (excluded) into pages; `page_ids` has one entry for each."""

    def store(self, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> Transfer:
        """Take full blocks from `first_block` on, one for each page id. The pages must not change until done."""

    def close(self) -> None:
        """Give everything back; a Transfer under way still ends, and can still be waited for."""

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
        """`id` names it to the engine's ranks and in what is said of it; one is made up where none is given. `agent`
        and `session` label events, traces and the reasons of misses, and are no part of a key. `ttl_s`: what it stores
        anew is a miss in every tier after so long, whoever asks, and then leaves; in place of the namespace's. What is
        there already keeps the end that it has."""

    def computed(self, tokens: int, seconds: float) -> None:
        """The engine computed so many tokens of prompts in one step of so long. Told now and then, it is what loads are
        held against: a match then finds no more than comes sooner than the engine computes it."""

    def event_signature(self, signature: bytes) -> bytes:
        """What the cache calls a block of this signature: itself, but for a daemon that keeps tenants apart. `Change`
        has what the cache calls it."""

    def clear(self) -> int:
        """Remove every record of this namespace from every tier, shared ones too; how many there were, as far as that
        can be told. Waits for stores that are on their way, and for the tiers: not for a scheduler's busy thread."""

    def join(self, id: str) -> Request:
        """The open request of this id in this namespace, as a rank uses it: its blocks are those that the scheduler's
        request knows at each call, `load` and `store` move this process's shards, and uses are counted only once.
        RequestError where none is open, or several are. What it holds is its own; close it like any other."""


@runtime_checkable
class SupportsCanary(Protocol):
    """A `Bound` whose loaded blocks can be compared with what the engine computes."""

    def canary(self, recompute: Callable[[Sequence[int]], Sequence[bytes | bytearray | memoryview]]) -> None:
        """`recompute` computes these tokens, whole blocks, apart from the engine's work and from any cache, and
        answers the last block's payload in the layout's order, one a group. It is called on another thread, where
        `canary.sample_rate` asks for it."""


@runtime_checkable
class SupportsKVEvents(Protocol):
    """A `KVCache` that tells which blocks come into its tiers and leave them, for routers."""

    def kv_events(self, after: int | None, bounds: Sequence[NamespaceHandle]) -> EventBatch:
        """What changed of these namespaces from number `after` on; None begins, and nothing is kept before somebody
        has. What is in the tiers by then is not told. Not for a scheduler's busy thread: a daemon has to be asked."""


class KVCache(Protocol):
    def namespace(
        self,
        layout: KVLayout,
        *,
        model: str,
        revision: str,
        adapter: str | None = None,
        tenant: str = "default",
        cache_salt: str = "",
        facts: Mapping[str, Any] | None = None,
        shards: Sequence[Shard] | None = None,
        ranks: Sequence[Sequence[Shard]] | None = None,
        ttl_s: float | None = None,
    ) -> NamespaceHandle:
        """Bind to a namespace. `shards`: what this process holds, one a group; all of it where not given.

        `ranks`: what each rank of the engine holds, one list of shards a rank, the same in every process of it. Then a
        match counts a block only where the shards of all of them are there. A scheduler, which has no pages, gives
        only `ranks`; a rank gives both, or only `shards` where it only joins requests. The same shard in several lists
        (a latent that every rank has) is kept once, written by the first.

        `ttl_s`: that of requests that bring none of their own. It is no part of what the namespace is.
        """

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        """Wait until every block stored before is in each tier that its write mode intends, as durable as that tier is.

        Blocks that a tier refused earlier and that host memory still has are offered again first. Until such a block is
        in the tier, leaves host memory or is erased, no flush is a success. A block that left host memory before the
        tier took it makes this caller's next flush fail, and no later one; where no flush has reported it yet, also the
        first flush of a client that connects later. Write-through intends a tier when a block is stored, on-second-use
        when it is used again, write-back when it leaves host memory: until then its absence below is no failure.
        """

    def stats(self) -> dict[str, Any]: ...
    def check(self) -> list[str]:
        """A full audit; one line a fault, none when sound."""

    def close(self) -> FlushReport:
        """Flush, end threads, give back memory; what `flush` would have reported. Idempotent, with the same answer.

        In write-back mode, blocks that are in host memory alone end with it: `close` does not write them.
        """

    def __enter__(self) -> KVCache: ...
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


# What a caller hands to the face, checked before anything changes.

MAX_TTL_S = 100 * 365 * 86_400.0


def check_shards(
    layout: KVLayout, shards: Sequence[Shard] | None, ranks: Sequence[Sequence[Shard]] | None
) -> tuple[tuple[Shard, ...], tuple[tuple[Shard, ...], ...]]:
    """What this process holds, one shard a group, and by group what its engine's ranks hold, each shard once."""
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
    """LayoutError where blocks `first` to `end`, of `known` hashed ones, do not fit the pages and their ids."""
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
    """What was given; RequestError where it is no time to come."""
    if ttl_s is not None and not (isinstance(ttl_s, (int, float)) and 0 < ttl_s < MAX_TTL_S):
        raise RequestError(f"ttl_s = {ttl_s!r:.40}: expected seconds above 0, or None for no end")
    return ttl_s


def check_origin(origin: object | None, *tokens: object | None) -> None:
    """TokenError where a request that was joined is told tokens: those are its origin's to tell."""
    if origin is not None and any(rank_shards is not None for rank_shards in tokens):
        raise TokenError("this request was joined: its tokens are told where it was opened; match without any here")

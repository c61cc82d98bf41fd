"""A cache bound to a namespace, and one prompt's request: match, admit, load, store.

`OpenRequests` finds a request by id, so that an engine's ranks can join the one that its scheduler opened.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import numpy as np

from kvcache.block.chain import Chain
from kvcache.block.layout import Shard
from kvcache.block.namespace import Namespace
from kvcache.cache.api import Extras, Hit, PageIds, check_blocks, check_origin, check_transfer, check_ttl
from kvcache.cache.canary import Recompute
from kvcache.cache.context import BYPASS, CacheContext
from kvcache.cache.erase import MAX_FLUSH_S, clear
from kvcache.cache.flush import Submit
from kvcache.cache.holds import Holds
from kvcache.cache.load import Load
from kvcache.cache.load_plan import LoadChoice, blocks_by_tier, spans
from kvcache.cache.miss_explainer import MissRecord
from kvcache.cache.operation import BlockTransfer
from kvcache.cache.shared_lookup import PendingLookup
from kvcache.cache.slot_copy import PagesSlotCopy, SlotCopy
from kvcache.cache.store import Store
from kvcache.cache.tier_manager import TierManager
from kvcache.errors import ClosedError, RequestError
from kvcache.index.block_run import BlockRun, ChainView, ShardRef, needs, pack_shard_key, wanted
from kvcache.index.cost_classes import CostClass, ModelShape
from kvcache.log import RequestContext, request_context
from kvcache.tier.tier import BACKGROUND, PREFETCH, Outcome
from kvcache.transfer.copier import CopierRegistry
from kvcache.transfer.pages import Pages

# Open requests.

R = TypeVar("R")


class OpenRequests(Generic[R]):
    """Open requests by name. Keeps no request alive.

    Thread safety: any thread.
    """

    def __init__(self) -> None:
        self._open: dict[Hashable, WeakSet[R]] = {}
        self._lock = threading.Lock()

    def add(self, name: Hashable, request: R) -> None:
        with self._lock:
            self._open.setdefault(name, WeakSet()).add(request)

    def remove(self, name: Hashable, request: R) -> None:
        """Idempotent."""
        with self._lock:
            entries = self._open.get(name)
            if entries is not None:
                entries.discard(request)
                if not entries:
                    del self._open[name]

    def find(self, name: Hashable) -> R:
        """The request with this name.

        Raises:
            RequestError: none has this name, or several have. A guess could give one prompt's blocks to another.
        """
        with self._lock:
            entries = list(self._open.get(name, ()))
        if len(entries) == 1:
            return entries[0]
        if not entries:
            raise RequestError("no open request has this id in this namespace; open it first, and close it last")
        raise RequestError(
            f"{len(entries)} open requests have this id; name the engine when connecting, or the requests"
        )


RECOMPUTE_FASTER = "below_plan"
"""The reason for blocks that the engine computes faster than they load."""


class CacheNamespace:
    _ids = itertools.count(1)

    def __init__(
        self,
        context: CacheContext,
        tier_manager: TierManager,
        copiers: CopierRegistry,
        register: OpenRequests[CacheRequest],
        namespace: Namespace,
        shards: Sequence[Shard],
        all_shards: Sequence[Sequence[Shard]],
        ttl_s: float | None = None,
    ) -> None:
        self.context, self.tier_manager, self.copiers, self.register = context, tier_manager, copiers, register
        self.namespace, self.shards, self.ttl_s = namespace, shards, ttl_s
        self.deadline_s = context.settings.flow.deadline_s
        self.id, self.layout, self.tenant, self.open = namespace.id, namespace.layout, namespace.tenant, True
        self.own_shards = [self._shard_ref(g, shard) for g, shard in enumerate(shards)]
        self.all_shards = [self._shard_ref(g, shard) for g, of_group in enumerate(all_shards) for shard in of_group]
        """The shards of all ranks: a block counts if all of these are cached."""
        self.shard_keys = [ref.key for ref in self.all_shards]
        self.needs = [needs(namespace.layout)[ref.group] for ref in self.all_shards]
        name = (namespace.model, namespace.revision, namespace.adapter or "")
        self._record_sizes = [self._stored_bytes(ref) for ref in self.all_shards]
        block_bytes = tuple(map(sum, zip(*self._record_sizes, strict=True)))
        self.model = ModelShape(name, self.layout.block_tokens, block_bytes)
        """The bytes of a block, and the model that its compute cost is compared under."""

    def _shard_ref(self, group: int, shard: Shard) -> ShardRef:
        return ShardRef(
            group, shard, self.layout.block_bytes(shard, group=group), pack_shard_key(self.id, group, shard)
        )

    def _stored_bytes(self, ref: ShardRef) -> tuple[int, ...]:
        """The size of a record in each tier, host first."""
        codec = self.context.record_codec
        return tuple(codec.stored_bytes(tier.name, self.layout, ref.group, ref.shard) for tier in self.context.tiers)

    def register_cost_classes(self) -> None:
        """Assign the shards of this namespace to the cost classes of its tenant, model and record sizes."""
        for ref, size in zip(self.all_shards, self._record_sizes, strict=True):
            self.context.cost_classes.bind(CostClass(self.tenant, self.model, size), ref.key)

    def close(self) -> None:
        """Refuse further loads and stores, with ClosedError."""
        self.open = False

    def event_signature(self, signature: bytes) -> bytes:
        return signature

    def computed(self, tokens: int, seconds: float) -> None:
        self.context.plan.computed(self.id, tokens, seconds)
        self.context.cost_classes.computed(self.tenant, self.model, tokens, seconds)

    def canary(self, recompute: Recompute) -> None:
        self.context.canary.register(self.id, self.layout, [ref.payload_bytes for ref in self.own_shards], recompute)

    def request(
        self,
        id: str | None = None,
        *,
        agent: str | None = None,
        session: str | None = None,
        ttl_s: float | None = None,
        deadline_s: float | None = None,
    ) -> CacheRequest:
        work = RequestContext.of(id or f"r{next(self._ids)}", agent, session)
        made = CacheRequest(self, work, self.deadline_s if deadline_s is None else deadline_s)
        made.ttl_s = check_ttl(self.ttl_s if ttl_s is None else ttl_s)
        self.register.add((self.id, made.id), made)
        return made

    def clear(self) -> int:
        self.tier_manager.settle(MAX_FLUSH_S)  # otherwise writes in progress would arrive after the removal
        self.context.shared_lookup.wait(MAX_FLUSH_S)  # the same for the answer to a pending lookup
        return clear(self.id, self.context.index, self.context.tiers)

    def join(self, id: str) -> CacheRequest:
        origin = self.register.find((self.id, id))
        return CacheRequest(self, origin.work, self.deadline_s, origin)


class CacheRequest:
    """A request of this cache. `origin`: the request that this one joined, with which it shares blocks and time."""

    def __init__(
        self, handle: CacheNamespace, work: RequestContext, deadline_s: float, origin: CacheRequest | None = None
    ) -> None:
        self.id, self.work = work.request, work
        self.ttl_s: float | None = handle.ttl_s if origin is None else origin.ttl_s
        self._handle, self._context, self._tier_manager = handle, handle.context, handle.tier_manager
        self._deadline_s, self._origin = deadline_s, origin
        self._own = Chain(handle.id, handle.layout.block_tokens)
        self._hit_blocks, self._admitted = 0, False
        size = handle.layout.block_tokens
        self.miss: MissRecord = (
            MissRecord(
                handle.context.miss_explainer,
                handle.context.counters,
                work=work,
                namespace=handle.id,
                shard_keys=handle.shard_keys,
                block_tokens=size,
            )
            if origin is None
            else origin.miss
        )
        self._by_tier: dict[str, int] = {}
        self.choice = LoadChoice(0, 0)  # the plan's last choice
        self._stamp = 0  # the time of the first admit or store; 0: none yet
        self._requested_blocks = 0  # blocks, at admission
        self._claim: Holds.Claim = []
        self._claim_finalizer: weakref.finalize[..., CacheRequest] | None = None
        self._token_ids: Any = None  # of the prompt, if the canary needs them
        self._pending_lookup: PendingLookup | None = None  # in shared tiers, for these tokens

    @property
    def chain(self) -> Chain:
        """The chain of the origin, if this request joined one."""
        return self._own if self._origin is None else self._origin.chain

    @property
    def signatures(self) -> Sequence[bytes]:
        return self.chain.signatures

    def match(
        self,
        token_ids: Any = None,
        *,
        extras: Extras | None = None,
        digests: Sequence[bytes] | None = None,
        after: bytes | None = None,
        signatures: bytes | None = None,
        head: bytes | None = None,
        refused: str = "",
    ) -> Hit:
        """As in the interface, and for the daemon:

        Args:
            signatures: packed; blocks that another process hashed, with the chain's `head`.
            refused: a reason to look up nothing.
        """
        handle, layout = self._handle, self._handle.layout
        check_origin(self._origin, token_ids, digests, signatures)
        self._context.expiry.sweep()  # so that the lookup finds no expired block
        lookup, beside = self._context.index.lookup(handle.shard_keys, handle.needs), None
        if digests is not None:
            self._own = Chain.from_digests(handle.id, digests, layout.block_tokens, after=after)
            beside, token_ids = token_ids, None
        elif token_ids is not None:
            chain = Chain(handle.id, layout.block_tokens)
            chain.extend(token_ids, extras, digest=lookup)
            self._own = chain
            self._token_ids = token_ids if extras is None and self._context.canary.is_registered(handle.id) else None
        if signatures is not None:
            self._own = Chain.from_signatures(handle.id, signatures, layout.block_tokens, head=head)
        is_new = digests is not None or token_ids is not None or signatures is not None
        if is_new:
            self._pending_lookup = None
        self._by_tier, self.choice = {}, LoadChoice(0, 0)
        if refused or self._context.bypass.loads:
            self._hit_blocks = 0
            self.miss.look(self.chain.packed, 0, lookup.ids, reason=refused or BYPASS)
            return Hit(tokens=0, blocks=0, reason=refused or BYPASS)
        pending = (
            self._pending_lookup is not None and self._pending_lookup.pending
        )  # read before the index: once it is False, the answer is in the index
        if token_ids is None:
            lookup.match(self.chain.packed)
        self._hit_blocks, self._by_tier = lookup.blocks, lookup.by_tier
        if is_new and self._hit_blocks < len(self.signatures):
            deadline = self._context.os_env.clock.now() + min(self._deadline_s, self._context.shared_lookup.deadline_s)
            self._pending_lookup = self._context.shared_lookup.begin(
                [self._chained(p) for p in handle.all_shards], handle.needs, self._hit_blocks, deadline
            )
            pending = self._pending_lookup is not None and self._pending_lookup.pending
            # an executor that runs calls inline has answered already
            if self._pending_lookup is not None and not pending:
                lookup.match(self.chain.packed)
                self._hit_blocks, self._by_tier = lookup.blocks, lookup.by_tier
        self.choice = LoadChoice(self._hit_blocks, self._hit_blocks)
        if self._hit_blocks and not pending and self._context.plan.enabled:
            self.choice = self._choose_load()
        miss_detail: dict[str, Any] = {}
        if self.choice.blocks < self._hit_blocks:
            self._hit_blocks, self._by_tier = self.choice.blocks, blocks_by_tier(self.choice)
            plan = {"load_s": self.choice.load_s, "compute_s": self.choice.compute_s}
            miss_detail = {"reason": RECOMPUTE_FASTER, "plan": plan}
        reason = self.miss.look(self.chain.packed, self._hit_blocks, lookup.ids, beside, **miss_detail)
        tokens = self._hit_blocks * layout.block_tokens
        return Hit(tokens=tokens, blocks=self._hit_blocks, by_tier=dict(self._by_tier), reason=reason, pending=pending)

    def extend(
        self, token_ids: Any = None, *, extras: Extras | None = None, digests: Sequence[bytes] | None = None
    ) -> None:
        check_origin(self._origin, token_ids, digests)
        if digests is not None:
            self.chain.extend_digests(digests)
        else:
            self.chain.extend(token_ids, extras, digest=self.miss.digest)
        self.miss.extended(self.chain.packed)

    def admit(self) -> None:
        if self._admitted or self._origin is not None:
            return
        self._admitted = True
        context, counters, layout = self._context, self._context.counters, self._handle.layout
        stamp = self.begin()
        runs = self._runs(self._handle.all_shards, 0, self._hit_blocks)
        for run, _ in runs:
            context.index.touch(run, stamp)
        self._claim = context.holds.take(runs)
        self._claim_finalizer = weakref.finalize(
            self, context.holds.abandon, self._claim
        )  # for a request that is never closed
        self._tier_manager.write_on_second_use(self._chains(), self._hit_blocks)
        counters.add("requests")
        self._requested_blocks = len(self.signatures)
        asked_tokens = self._requested_blocks * layout.block_tokens
        counters.add("asked_tokens", asked_tokens)
        hits = {tier: blocks * layout.block_tokens for tier, blocks in self._by_tier.items()}
        for tier, tokens in hits.items():
            counters.add("hit_tokens", tokens, tier=tier)
        context.usage_log.add(self._handle.id, self._handle.tenant, self.work.agent, asked_tokens, hits)
        if self._pending_lookup is not None:
            counters.add("lookups", answer=self._pending_lookup.answer)
        self.miss.admit(stamp, context.os_env.clock.wall())
        if not context.bypass.loads:
            with request_context(self.work):
                self._prefetch(stamp, 0, self._hit_blocks, Load.window_bytes(context), PREFETCH)
                if context.plan.probe(self.choice):
                    first = self.choice.blocks
                    self._prefetch(stamp, first, first + 1, Load.window_bytes(context), BACKGROUND)

    def load(self, blocks: int, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        self._check(pages, page_ids, first_block, blocks)
        slot_copy: SlotCopy = PagesSlotCopy(self._handle.copiers, pages, page_ids)
        if self._token_ids is not None:
            slot_copy = self._context.canary.sampled_copy(slot_copy, self._handle.id, self._token_ids, first_block)
        return self.load_via(slot_copy, first_block, blocks, self._tier_manager.executor.submit)

    def load_via(self, slot_copy: SlotCopy, first: int, end: int, submit: Submit) -> BlockTransfer:
        """Load blocks `first` to `end` with a `SlotCopy`; `submit` runs the load."""
        check_blocks(first, end, len(self.signatures))
        transfer = BlockTransfer(end - first)
        if self._context.bypass.loads:
            self._context.counters.add("load_failures", end - first, outcome=BYPASS)
            transfer.settle_rest(0, Outcome.NOT_FOUND)
            return transfer
        claim = self._context.holds.take(self._runs(self._handle.own_shards, first, end))
        now = self._context.os_env.clock.now()
        job = Load(
            context=self._context,
            tier_manager=self._tier_manager,
            work=self.work,
            namespace=self._handle.id,
            slot_copy=slot_copy,
            chains=self._chains(),
            needs=wanted(self._handle.layout, end),
            blocks=range(first, end),
            tenant=self._handle.tenant,
            before=self.begin(),
            begun=now,
            deadline=now + min(self._deadline_s, self.choice.patience_s),
            claim=claim,
            transfer=transfer,
        )
        self.miss.loading(id(self), first, transfer)
        try:
            submit(job.run)
        except BaseException:
            self._context.holds.release(claim)
            raise
        return transfer

    def store(self, pages: Pages, page_ids: PageIds, *, first_block: int = 0) -> BlockTransfer:
        count = len(page_ids[0]) if page_ids else 0
        self._check(pages, page_ids, first_block, first_block + count)
        slot_copy = PagesSlotCopy(self._handle.copiers, pages, page_ids)
        return self.store_via(slot_copy, first_block, first_block + count, self._tier_manager.executor.submit)

    def store_via(self, slot_copy: SlotCopy, first: int, end: int, submit: Submit) -> BlockTransfer:
        """Store blocks `first` to `end` with a `SlotCopy`; `submit` runs the store."""
        check_blocks(first, end, len(self.signatures))
        self._count()
        transfer = BlockTransfer(end - first)
        if self._context.bypass.stores:
            with request_context(self.work):
                self._tier_manager.drop(end - first, BYPASS, self._handle.id, tier=self._context.host.name)
            transfer.settle_rest(0, Outcome.DROPPED)
            return transfer
        job = Store(
            context=self._context,
            tier_manager=self._tier_manager,
            work=self.work,
            namespace=self._handle.id,
            slot_copy=slot_copy,
            chains=self._chains(),
            rules=[group.rule for group in self._handle.layout.groups],
            first_block=first,
            tenant=self._handle.tenant,
            before=self.begin(),
            transfer=transfer,
            ttl_s=self.ttl_s,
        )
        self._tier_manager.stores.submit(job.run, submit)
        return transfer

    def close(self) -> None:
        self._count()
        if self._requested_blocks:
            handle, requested, self._requested_blocks = self._handle, self._requested_blocks, 0
            self._context.curve.add(
                self.chain.packed, requested, handle.model, (handle.tenant, self.work.agent, handle.id[:4].hex())
            )
        self._context.holds.release(self._claim)
        if self._claim_finalizer is not None:
            self._claim_finalizer.detach()
        if self._origin is None:
            self._handle.register.remove((self._handle.id, self.id), self)

    def __enter__(self) -> CacheRequest:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _chains(self) -> list[ChainView]:
        """By group, the records of this request's blocks."""
        return [self._chained(ref) for ref in self._handle.own_shards]

    def _chained(self, ref: ShardRef) -> ChainView:
        chain = self.chain
        return ChainView(self._handle.id, chain.packed, ref.group, ref.shard, ref.payload_bytes, chain.head)

    def _runs(self, shards: Sequence[ShardRef], first: int, end: int) -> list[tuple[BlockRun, int]]:
        """By shard, the blocks from `first` on that a prefix of `end` blocks needs, and the payload bytes of each."""
        need = wanted(self._handle.layout, end)
        return [
            (
                BlockRun(ref.key, self.chain.packed).part(max(first, need[ref.group].start), end),
                ref.payload_bytes,
            )
            for ref in shards
        ]

    def begin(self) -> int:
        """The request's time: one tick of the clock, at its first use."""
        if self._origin is not None:
            return self._origin.begin()
        if not self._stamp:
            self._stamp = self._context.index.tick()
            self._context.usage_log.touch(self._handle.id)
            self._context.pins.sweep()
        return self._stamp

    def _check(self, pages: Pages, page_ids: PageIds, first: int, end: int) -> None:
        if not self._handle.open:
            raise ClosedError("this cache was closed; open another one")
        check_transfer(self._handle.layout, self._handle.shards, pages, page_ids, first, end, len(self.signatures))

    def _choose_load(self) -> LoadChoice:
        handle, layout = self._handle, self._handle.layout
        shards = [(ref.key, ref.payload_bytes) for ref in handle.all_shards]
        entries = spans(self._context.index, shards, handle.needs, self.chain.packed, self._by_tier)
        return self._context.plan.choose(handle.id, self.chain.tokens, layout.block_tokens, entries)

    def _count(self) -> None:
        first, loaded, choice = self.miss.count(), self.miss.loaded(), (self._origin or self).choice
        if loaded is not None:
            taken, reached, seconds = loaded
            self._context.plan.settle(replace(choice, blocks=taken), reached, seconds)
        elif first:  # skipped blocks only
            self._context.plan.settle_rest(choice)

    def _prefetch(self, stamp: int, first: int, end: int, max_bytes: int, priority: int) -> None:
        """Start to read those of blocks `first` to `end` that only lower tiers have, at most `max_bytes` bytes."""
        context, tier_manager = self._context, self._tier_manager
        missing = []
        needs = [range(max(first, need.start), need.stop) for need in wanted(self._handle.layout, end)]
        for ref in self._handle.all_shards:
            chain, need = self._chained(ref), needs[ref.group]
            run = BlockRun(ref.key, self.chain.packed).part(need.start, need.stop)
            masks = np.frombuffer(context.index.tier_masks(run), np.uint8)
            for i in np.flatnonzero((masks != 0) & (masks & 1 == 0)):
                max_bytes -= chain.payload_bytes
                if max_bytes < 0:
                    break
                missing.append((chain[need.start + int(i)], chain.payload_bytes))
        if missing:
            tenant = self._handle.tenant
            tier_manager.promoter.begin(
                missing,
                lambda count, size: tier_manager.slots(count, size, tenant, before=stamp),
                priority=priority,
                deadline=context.os_env.clock.now() + self._deadline_s,
            )

"""The cache of one process: it owns the tiers, the index, the policy and the movement of records between tiers.

`Cache` builds the parts of the subsystem and connects them. It holds no block itself. A call takes this path:

- `namespace` binds an engine to a namespace and returns a `CacheNamespace` (`request.py`).
- `CacheRequest.match` walks the index (`kvcache/index`). A match changes nothing.
- `CacheRequest.admit` counts the use, takes holds (`holds.py`) and starts a prefetch (`prefetch.py`).
- `CacheRequest.load` copies blocks into an engine's pages in windows (`load.py`). `promote.py` reads from lower tiers.
- `CacheRequest.store` copies pages into host slots (`store.py`). `write_back.py` writes them to lower tiers.
- `TierManager` evicts, demotes, flushes and expires (`tier_manager.py`, `flush.py`, `expiry.py`).

Alternatives. Each engine process could own a cache, or several could share an index in shared memory. One process owns
the cache instead, and a daemon serves the same interface behind a socket. The cache then outlives its engines, a
client's end releases its claims, and a half-written store is never visible. The calls could wait for I/O or be
coroutines. They are synchronous inside and polled from outside instead: `load` and `store` return a `Transfer` at once,
and nothing that a scheduler calls waits for I/O.

Invariants.

- A load returns the bytes that were stored under the same namespace, tokens and extras, or a miss.
- A cache fault never fails a request. Faults of data, devices, deadlines or capacity are misses or counted drops.
- A block is visible in the index only after its last byte is in place.
- Queues, pools, tiers and holds are bounded, and each has an owner. The owner's end releases them.
- A tenant sees only its own namespaces.
- The index and this cache's own tiers agree, apart from records in motion; `check` compares them. For a shared tier
  the index is an estimate, because other caches write and evict there.

Order of construction. `PolicyState.load` runs before the tiers are indexed, so that each indexed record gets its saved
use count. The scans for expirations start last, on the thread of `Erasure`. `close` reverses the order: callers first,
then movement, then executors, then tiers.

Threads and locks. `_bind_lock` guards the bound namespaces, the tenants and `NamespaceGC`. The index and each tier have
locks of their own; `Cache` adds none around them. Executors with one thread each run the miss-ratio curve, saves of the
policy state and usage counts (`curve`) and the pinning of memory for copies (`pin`). `TierManager` owns the threads
that copy and sync, and each write-back queue owns its own. `OsEnv` provides the disk, the clock and the threads, so
that a test can replace all three.

To change it. A new tier implements `kvcache.tier.tier.Tier` and is opened by `factory.open_lower_tiers`. The index
numbers tiers from the fastest, at most four. A new eviction policy implements `kvcache.evict.policy.Policy` and is
listed in `factory.POLICIES`. A new public call belongs in `api.py` first, because the daemon's client implements the
same interface and one contract suite tests both.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, cast

from kvcache.block.layout import KVLayout
from kvcache.block.namespace import Namespace
from kvcache.cache.api import FlushReport, NamespaceFields, NamespaceHandle, NamespaceSpec, check_shards
from kvcache.cache.erase import Erasure
from kvcache.cache.factory import build_context, describe_size
from kvcache.cache.namespace_gc import NamespaceGC
from kvcache.cache.policy_state import PolicyState
from kvcache.cache.request import CacheNamespace, CacheRequest, OpenRequests
from kvcache.cache.shared_lookup import SharedTier
from kvcache.cache.tier_manager import TierManager
from kvcache.cache.usage import NamespaceUsage, UsageByNamespace
from kvcache.errors import ClosedError
from kvcache.index.block_run import BlockRun, pack_shard_key
from kvcache.index.index import Index
from kvcache.index.kv_events import EventBatch
from kvcache.os_env import OsEnv
from kvcache.settings import Settings
from kvcache.settings.types import show_bytes
from kvcache.tier.tier import ScrubReport, SupportsRestore, SupportsScrub, Tier, Usage
from kvcache.transfer.copier import CopierRegistry

if TYPE_CHECKING:
    from typing_extensions import Unpack

_CHECK_ROUNDS, _CHECK_FLUSH_S = 3, 0.5

_log = logging.getLogger("kvcache")


class Cache:
    """Implements `kvcache.cache.api.KVCache`. `kvcache.open` creates it."""

    on_close: list[Callable[[], object]]
    """Called when closing begins. Front ends that reach this cache from outside release it here."""
    on_flush: list[Callable[[float | None], bool]]
    """Called first by `flush`, with the remaining time.

    Each returns whether the stores that clients have begun are complete.
    """
    on_quiesced: list[Callable[[], object]]
    """Called when no record moves any more, before the tiers are closed."""
    on_bind: list[Callable[[CacheNamespace], object]]
    """Called with each namespace that an engine binds for the first time."""
    readiness_checks: list[Callable[[], bool]]
    """Conditions that must all hold before the cache is ready."""
    control_handlers: dict[str, Callable[[dict[Any, Any]], dict[str, Any]]]
    """Handlers of other packages for control socket requests, by name."""

    def __init__(
        self, settings: Settings, os_env: OsEnv | None = None, *, shared: bool = False, served_address: str = ""
    ) -> None:
        """Open the tiers and index the records that are in them.

        Args:
            shared: whether other processes may map the host memory.
            served_address: the address under which other processes reach this cache.
        """
        os_env = os_env or OsEnv()
        context = self._context = build_context(settings, os_env, shared=shared, served_address=served_address)
        self.settings, self.os_env = settings, os_env
        self.index, self.host, self.lower_tiers = context.index, context.host, context.lower_tiers
        self.cost_classes, self.quotas = context.cost_classes, context.cost_classes.quotas
        self.counters, self.events, self.miss_explainer = context.counters, context.events, context.miss_explainer
        self.usage_log, self.plan, self.expiry = context.usage_log, context.plan, context.expiry
        self.bypass, self.pins = context.bypass, context.pins
        self.policy_state = PolicyState(context, str(settings.nvme.directories[0]) if settings.nvme.enabled else None)
        self.policy_state.load()  # indexing the tiers applies the use counts, so they are loaded first
        restored = [tier for tier in self.lower_tiers if isinstance(tier, SupportsRestore)]
        for tier in restored:
            _index_stored_records(self.index, tier.name, tier)
        manager = self.tier_manager = TierManager(context)
        self.namespace_usage = NamespaceUsage(self.index, context.tiers, os_env.clock, self._sizes)
        self.erasure = Erasure(self.index, context.tiers, self.namespace_usage, manager.settle, manager.wipe, os_env)
        self._bind_lock = threading.Lock()
        self._namespace_gc = NamespaceGC(context, self.erasure, lambda: self.handles, self._bind_lock)
        self.ttl_scans = [self.erasure.submit(partial(self.expiry.learn, tier.expirations)) for tier in restored]
        self.index.subscribe(on_request=self.policy_state.used)
        self._pin_executor = os_env.executor(1, "pin")
        self.copiers = CopierRegistry(self._pin_executor.submit)
        self.host.arena.watch(self.copiers.add_region, self.copiers.remove_region)
        self._handles: dict[Hashable, CacheNamespace] = {}
        self._tenants = context.tenants
        self._register: OpenRequests[CacheRequest] = OpenRequests()
        self.on_close, self.on_flush, self.on_quiesced, self.on_bind, self.readiness_checks = [], [], [], [], []
        self.control_handlers = {}
        self.isolates_tenants = shared and bool(settings.daemon.tenants_file)
        """Whether clients use other signatures than the index. `bind_signatures` translates them."""
        self._closed = False
        self._flushed = FlushReport(fault="the cache is being closed")  # until `close` replaces it
        self._watch = manager.watch()
        self.life = uuid.uuid4().hex
        """Changes wherever stored blocks may be lost."""
        _log.info(
            "host %s (%s)%s",
            show_bytes(settings.host.capacity_bytes),
            settings.origin("host.capacity_bytes"),
            "".join(f", {tier.name} {describe_size(tier)}" for tier in self.lower_tiers),
        )

    def namespace(
        self,
        spec: KVLayout | NamespaceSpec,
        **fields: Unpack[NamespaceFields],
    ) -> CacheNamespace:
        if self._closed:
            raise ClosedError("this cache was closed; open another one")
        spec = NamespaceSpec.of(spec, fields)
        held, all_shards = check_shards(spec.layout, spec.shards, spec.ranks)
        namespace = spec.namespace(self._context.record_codec.facts)
        key = (namespace.id, held, all_shards, spec.ttl_s)
        with self._bind_lock:
            self._context.record_codec.bind(namespace)
            self.erasure.note(namespace)
            made = key not in self._handles
            handle = self._handles.get(key) or CacheNamespace(
                self._context,
                self.tier_manager,
                self.copiers,
                self._register,
                namespace,
                held,
                all_shards,
                spec.ttl_s,
            )
            if made:
                self._tenants[namespace.id] = namespace.tenant
                handle.register_cost_classes()
                self._handles[key] = handle
        if made:
            _log.info("namespace bound: model=%s capacity: %s", namespace.model, self._fits(handle))
            for call in self.on_bind:
                call(handle)
        return handle

    def unbind(self, handles: Collection[CacheNamespace]) -> None:
        """Remove these bindings. Their records stay, and a new binding of the same namespace finds them."""
        unbound = set(handles)
        with self._bind_lock:
            for key, handle in list(self._handles.items()):
                if handle in unbound:
                    del self._handles[key]
            remaining = {handle.id for handle in self.handles}
            for namespace in self._tenants.keys() - remaining:
                del self._tenants[namespace]
            self._namespace_gc.add(unbound)
        self.erasure.submit(self._namespace_gc.collect)

    def curve(self) -> dict[str, Any]:
        return self._context.curve.report()

    def _fits(self, handle: CacheNamespace) -> str:
        """Tokens of this model that fit into each tier of this cache, all ranks together.

        Groups that do not grow with the context are not counted.
        """
        growing = [ref for ref in handle.all_shards if handle.layout.groups[ref.group].rule == "all"]
        capacities = []
        for tier in (self.host, *(tier for tier in self.lower_tiers if not tier.shared)):
            of_block = sum(
                self._context.record_codec.stored_bytes(tier.name, handle.layout, ref.group, ref.shard)
                for ref in growing or handle.all_shards
            )
            tokens = tier.usage().capacity_bytes // of_block * handle.layout.block_tokens
            capacities.append(f"{tokens:,} tokens in {tier.name} ({self._context.record_codec.codec_of(tier.name)})")
        return ", ".join(capacities)

    def _sizes(self) -> dict[bytes, int]:
        """Payload bytes of a record by shard key, for all bound namespaces."""
        return {
            ref.key: ref.payload_bytes for handle in self.handles for ref in (*handle.own_shards, *handle.all_shards)
        }

    def counted(self) -> UsageByNamespace:
        """Records and bytes by namespace and tier from the last count. Never waits for a new one."""
        return self.namespace_usage.cached(self._context.background.submit)

    @property
    def handles(self) -> list[CacheNamespace]:
        return list(self._handles.values())

    @property
    def namespaces(self) -> list[Namespace]:
        """The bound namespaces, each once."""
        return list({handle.id: handle.namespace for handle in list(self._handles.values())}.values())

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that this cache adds to those of every namespace."""
        return self._context.record_codec.facts

    def continue_life(self, life: str) -> None:
        """Continue the life of a process that handed over all of its blocks."""
        self.life = life

    def ready(self) -> bool:
        """Whether engines should send requests: each readiness check has succeeded or reached its time limit."""
        return all(wait() for wait in self.readiness_checks)

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        if self._closed:
            return self._flushed
        return self.tier_manager.flush(timeout_s, watch=self._watch, first=self.on_flush)

    def stats(self) -> dict[str, Any]:
        held, pinned = self._context.holds.held_bytes(), self.pins.held_bytes()
        tiers = {}
        for tier in self._context.tiers:
            # a shared server would take time to answer, and its totals include other caches
            usage = Usage(self.index.resident(tier.name), 0, 0) if tier.shared else tier.usage()
            health_issues = tier.health_issues()
            tiers[tier.name] = {
                "records": usage.records,
                "used_bytes": usage.used_bytes,
                "capacity_bytes": usage.capacity_bytes,
                "held_bytes": held[tier.name],
                "pinned_bytes": pinned[tier.name],
                "read_bytes_per_s": self.plan.read_bytes_per_s(tier.name),
                "troubles": health_issues,
                "in_trouble": len(health_issues),
                "faults": cast(SharedTier, tier).faults if tier.shared else {},
            }
        queued = sum(len(queue) for queue in self.tier_manager.write_back_queues)
        bypass = {"loads": self.bypass.loads, "stores": self.bypass.stores}
        canary = {"worst": self._context.canary.worst}
        return {
            "tiers": tiers,
            "queued_blocks": queued,
            "bypass": bypass,
            "canary": canary,
            "curve": self._context.curve.rates(),
            "counters": self.counters.tree(),
        }

    def kv_events(self, after: int | None, handles: Sequence[NamespaceHandle], tenant: str | None = None) -> EventBatch:
        """Events after a number.

        Args:
            tenant: the tenant that owns all of `bounds`. The batch's numbers then tell nothing about other tenants.
        """
        return self.index.kv_events.since(after, {handle.id for handle in handles}, tenant)

    def check(self) -> list[str]:
        """A full audit; one line per fault.

        Shared tiers are skipped: other caches change them, so the index may differ.
        """
        faults = self.index.check()
        tiers = [tier for tier in self._context.tiers if not tier.shared]
        differ = [self._index_mismatch(tier) for tier in tiers]
        # records in motion differ for a moment; a fault is a difference that every round finds
        for _ in range(_CHECK_ROUNDS):
            if not any(map(any, differ)):
                break
            self.tier_manager.settle(_CHECK_FLUSH_S, first=self.on_flush)
            recheck = [self._index_mismatch(tier) for tier in tiers]
            differ = [(u & v, w & x) for (u, w), (v, x) in zip(differ, recheck, strict=True)]
        for tier, (unheld, unlisted) in zip(tiers, differ, strict=True):
            faults += tier.check()
            faults += [f"{tier.name}: {name.hex()} is in the index and not in the tier" for name in unheld]
            faults += [f"{tier.name}: {name.hex()} is in the tier and not in the index" for name in unlisted]
        return faults

    def scrub(self) -> ScrubReport:
        """Read and verify every record on the drives, and trust a suspect drive again.

        Damaged records are removed. With keys configured, unencrypted records from before are removed and overwritten.
        """
        found = ScrubReport()
        for tier in self.lower_tiers:
            if not isinstance(tier, SupportsScrub):
                continue
            tier.keep_files(True)
            try:
                report = tier.scrub(unwanted=self._context.record_codec.is_obsolete)
                if report.unwanted:
                    tier.wipe()
            finally:
                tier.keep_files(False)
            found.add(report)
        return found

    def _index_mismatch(self, tier: Tier) -> tuple[set[bytes], set[bytes]]:
        """Names that only the index has, and names that only the tier has."""
        stored = {address.name: address for address in tier.scan()}
        unlisted = {name for name, address in stored.items() if not self.index.contains(address, tier.name)}
        unheld: set[bytes] = set()
        if self.index.resident(tier.name) != len(stored) - len(
            unlisted
        ):  # listing all names blocks the index, so the counts decide first
            unheld = self.index.names(tier.name) - stored.keys()
        return unheld, unlisted - self.tier_manager.promoter.foreign

    def close(self) -> FlushReport:
        if self._closed:
            return self._flushed
        self._closed = True
        for handle in self._handles.values():
            handle.close()
        for call in self.on_close:
            call()
        report = self._flushed = self.tier_manager.close(self._watch)
        for call in self.on_quiesced:
            call()
        self.host.arena.watch()
        self._pin_executor.close()
        self.erasure.close()
        self._context.background.close()
        self.policy_state.save()
        self.copiers.close()
        # each tier is closed even if another one fails
        closed = {tier.name: tier.close() for tier in self._context.tiers}
        tiers = {name: replace(tier, synced=tier.synced and closed[name]) for name, tier in report.tiers.items()}
        self._flushed = replace(report, tiers=tiers)
        return self._flushed

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _index_stored_records(index: Index, name: str, tier: SupportsRestore) -> None:
    """Index the records in a tier, and remove from the index what the tier loses later."""
    tier.on_loss(lambda address: index.discard(address, name))
    for head, signatures in tier.runs():
        index.insert_run(
            BlockRun(pack_shard_key(head.namespace, head.group, head.shard), signatures), head.parent, name
        )

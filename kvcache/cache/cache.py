"""The cache of one process: it owns the tiers, the index and the flow between them."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any, cast

from kvcache.block.layout import KVLayout, Shard
from kvcache.block.namespace import Namespace
from kvcache.cache.api import Bound, FlushReport, check_shards, check_ttl
from kvcache.cache.canary import Canary
from kvcache.cache.erase import Erasure
from kvcache.cache.factory import coder_of, policy_of, shares_of, size_of, tiers_below
from kvcache.cache.load_plan import Plan
from kvcache.cache.miss_explainer import Why
from kvcache.cache.namespace_gc import Unbound
from kvcache.cache.policy_state import Learnt
from kvcache.cache.request import BoundCache, CacheRequest, Register
from kvcache.cache.shared_lookup import Ask, SharedTier
from kvcache.cache.tier_manager import Flow
from kvcache.cache.usage import Census, Counted, Uses
from kvcache.errors import ClosedError
from kvcache.index.block_run import Run, place_of
from kvcache.index.cost_classes import Kind, Kinds, Model
from kvcache.index.index import Index
from kvcache.index.kv_events import Told
from kvcache.index.mrc import Curve
from kvcache.observe.events import Events
from kvcache.observe.metrics import Counters
from kvcache.os_env import Port
from kvcache.settings import Settings
from kvcache.settings.types import show_bytes
from kvcache.tier.host.tier import HostTier
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.tier import Scrubbed, Tier, Usage
from kvcache.transfer.copier import Copiers

_LOOKS, _ARRIVE_S = 3, 0.5

_log = logging.getLogger("kvcache")


class Cache:
    """Implements `kvcache.cache.api.KVCache`; made by `kvcache.open`."""

    def __init__(self, settings: Settings, port: Port | None = None, *, shared: bool = False, serves: str = "") -> None:
        """`shared`: in host memory that other processes may map. `serves`: where they reach this cache."""
        self.settings = settings
        port = port or Port()
        self.counters = Counters()
        self.events = Events(port.clock)
        self._coder = coder_of(settings, self.counters)
        self.below = tiers_below(settings, port, serves)
        self.host = HostTier(
            capacity_bytes=settings.host.capacity_bytes,
            extent_bytes=settings.host.extent_bytes,
            verify_arena=settings.host.verify_arena,
            shared=shared,
            port=port,
        )
        names = [self.host.name, *(tier.name for tier in self.below)]
        self.index = Index(names, policy_of(settings), clock=port.clock)
        self.shares = shares_of(settings)
        self.kinds = Kinds(self.index, names, self.shares)
        self.host.arena.quota = lambda tenant: self.shares.of(tenant, self.host.name).quota_bytes
        self.why = Why(
            self.index, port.clock, settings.explain.memory_bytes, [tier.name for tier in self.below if tier.shared]
        )
        self.index.departed = self.why.departed
        self._player = port.executor(1, "curve")
        uses, directory = Uses(port.clock), str(settings.nvme.directories[0]) if settings.nvme.enabled else None
        self.learnt = Learnt(directory, self.index, self.kinds, uses, self.counters, port, self._player.submit)
        self.learnt.load()  # what single blocks were used comes before they do
        for tier in self.below:
            if not tier.shared:
                _take_in(self.index, tier)
        self.flow = Flow(
            index=self.index,
            kinds=self.kinds,
            curve=self._curve(),
            host=self.host,
            below=self.below,
            coder=self._coder,
            counters=self.counters,
            events=self.events,
            why=self.why,
            uses=uses,
            plan=Plan(port.clock, self.counters, enabled=settings.plan.enabled),
            port=port,
            ask=Ask(
                [cast(SharedTier, tier) for tier in self.below if tier.shared],
                index=self.index,
                port=port,
                most_known=settings.flow.known_blocks,
                deadline_s=settings.flow.ask_deadline_s,
            ),
            canary=Canary(settings.canary.one_in, self._coder.loss, self.counters, port),
            write={name: getattr(settings, name).write for name in (NvmeTier.name, "redis", "object")},
            queue_blocks=settings.flow.queue_blocks,
            threads=settings.flow.threads,
        )
        self.census = Census(self.index, (self.host, *self.below), port.clock, self._sizes)
        flow = self.flow
        self.erasure = Erasure(self.index, (self.host, *self.below), self.census, flow.settle, flow.wipe, port)
        own = [tier for tier in self.below if not tier.shared]
        self._binding = threading.Lock()
        mine = [self.host.name, *(tier.name for tier in own)]
        self._unbound = Unbound(
            self.index, mine, self._coder, self.kinds, self.erasure, lambda: self.bounds, self._binding
        )
        self.learned = [self.erasure.submit(partial(self.flow.expiry.learn, tier.ending)) for tier in own]
        self.index.begun = self.learnt.used
        self._pinner = port.executor(1, "pin")
        self.copiers = Copiers(self._pinner.submit)
        self.host.arena.watch(self.copiers.came, self.copiers.gone)
        self._bound: dict[Hashable, BoundCache] = {}
        self._tenants: dict[bytes, str] = {}  # by namespace, of those that are bound
        self.index.changes.tenant = lambda namespace: self._tenants.get(namespace, "")
        self._register: Register[CacheRequest] = Register()
        self.at_close: list[Callable[[], object]] = []
        """Called when closing begins: what reaches this cache from outside lets go of it."""
        self.at_flush: list[Callable[[float | None], bool]] = []
        """Asked first by `flush`, with the time that is left: whether what is on its way from outside has come."""
        self.at_rest: list[Callable[[], object]] = []
        """Called when nothing moves any more, before the tiers are closed."""
        self.at_bind: list[Callable[[BoundCache], object]] = []
        """Called with each namespace that an engine binds for the first time."""
        self.waits: list[Callable[[], bool]] = []
        """What must be true before the cache is ready."""
        self.binds = False
        """Whether what asks from outside names its blocks otherwise than the index: as `bind_signatures` has them."""
        self.answers: dict[str, Callable[[dict[Any, Any]], dict[str, Any]]] = {}
        """By name, questions that rooms above answer on the control socket."""
        self._closed = False
        self._flushed = FlushReport(fault="the cache is being closed")  # by `close`
        self._watch = flow.watch()
        self.life = uuid.uuid4().hex  # another one wherever blocks that were stored may be lost
        _log.info(
            "host %s (%s)%s",
            show_bytes(settings.host.capacity_bytes),
            settings.origin("host.capacity_bytes"),
            "".join(f", {tier.name} {size_of(tier)}" for tier in self.below),
        )

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
    ) -> BoundCache:
        if self._closed:
            raise ClosedError("this cache was closed; open another one")
        held, everywhere = check_shards(layout, shards, ranks)
        namespace = Namespace(
            layout,
            model=model,
            revision=revision,
            adapter=adapter,
            tenant=tenant,
            cache_salt=cache_salt,
            facts={**(facts or {}), **self._coder.facts},
        )
        key = (namespace.id, held, everywhere, ttl_s)
        with self._binding:
            self._coder.bind(namespace)
            self.erasure.note(namespace)
            made = key not in self._bound
            bound = self._bound.get(key) or BoundCache(
                self.flow,
                self.copiers,
                self._register,
                namespace,
                held,
                everywhere,
                self.settings.flow.deadline_s,
                check_ttl(ttl_s),
            )
            if made:
                self._tenants[namespace.id] = tenant
                self._weigh(bound)
                self._bound[key] = bound
        if made:
            _log.info("%s: room for %s", model, self._fits(bound))
            for call in self.at_bind:
                call(bound)
        return bound

    def unbind(self, bounds: Collection[BoundCache]) -> None:
        """Nobody has these any more. Their records stay, and whoever binds their namespaces again finds them."""
        gone = set(bounds)
        with self._binding:
            for key, bound in list(self._bound.items()):
                if bound in gone:
                    del self._bound[key]
            self._tenants = {bound.id: bound.tenant for bound in self.bounds}
            self._unbound.add(gone)
        self.erasure.submit(self._unbound.look)

    def _curve(self) -> Curve:
        own = [tier for tier in (self.host, *self.below) if not tier.shared]
        return Curve(
            {tier.name: tier.usage().capacity_bytes for tier in own},
            self.index.policy,
            self.index.values,
            self._player.submit,
            samples=self.settings.evict.curve_samples,
            refuses=self.host.name if not self.below else "",
        )

    def curve(self) -> dict[str, Any]:
        return self.flow.curve.tell()

    def _weigh(self, bound: BoundCache) -> None:
        """Tell what its records take in each tier, and whose they are."""
        tiers = [self.host.name, *(tier.name for tier in self.below)]
        sizes = [
            tuple(self._coder.stored_bytes(tier, bound.layout, place.group, place.shard) for tier in tiers)
            for place in bound.everywhere
        ]
        name = (bound.namespace.model, bound.namespace.revision, bound.namespace.adapter or "")
        bound.model = Model(name, bound.layout.block_tokens, tuple(map(sum, zip(*sizes, strict=True))))
        for place, size in zip(bound.everywhere, sizes, strict=True):
            self.kinds.bind(Kind(bound.tenant, bound.model, size), place.name)

    def _fits(self, bound: BoundCache) -> str:
        """How many tokens of this model fit into each tier of ours, all ranks together; what of a model does not grow
        with the context is left out."""
        growing = [place for place in bound.everywhere if bound.layout.groups[place.group].rule == "all"]
        said = []
        for tier in (self.host, *(tier for tier in self.below if not tier.shared)):
            of_block = sum(
                self._coder.stored_bytes(tier.name, bound.layout, place.group, place.shard)
                for place in growing or bound.everywhere
            )
            tokens = tier.usage().capacity_bytes // of_block * bound.layout.block_tokens
            said.append(f"{tokens:,} tokens in {tier.name} ({self._coder.codec_of(tier.name)})")
        return ", ".join(said)

    def _sizes(self) -> dict[bytes, int]:
        """Payload bytes of a record by its place, of all that were bound."""
        return {
            place.name: place.payload_bytes for bound in self.bounds for place in (*bound.places, *bound.everywhere)
        }

    def counted(self) -> Counted:
        """What each namespace has in each tier, as it was counted last: at once."""
        return self.census.lately(self._player.submit)

    @property
    def bounds(self) -> list[BoundCache]:
        return list(self._bound.values())

    @property
    def namespaces(self) -> list[Namespace]:
        """Those that were bound, each once."""
        return list({bound.id: bound.namespace for bound in list(self._bound.values())}.values())

    @property
    def facts(self) -> dict[str, Any]:
        """What this cache adds to every namespace's own."""
        return self._coder.facts

    def ready(self) -> bool:
        """Whether engines should be sent requests: what is to be near before is, or had its time."""
        return all(wait() for wait in self.waits)

    def flush(self, timeout_s: float | None = None) -> FlushReport:
        if self._closed:
            return self._flushed
        return self.flow.flush(timeout_s, watch=self._watch, first=self.at_flush)

    def stats(self) -> dict[str, Any]:
        held, pinned = self.flow.holds.held_bytes(), self.flow.pins.held_bytes()
        tiers = {}
        for tier in (self.host, *self.below):
            # of a shared tier what is known of it: to ask a server takes time, and what it says is the server's own
            usage = Usage(self.index.resident(tier.name), 0, 0) if tier.shared else tier.usage()
            troubles = tier.troubles()
            tiers[tier.name] = {
                "records": usage.records,
                "used_bytes": usage.used_bytes,
                "capacity_bytes": usage.capacity_bytes,
                "held_bytes": held[tier.name],
                "pinned_bytes": pinned[tier.name],
                "read_bytes_per_s": self.flow.plan.read_bytes_per_s(tier.name),
                "troubles": troubles,
                "in_trouble": len(troubles),
                "faults": cast(SharedTier, tier).faults if tier.shared else {},
            }
        queued = sum(len(lane) for lane in self.flow.lanes)
        bypass = {"loads": self.flow.bypass.loads, "stores": self.flow.bypass.stores}
        canary = {"worst": self.flow.canary.worst}
        return {
            "tiers": tiers,
            "queued_blocks": queued,
            "bypass": bypass,
            "canary": canary,
            "curve": self.flow.curve.rates(),
            "counters": self.counters.tree(),
        }

    def changes(self, after: int | None, bounds: Sequence[Bound], tenant: str | None = None) -> Told:
        """`tenant`: whose all of them are, who is to learn nothing of others from what numbers there are."""
        return self.index.changes.since(after, {bound.id for bound in bounds}, tenant)

    def check(self) -> list[str]:
        """A shared tier is left out: what is known of it need not be true, and it belongs to others as well."""
        faults = self.index.check()
        tiers = [tier for tier in (self.host, *self.below) if not tier.shared]
        differ = [self._differ(tier) for tier in tiers]
        for _ in range(_LOOKS):  # what is on its way at this moment arrives, and differs no more
            if not any(map(any, differ)):
                break
            self.flow.settle(_ARRIVE_S, first=self.at_flush)
            again = [self._differ(tier) for tier in tiers]
            differ = [(u & v, w & x) for (u, w), (v, x) in zip(differ, again, strict=True)]
        for tier, (unheld, unlisted) in zip(tiers, differ, strict=True):
            faults += tier.check()
            faults += [f"{tier.name}: {name.hex()} is in the index and not in the tier" for name in unheld]
            faults += [f"{tier.name}: {name.hex()} is in the tier and not in the index" for name in unlisted]
        return faults

    def scrub(self) -> Scrubbed:
        """Read and verify every record that lies on a drive; what is damaged leaves, and the drive is trusted again.
        With keys, what lies there from before them, not encrypted, leaves too, and is overwritten."""
        found = Scrubbed()
        for tier in self.below:
            tier.keep_files(True)
            try:
                left = tier.scrub(unwanted=self._coder.unwanted)
                if left.unwanted:
                    tier.wipe()
            finally:
                tier.keep_files(False)
            found.add(left)
        return found

    def _differ(self, tier: Tier) -> tuple[set[bytes], set[bytes]]:
        """Names that the index has and the tier has not, and the other way round."""
        here = {address.name: address for address in tier.scan()}
        unlisted = {name for name, address in here.items() if not self.index.contains(address, tier.name)}
        unheld: set[bytes] = set()
        if self.index.resident(tier.name) != len(here) - len(unlisted):  # else nobody need wait while names are listed
            unheld = self.index.names(tier.name) - here.keys()
        return unheld, unlisted - self.flow.promoter.foreign

    def close(self) -> FlushReport:
        if self._closed:
            return self._flushed
        self._closed = True
        for bound in self._bound.values():
            bound.open = False
        for call in self.at_close:
            call()
        report = self._flushed = self.flow.close(self._watch)
        for call in self.at_rest:
            call()
        self.host.arena.watch()
        self._pinner.close()
        self.erasure.close()
        self._player.close()
        self.learnt.save()
        self.copiers.close()
        closed = {tier.name: tier.close() for tier in (self.host, *self.below)}  # each, also where one failed
        tiers = {name: replace(tier, synced=tier.synced and closed[name]) for name, tier in report.tiers.items()}
        self._flushed = replace(report, tiers=tiers)
        return self._flushed

    def __enter__(self) -> Cache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _take_in(index: Index, tier: Tier) -> None:
    """What the tier has already, and from now on what it loses."""
    tier.on_loss(lambda address: index.discard(address, tier.name))
    for head, signatures in tier.runs():
        index.insert_run(Run(place_of(head.namespace, head.group, head.shard), signatures), head.parent, tier.name)

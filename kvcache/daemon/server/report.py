"""Reports on a running cache as plain data: everything for an operator, its own data for a tenant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from typing import Any

import numpy as np

from kvcache.block.chain import Chain, bind_signatures
from kvcache.block.namespace import Namespace
from kvcache.cache.cache import Cache
from kvcache.cache.miss_explainer import hypothetical_request
from kvcache.cache.usage import UsageByNamespace, UsageRow
from kvcache.errors import ConfigError, NotFoundError
from kvcache.evict.quotas import UNLIMITED
from kvcache.log import RequestContext
from kvcache.observe.recent_requests import Ids, RecentRequest, prefixes

# Explains why a prompt was not found: a past request, a prompt given by its tokens, or the last misses.

MAX_STORIES = 1000
"""Most explanations in one reply."""

_EXPECTED = "expected one of request (its id), ids (uint32, little-endian) and count (of the last misses)"


def explain(cache: Cache, arguments: dict[Any, Any], tenant: str | None = None) -> dict[str, Any]:
    """Explain misses. `tenant` limits the report to that tenant's namespaces."""
    request, ids, count = arguments.get("request"), arguments.get("ids"), arguments.get("count")
    own = {namespace.id for namespace in cache.namespaces if tenant in (None, namespace.tenant)}
    last = (entry for entry in cache.miss_explainer.recent_requests.last() if tenant is None or entry.namespace in own)
    if isinstance(request, str):
        found = list(islice((entry for entry in last if entry.request == request), 1))
    elif ids is not None:
        found = [lookup_prompt(cache, ids, str(arguments.get("namespace") or ""), tenant)]
    elif count is None or (isinstance(count, int) and count >= 0):
        found = list(
            islice((entry for entry in last if entry.reason), min(MAX_STORIES, 10 if count is None else count))
        )
    else:
        raise ConfigError(_EXPECTED)
    namespaces, among = cache.namespaces, None if tenant is None else own
    return {"stories": [cache.miss_explainer.explain(entry, namespaces, among) for entry in found]}


def lookup_prompt(cache: Cache, packed_ids: Any, prefix: str, tenant: str | None = None) -> RecentRequest:
    """Look the prompt up as a request now would, in the namespace that has the longest prefix of it."""
    if not isinstance(packed_ids, bytes) or not packed_ids or len(packed_ids) % 4:
        raise ConfigError(_EXPECTED)
    ids: Ids = np.frombuffer(packed_ids, "<u4")
    best: RecentRequest | None = None
    handles = [b for b in cache.handles if b.id.hex().startswith(prefix) and tenant in (None, b.tenant)]
    if not handles:
        known = [b.id.hex()[: max(8, len(prefix))] for b in cache.handles if tenant in (None, b.tenant)]
        raise NotFoundError.like(
            f"namespace {prefix!r:.80}: no engine has bound a namespace with this id", prefix, known
        )
    for handle in handles:
        tokens = handle.layout.block_tokens
        lookup, chain = cache.index.lookup(handle.shard_keys, handle.needs), Chain(handle.id, tokens)
        chain.extend(ids)
        packed = bind_signatures(handle.id, chain.packed) if cache.isolates_tenants else chain.packed
        lookup.match(packed)
        clock, time = cache.index.clock, cache.os_env.clock.wall()
        entry = hypothetical_request(
            packed, ids, namespace=handle.id, shard_keys=handle.shard_keys, block_tokens=tokens, clock=clock, time=time
        )
        entry.hit_blocks = lookup.blocks
        if best is None or entry.hit_blocks * tokens > best.hit_blocks * best.block_tokens:
            best = entry
    assert best is not None, "there is a namespace"
    best.reason = cache.miss_explainer.reason(best)
    return best


MAX_EVENTS, MAX_PREFIXES, MAX_ROWS = 1024, 64, 1024
"""Most in one reply."""
_NAMESPACE_FIELDS = ("model", "revision", "adapter", "tenant", "cache_salt")


class Report:
    """Reports for one tenant, or for an operator where `tenant` is None."""

    def __init__(self, cache: Cache, tenant: str | None = None) -> None:
        self._cache, self._tenant = cache, tenant

    def stats(self) -> dict[str, Any]:
        """Return the statistics as `KVCache.stats`.

        For a tenant only what is counted by tenant: records, bytes, and tokens requested and matched.
        """
        if self._tenant is None:
            return self._cache.stats()
        held, uses = self._own(self._cache.counted()), self._own(self._cache.usage_log.namespaces())
        tiers: dict[str, dict[str, int]] = {}
        for of_tier in held.values():
            for tier, holding in of_tier.items():
                had = tiers.setdefault(tier, {"records": 0, "used_bytes": 0})
                had["records"] += holding.records
                had["used_bytes"] += holding.bytes
        return {"tiers": tiers, "counters": _summed(list(uses.values()))}

    def namespaces(self) -> list[dict[str, Any]]:
        """Return namespaces, most recently used first.

        `last` is None where no use is known since this cache started, at `since`.
        """
        held, uses = self._cache.namespace_usage.take(), self._cache.usage_log.namespaces()
        known = {namespace.id: namespace for namespace in self._cache.namespaces}
        rows = [
            _namespace(space, known.get(space), held, uses.get(space), self._cache.usage_log.since)
            for space in self._own(dict.fromkeys((*known, *held, *uses)))
        ]
        return sorted(rows, key=lambda row: (-(row["last"] or 0.0), row["id"]))[:MAX_ROWS]

    def tenants(self) -> list[dict[str, Any]]:
        """Return per tenant its records by tier, `quotas`, guaranteed bytes (`least`) and requested tokens.

        Namespaces that are not bound here have no tenant's name.
        """
        rows: dict[str, dict[str, Any]] = {}
        for tier in (self._cache.host.name, *(tier.name for tier in self._cache.lower_tiers)):
            for tenant, limit in self._cache.quotas.all(tier).items():
                if self._tenant in (None, tenant):
                    row = rows.setdefault(tenant, _tenant(tenant))
                    row["quotas"] |= {tier: limit.quota_bytes} if limit.quota_bytes < UNLIMITED else {}
                    row["least"] |= {tier: limit.guaranteed_bytes} if limit.guaranteed_bytes else {}
        for space in self.namespaces():
            row = rows.setdefault(space["tenant"] or "", _tenant(space["tenant"]))
            row["namespaces"] += 1
            row["last"] = max(filter(None, (row["last"], space["last"])), default=None)
            for name in ("requests", "asked_tokens"):
                row[name] += space[name]
            for tier, tokens in space["hit_tokens"].items():
                row["hit_tokens"][tier] = row["hit_tokens"].get(tier, 0) + tokens
            for tier, had in space["tiers"].items():
                of_tier = row["tiers"].setdefault(tier, {"records": 0, "bytes": 0})
                of_tier["records"] += had["records"]
                of_tier["bytes"] += had["bytes"]
        return sorted(
            rows.values(), key=lambda row: (-sum(t["bytes"] for t in row["tiers"].values()), row["tenant"] or "")
        )

    def agents(self) -> list[dict[str, Any]]:
        """Return the agents that requests named, those with most requested tokens first."""
        uses = self._cache.usage_log.agents()
        rows = [
            {"agent": agent, "tenant": tenant, **asdict(use)}
            for (tenant, agent), use in uses.items()
            if self._tenant in (None, tenant)
        ]
        return sorted(rows, key=lambda row: (-row["asked_tokens"], row["tenant"], row["agent"]))[:MAX_ROWS]

    def prefixes(self, count: int = 10) -> list[dict[str, Any]]:
        """Return the prefixes that recent prompts share. The report contains no prompt content."""
        entry = self._cache.miss_explainer.recent_requests.last()
        own = self._own({each.namespace: None for each in entry})
        known = {namespace.id: namespace for namespace in self._cache.namespaces}
        return [
            {
                "prefix": prefix.name,
                "namespace": prefix.namespace.hex(),
                "model": known[prefix.namespace].model if prefix.namespace in known else None,
                "tokens": prefix.blocks * prefix.block_tokens,
                "requests": prefix.requests,
                "found_tokens": prefix.hit_blocks * prefix.block_tokens,
                "last": prefix.last,
            }
            for prefix in prefixes((each for each in entry if each.namespace in own), min(_count(count), MAX_PREFIXES))
        ]

    def events(self, count: int | None = None) -> list[dict[str, Any]]:
        """Return events, oldest first.

        A tenant's report omits the request behind an eviction or a drop, because another tenant's may have caused it.
        """
        last = min(MAX_EVENTS, MAX_EVENTS if count is None else _count(count))
        found = self._cache.events.last(last, None if self._tenant is None else self._owned)
        hidden = {"evicted", "dropped"} if self._tenant is not None else set()
        anonymous = RequestContext()._asdict()
        return [asdict(event) | (anonymous if event.kind in hidden else {}) for event in found]

    def explain(self, arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Explain misses as the control socket's `explain`. To a tenant, another tenant's blocks were never stored."""
        stories: list[dict[str, Any]] = explain(self._cache, dict(arguments), self._tenant)["stories"]
        return stories

    def curve(self) -> dict[str, Any]:
        """Return the miss-ratio curve as `Cache.curve`; for a tenant, that of its own requests."""
        curve_points = self._cache.curve()
        if self._tenant is None:
            return curve_points
        tiers = {}
        for name, tier in curve_points["tiers"].items():
            own = tier["by"]["tenant"].get(self._tenant)
            rates = [] if own is None else zip(curve_points["times"], own["hit_rates"], strict=True)
            tiers[name] = {"points": [{"times": times, "hit_rate": rate} for times, rate in rates]}
        return {"times": curve_points["times"], "tiers": tiers}

    @property
    def _owned(self) -> set[bytes]:
        return {space.id for space in self._cache.namespaces if self._tenant in (None, space.tenant)}

    def _own(self, of_namespaces: Mapping[bytes, Any]) -> dict[bytes, Any]:
        own = self._owned
        return {space: value for space, value in of_namespaces.items() if self._tenant is None or space in own}


def _namespace(
    space: bytes, namespace: Namespace | None, held: UsageByNamespace, use: UsageRow | None, since: float
) -> dict[str, Any]:
    fields = {} if namespace is None else namespace.describe()
    return {
        "id": space.hex(),
        **{name: fields.get(name) for name in _NAMESPACE_FIELDS},
        "tiers": {tier: holding._asdict() for tier, holding in held.get(space, {}).items()},
        "requests": 0 if use is None else use.requests,
        "asked_tokens": 0 if use is None else use.asked_tokens,
        "hit_tokens": {} if use is None else use.hit_tokens,
        "last": None if use is None else use.last,
        "since": since,
    }


def _tenant(tenant: str | None) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "namespaces": 0,
        "tiers": {},
        "quotas": {},
        "least": {},
        "requests": 0,
        "asked_tokens": 0,
        "hit_tokens": {},
        "last": None,
    }


def _summed(uses: Sequence[UsageRow]) -> dict[str, Any]:
    hits: dict[str, int] = {}
    for use in uses:
        for tier, tokens in use.hit_tokens.items():
            hits[tier] = hits.get(tier, 0) + tokens
    return {
        "requests": sum(use.requests for use in uses),
        "asked_tokens": sum(use.asked_tokens for use in uses),
        "hit_tokens": hits,
    }


def _count(count: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ConfigError(f"count = {count!r:.40}: expected a number")
    return count

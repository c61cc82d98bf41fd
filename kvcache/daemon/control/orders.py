"""What an operator orders a running cache to do: keep a prefix, let it go, remove what nobody uses."""

from __future__ import annotations

from typing import Any

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.cache.cache import Cache
from kvcache.cache.erase import clear
from kvcache.cache.prefetch import Near
from kvcache.daemon.control.explain import prompt
from kvcache.errors import ConfigError, NotFoundError
from kvcache.observe.recent_requests import Asked, named, prefixes

KNOWN = 64
"""Prefixes that an unknown name is compared with."""
NEAR_S = 30.0
"""For a prefix to come near before it is pinned as far as it is."""


def pin(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """`seconds`, and which prefix: `request`, the id of one that is remembered, `prefix`, its name, or `ids`. It is
    brought into host memory, as far as pins may fill that, and kept there and wherever else it is. Without any of these
    it tells what is pinned."""
    which, seconds = _which(cache, asked), asked.get("seconds")
    if which is not None:
        if not isinstance(seconds, (int, float)) or isinstance(seconds, bool):
            raise ConfigError(f"seconds = {seconds!r:.40}: expected for how long")
        whose, blocks = which
        bound = next((bound for bound in cache.bounds if bound.id == whose.namespace), None)
        if bound is None:
            raise ConfigError("no engine has bound this prompt's namespace here")
        packed, flow = whose.packed[: blocks * SIGNATURE_BYTES], cache.flow
        flow.pins.check(float(seconds))
        end = flow.port.clock.now() + NEAR_S
        most = flow.pins.fitting(bound, blocks)
        near = Near(flow, bound, packed, None, lambda: flow.port.clock.now() >= end, most_blocks=most)
        near.bring("pin")
        made = flow.pins.pin(bound, packed, float(seconds))
        return {"made": made.told(), "pins": [each.told() for each in cache.flow.pins.all()]}
    return {"made": None, "pins": [each.told() for each in cache.flow.pins.all()]}


def unpin(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """`pin`: the number of one, or "all"."""
    which = asked.get("pin")
    pins = cache.flow.pins
    if which == "all":
        ended = [each.id for each in pins.all() if pins.unpin(each.id)]
    elif isinstance(which, int) and not isinstance(which, bool):
        if not pins.unpin(which):
            raise NotFoundError(f"pin {which}: there is none of this number; `kvcache pin` lists those there are")
        ended = [which]
    else:
        raise ConfigError(f"pin = {which!r:.40}: expected the number of a pin, or all")
    return {"ended": ended, "pins": [each.told() for each in pins.all()]}


def prune(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """Remove namespaces that nobody used for `unused_s` from the tiers of this cache alone: what others share, others
    may use. One of which no use is known counts from when this cache began. `dry_run`: only tell which."""
    unused_s, dry_run = asked.get("unused_s"), bool(asked.get("dry_run"))
    if not isinstance(unused_s, (int, float)) or isinstance(unused_s, bool) or not unused_s > 0:
        raise ConfigError(f"unused_s = {unused_s!r:.40}: expected for how long nobody used it, in seconds")
    tiers = [tier for tier in (cache.flow.host, *cache.below) if not tier.shared]
    names = {tier.name for tier in tiers}
    uses, now = cache.flow.uses, cache.flow.port.clock.wall()
    held = cache.census.take(anew=True)
    known = {namespace.id: namespace for namespace in cache.namespaces}
    rows = []
    for space, of_tier in held.items():
        used = uses.namespaces().get(space)
        last = uses.since if used is None else used.last
        if now - last < unused_s or not names & of_tier.keys():
            continue
        rows.append(
            {
                "id": space.hex(),
                "model": known[space].model if space in known else None,
                "last": None if used is None else used.last,
                "bytes": sum(holding.bytes for tier, holding in of_tier.items() if tier in names),
                "records": sum(holding.records for tier, holding in of_tier.items() if tier in names)
                if dry_run
                else clear(space, cache.index, tiers),
            }
        )
    if rows and not dry_run:
        cache.census.take(anew=True)
    return {"pruned": rows, "dry_run": dry_run}


def erase(cache: Cache, asked: dict[Any, Any]) -> dict[str, Any]:
    """Remove what is of a `tenant`, a `cache_salt` or a `namespace` (all that is given must fit) from every tier,
    shared ones too, and overwrite what it left. Answers when it is done, or says in which tier it is not. `dry_run`:
    only count."""
    given = {name: asked.get(name) for name in ("tenant", "cache_salt", "namespace")}
    for name, value in given.items():
        if value is not None and (not isinstance(value, str) or (name == "namespace" and len(value) < 8)):
            raise ConfigError(f"{name}: expected a text, of a namespace's id 8 digits or more")
    erased = cache.erasure.erase(**given, dry_run=bool(asked.get("dry_run")))
    return {
        "namespaces": [namespace.hex() for namespace in erased.namespaces],
        "records": erased.records,
        "left": erased.left,
    }


def _which(cache: Cache, asked: dict[Any, Any]) -> tuple[Asked, int] | None:
    """The prompt that is meant, and up to which block."""
    request, name, ids = asked.get("request"), asked.get("prefix"), asked.get("ids")
    if isinstance(name, str):
        found = named(cache.why.ring.last(), name)
        if found is None:
            known = [prefix.name for prefix in prefixes(cache.why.ring.last(), KNOWN)]
            raise NotFoundError.like(f"prefix {name!r:.40}: no prompt of late has a block of this name", name, known)
        return found
    if isinstance(request, str):
        one = cache.why.ring.find(request)
        if one is None:
            known = [each.request for each in cache.why.ring.last()]
            raise NotFoundError.like(f"request {request!r:.60}: no request of that id is remembered", request, known)
        return one, one.blocks
    if ids is not None:
        one = prompt(cache, ids, str(asked.get("namespace") or ""))
        return one, one.blocks
    return None

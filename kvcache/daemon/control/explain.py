"""Why a prompt was not found, asked over the control socket: of a request that was, of a prompt that may be, or of the
last that missed."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvcache.block.key import Chain
from kvcache.errors import ConfigError
from kvcache.hierarchy.cache import Cache
from kvcache.hierarchy.why import asked_of
from kvcache.observe.asked import Asked, Ids

LAST = 1000
"""Stories in an answer, at most."""


def explain(cache: Cache, question: dict[Any, Any]) -> dict[str, Any]:
    request, ids, count = question.get("request"), question.get("ids"), question.get("count")
    if isinstance(request, str):
        asked = cache.why.ring.find(request)
        found = [] if asked is None else [asked]
    elif isinstance(ids, bytes) and ids and len(ids) % 4 == 0:
        found = _prompt(cache, np.frombuffer(ids, "<u4"), str(question.get("namespace") or ""))
    elif ids is None and (count is None or (isinstance(count, int) and count >= 0)):
        found = [asked for asked in cache.why.ring.last() if asked.reason][: min(LAST, 10 if count is None else count)]
    else:
        raise ConfigError(
            "expected one of request (its id), ids (uint32, little-endian) and count (of the last misses)"
        )
    namespaces = cache.namespaces
    return {"stories": [cache.why.story(asked, namespaces) for asked in found]}


def _prompt(cache: Cache, ids: Ids, prefix: str) -> list[Asked]:
    """The prompt as if it was asked for now, in the namespace that has the most of it."""
    best: Asked | None = None
    bounds = [bound for bound in cache.bounds if bound.id.hex().startswith(prefix)]
    if not bounds:
        raise ConfigError(f"namespace {prefix!r}: no engine has bound one like that here")
    for bound in bounds:
        tokens = bound.layout.block_tokens
        lookup, chain = cache.index.lookup(bound.names, bound.needs), Chain(bound.id, tokens)
        chain.extend(ids, digest=lookup)
        clock, time = cache.index.clock, cache.flow.port.clock.wall()
        asked = asked_of(
            chain.packed, ids, namespace=bound.id, places=bound.names, block_tokens=tokens, clock=clock, time=time
        )
        asked.found = lookup.blocks
        if best is None or asked.found * tokens > best.found * best.block_tokens:
            best = asked
    assert best is not None, "there is a namespace"
    best.reason = cache.why.reason(best)
    return [best]

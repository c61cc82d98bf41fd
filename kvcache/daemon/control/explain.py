"""Why a prompt was not found, asked over the control socket: of a request that was, of a prompt that may be, or of the
last that missed."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np

from kvcache.block.chain import Chain, bind_signatures
from kvcache.cache.cache import Cache
from kvcache.cache.miss_explainer import asked_of
from kvcache.errors import ConfigError, NotFoundError
from kvcache.observe.recent_requests import Asked, Ids

LAST = 1000
"""Stories in an answer, at most."""

_EXPECTED = "expected one of request (its id), ids (uint32, little-endian) and count (of the last misses)"


def explain(cache: Cache, question: dict[Any, Any], tenant: str | None = None) -> dict[str, Any]:
    """`tenant`: of his namespaces alone."""
    request, ids, count = question.get("request"), question.get("ids"), question.get("count")
    own = {namespace.id for namespace in cache.namespaces if tenant in (None, namespace.tenant)}
    last = (asked for asked in cache.why.ring.last() if tenant is None or asked.namespace in own)
    if isinstance(request, str):
        found = list(islice((asked for asked in last if asked.request == request), 1))
    elif ids is not None:
        found = [prompt(cache, ids, str(question.get("namespace") or ""), tenant)]
    elif count is None or (isinstance(count, int) and count >= 0):
        found = list(islice((asked for asked in last if asked.reason), min(LAST, 10 if count is None else count)))
    else:
        raise ConfigError(_EXPECTED)
    namespaces, among = cache.namespaces, None if tenant is None else own
    return {"stories": [cache.why.story(asked, namespaces, among) for asked in found]}


def prompt(cache: Cache, packed_ids: Any, prefix: str, tenant: str | None = None) -> Asked:
    """The prompt as if it was asked for now, in the namespace that has the most of it."""
    if not isinstance(packed_ids, bytes) or not packed_ids or len(packed_ids) % 4:
        raise ConfigError(_EXPECTED)
    ids: Ids = np.frombuffer(packed_ids, "<u4")
    best: Asked | None = None
    bounds = [b for b in cache.bounds if b.id.hex().startswith(prefix) and tenant in (None, b.tenant)]
    if not bounds:
        known = [b.id.hex()[: max(8, len(prefix))] for b in cache.bounds if tenant in (None, b.tenant)]
        raise NotFoundError.like(f"namespace {prefix!r:.80}: no engine has bound one like that here", prefix, known)
    for bound in bounds:
        tokens = bound.layout.block_tokens
        lookup, chain = cache.index.lookup(bound.names, bound.needs), Chain(bound.id, tokens)
        chain.extend(ids)
        packed = bind_signatures(bound.id, chain.packed) if cache.binds else chain.packed
        lookup.match(packed)
        clock, time = cache.index.clock, cache.flow.port.clock.wall()
        asked = asked_of(
            packed, ids, namespace=bound.id, places=bound.names, block_tokens=tokens, clock=clock, time=time
        )
        asked.found = lookup.blocks
        if best is None or asked.found * tokens > best.found * best.block_tokens:
            best = asked
    assert best is not None, "there is a namespace"
    best.reason = cache.why.reason(best)
    return best

"""The namespaces that requests were bound to: the latest ones, since callers choose tenants and salts."""

from __future__ import annotations

from collections import OrderedDict

from kvcache.cache.api import Bound, KVCache
from kvcache.connector.vllm.events import Announcer
from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.model import Model, Rank

MOST_BOUND = 1024


class Bounds:
    def __init__(self, events: Announcer | None = None, most: int = MOST_BOUND) -> None:
        """`events`: what follows each of them."""
        self._events, self._most = events, most
        self._bound: OrderedDict[Who, Bound] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bound)

    def get(self, who: Who) -> Bound | None:
        return self._bound.get(who)

    def bind(self, model: Model, cache: KVCache, who: Who, rank: Rank | None = None) -> Bound:
        """`rank`: the same one each time. KVCacheError where the cache, or the daemon behind it, does not take it."""
        bound = self._bound.get(who)
        if bound is not None:
            self._bound.move_to_end(who)
            return bound
        bound = self._bound[who] = model.bind(cache, who, rank)
        if self._events is not None:
            self._events.follow(model, bound)
        while len(self._bound) > self._most:
            _, oldest = self._bound.popitem(last=False)
            if self._events is not None:
                self._events.leave(oldest)
        return bound

    def clear(self) -> None:
        self._bound.clear()

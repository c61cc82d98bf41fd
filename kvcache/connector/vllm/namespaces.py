"""The namespace of blocks that other engines are to find too, as vLLM's configuration has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kvcache.block.hf import engine_facts
from kvcache.block.revision import KINDS, loader_kinds
from kvcache.block.shared_namespace import shared, shared_layout
from kvcache.cache.api import Bound, KVCache
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.events import Announcer
from kvcache.connector.vllm.identity import (
    Who,
    depends_on_length,
    load_format,
    overrides_of,
    read_every_byte,
    weights_of,
)
from kvcache.connector.vllm.kv_layout import Model, Rank

# The namespaces that requests were bound to: the latest ones, since callers choose tenants and salts.

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


def share_model(config: Any, options: Options, mine: Model) -> Model:
    """The model as every engine names it. LayoutError where no other engine reads its blocks (on a processor vLLM packs
    them), ModelError where its configuration is not on this machine."""
    layout, place = shared_layout(mine.layout), weights_of(config)
    dtype = getattr(config.model_config, "dtype", None)
    same = shared(
        place,
        model=options.model,
        revision=options.revision,
        changed=_changed(config, place),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        kinds=KINDS if options.revision else loader_kinds(load_format(config)),
        read_every_byte=read_every_byte(options),
    )
    return Model(same.model, same.revision, same.facts, layout, mine.shards, mine.of)


def _changed(config: Any, place: str) -> Mapping[str, Any]:
    """What vLLM was told to do otherwise than the model's files say."""
    model, found = config.model_config, engine_facts(place)
    told = {
        **overrides_of(config),
        "quantization": None if "quantization_config" in found else model.quantization,
        "max_model_len": int(model.max_model_len) if depends_on_length(found) else None,
        "hf_config_path": getattr(model, "hf_config_path", None),
    }
    return {name: value if isinstance(value, (int, Mapping)) else str(value) for name, value in told.items() if value}

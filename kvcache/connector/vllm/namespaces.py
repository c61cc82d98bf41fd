"""The namespaces that requests are bound to, and the identity of a model that other engines share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from kvcache.block.hf import engine_facts
from kvcache.block.revision import WEIGHT_SUFFIXES, loader_kinds
from kvcache.block.shared_namespace import shared_identity, shared_layout
from kvcache.cache.api import KVCache, NamespaceHandle
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.events import KVEventPublisher
from kvcache.connector.vllm.identity import (
    NamespaceKey,
    depends_on_length,
    load_format,
    model_overrides,
    read_every_byte,
    weights_path,
)
from kvcache.connector.vllm.kv_layout import ModelIdentity, Rank

# The most recent namespaces only, since callers choose tenants and salts.

MAX_NAMESPACES = 1024


class Namespaces:
    def __init__(self, events: KVEventPublisher | None = None, most: int = MAX_NAMESPACES) -> None:
        """`events`, where given, follows each namespace."""
        self._events, self._most = events, most
        self._handles: OrderedDict[NamespaceKey, NamespaceHandle] = OrderedDict()

    def __len__(self) -> int:
        return len(self._handles)

    def get(self, namespace_key: NamespaceKey) -> NamespaceHandle | None:
        return self._handles.get(namespace_key)

    def bind(
        self, model: ModelIdentity, cache: KVCache, namespace_key: NamespaceKey, rank: Rank | None = None
    ) -> NamespaceHandle:
        """Return the namespace of a key, bound on first use. `rank` is the same in each call.

        Raises:
            KVCacheError: the cache, or the daemon behind it, refuses the namespace.
        """
        handle = self._handles.get(namespace_key)
        if handle is not None:
            self._handles.move_to_end(namespace_key)
            return handle
        handle = self._handles[namespace_key] = model.bind(cache, namespace_key, rank)
        if self._events is not None:
            self._events.subscribe(model, handle)
        while len(self._handles) > self._most:
            _, oldest = self._handles.popitem(last=False)
            if self._events is not None:
                self._events.unsubscribe(oldest)
        return handle

    def clear(self) -> None:
        self._handles.clear()


def share_model(config: Any, options: Options, mine: ModelIdentity) -> ModelIdentity:
    """Return the model under the name that every engine uses.

    Raises:
        LayoutError: no other engine can read its blocks (vLLM packs them on a CPU).
        ModelError: its configuration is not on this machine.
    """
    layout, folder = shared_layout(mine.layout), weights_path(config)
    dtype = getattr(config.model_config, "dtype", None)
    same = shared_identity(
        folder,
        model=options.model,
        revision=options.revision,
        changed=_config_overrides(config, folder),
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        kinds=WEIGHT_SUFFIXES if options.revision else loader_kinds(load_format(config)),
        read_every_byte=read_every_byte(options),
    )
    return ModelIdentity(same.model, same.revision, same.facts, layout, mine.shards, mine.vllm_groups)


def _config_overrides(config: Any, folder: str) -> Mapping[str, Any]:
    """Return vLLM's options that change what the model's files say."""
    model, file_facts = config.model_config, engine_facts(folder)
    overrides = {
        **model_overrides(config),
        "quantization": None if "quantization_config" in file_facts else model.quantization,
        "max_model_len": int(model.max_model_len) if depends_on_length(file_facts) else None,
        "hf_config_path": getattr(model, "hf_config_path", None),
    }
    return {
        name: value if isinstance(value, (int, Mapping)) else str(value) for name, value in overrides.items() if value
    }

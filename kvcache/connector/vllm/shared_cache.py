"""One cache for each engine: shared by both roles in one process, else owned by a daemon.

This module imports nothing of vLLM, so the tier below its offloading uses it without vLLM's base classes.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import kvcache
from kvcache.cache.api import KVCache
from kvcache.connector.vllm.config import Options, TierOptions
from kvcache.connector.vllm.observe_mode import ObserveMode
from kvcache.daemon.client.autostart import find_or_start

HOST_BYTES = "1GiB"
"""Host memory of the cache below vLLM's own offloading, unless a setting says otherwise. Records only pass through it,
since vLLM's host memory already holds the recent ones."""

_lock = threading.Lock()
_open_caches: dict[str, tuple[KVCache | ObserveMode, int]] = {}  # engine id: its cache, number of roles using it


class SharedCache:
    """One role's reference to the cache of its engine. Closing the last reference closes the cache."""

    def __init__(self, engine_id: str, cache: KVCache | ObserveMode) -> None:
        self.cache, self._engine_id, self._held = cache, engine_id, True

    def close(self) -> None:
        with _lock:
            if not self._held:
                return
            self._held = False
            cache, users = _open_caches.pop(self._engine_id)
            if users > 1:
                _open_caches[self._engine_id] = (cache, users - 1)
                return
        cache.close()


def share_cache(config: Any, options: Options) -> SharedCache:
    """Return a reference to this engine's cache. The first role to call opens it."""
    engine_id = str(config.kv_transfer_config.engine_id)
    with _lock:
        cache, users = _open_caches.get(engine_id, (None, 0))
        if cache is None:
            cache = _open_cache(config, options)
        _open_caches[engine_id] = (cache, users + 1)
    return SharedCache(engine_id, cache)


def open_tier_cache(options: TierOptions) -> KVCache:
    """Open the cache below vLLM's own offloading. It is private to this process, unless `address` names a daemon."""
    if options.address is not None:
        return kvcache.open(options.address)
    return kvcache.open(options.config, **{"host": {"capacity_bytes": HOST_BYTES}, **options.settings})


def is_single_process(config: Any) -> bool:
    """Return whether the scheduler and the only worker share a process, with a single replica."""
    parallel = config.parallel_config
    replicas = getattr(parallel, "data_parallel_size", 1)
    return bool(parallel.world_size == replicas == 1 and parallel.distributed_executor_backend == "uni")


def engine_name(config: Any) -> str:
    """Return the engine id that all replicas share: vLLM appends `_dp` and a number to each replica's id."""
    return re.sub(r"_dp\d+$", "", str(config.kv_transfer_config.engine_id))


def _open_cache(config: Any, options: Options) -> KVCache | ObserveMode:
    if options.mode == "observe":
        return ObserveMode.of(options)
    if options.address is None and is_single_process(config):
        return kvcache.open(options.config, **options.settings)
    where = options.address or find_or_start(engine_name(config), options.config, **options.settings)
    return kvcache.open(where, engine=str(config.kv_transfer_config.engine_id))

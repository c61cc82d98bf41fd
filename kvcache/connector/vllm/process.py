"""The cache of an engine: one for both roles where they share a process, else a daemon between them."""

from __future__ import annotations

import re
import threading
from typing import Any

import kvcache
from kvcache.cache.api import KVCache
from kvcache.connector.vllm.options import Options, TierOptions
from kvcache.connector.vllm.trial import Trial
from kvcache.daemon.client.autostart import find_or_start

HOST_BYTES = "1GiB"
"""Our own host memory under vLLM's, where nobody sets it: what passes through, since what is near stands in vLLM's."""

_lock = threading.Lock()
_open: dict[str, tuple[KVCache | Trial, int]] = {}  # by engine: its cache, and how many roles use it


class Share:
    """One role's claim on the cache of its engine, which is closed when the last role lets go."""

    def __init__(self, engine_id: str, cache: KVCache | Trial) -> None:
        self.cache, self._engine_id, self._held = cache, engine_id, True

    def close(self) -> None:
        with _lock:
            if not self._held:
                return
            self._held = False
            cache, users = _open.pop(self._engine_id)
            if users > 1:
                _open[self._engine_id] = (cache, users - 1)
                return
        cache.close()


def share(config: Any, options: Options) -> Share:
    """The cache of this engine, opened by whichever role comes first."""
    engine_id = str(config.kv_transfer_config.engine_id)
    with _lock:
        cache, users = _open.get(engine_id, (None, 0))
        if cache is None:
            cache = _find(config, options)
        _open[engine_id] = (cache, users + 1)
    return Share(engine_id, cache)


def below(options: TierOptions) -> KVCache:
    """The cache under vLLM's own offloading: this process alone reaches it, unless it is a daemon's."""
    if options.address is not None:
        return kvcache.open(options.address)
    return kvcache.open(options.config, **{"host": {"capacity_bytes": HOST_BYTES}, **options.settings})


def one_process(config: Any) -> bool:
    """Whether the scheduler and the only worker live together, and no replica beside them."""
    parallel = config.parallel_config
    replicas = getattr(parallel, "data_parallel_size", 1)
    return bool(parallel.world_size == replicas == 1 and parallel.distributed_executor_backend == "uni")


def engine_name(config: Any) -> str:
    """The engine's, which its replicas share: vLLM numbers theirs."""
    return re.sub(r"_dp\d+$", "", str(config.kv_transfer_config.engine_id))


def _find(config: Any, options: Options) -> KVCache | Trial:
    if options.mode == "observe":
        return Trial.of(options)
    if options.address is None and one_process(config):
        return kvcache.open(options.config, **options.settings)
    where = options.address or find_or_start(engine_name(config), options.config, **options.settings)
    return kvcache.open(where, engine=str(config.kv_transfer_config.engine_id))

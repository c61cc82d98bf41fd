"""HiCache's storage backend: moves pages between SGLang's pools of host memory and the tiers.

A page is a block. Its name is SGLang's digest bound to a namespace, one for each pool; the shard identifies the rank.
Interfaces v1 and v2 move pages directly between the pool and the tiers; v0 uses flat tensors. A page of a model with
several pools counts as present only where all pools have it.

Thread safety: SGLang calls from two or three threads at once. Once attached no call raises, and none takes longer than
twice `deadline_s`, so that SGLang's own threads do not hang.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
    PoolTransferResult,
)

from kvcache.connector.guard import recover
from kvcache.connector.sglang.config import Options, close_cache, engine_name, identify_model, open_cache, run_detached
from kvcache.connector.sglang.host_pools import Ranks, describe_pool, is_logical
from kvcache.connector.sglang.pool_store import PoolStore, lengths_with_all_pages, lengths_with_last_pages
from kvcache.errors import LayoutError

_log = logging.getLogger("kvcache.sglang")


class KVCacheStorage(HiCacheStorage):  # type: ignore[misc]  # SGLang is imported without its types
    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        self._config = config = storage_config
        self._options = Options.read(config.extra_config)
        self._ranks = Ranks(config.tp_rank, config.tp_size, config.pp_rank, config.pp_size)
        served = _ServerArguments()
        self._identity = identify_model(served, config.model_name, self._options)
        self._pool_stores: dict[str, PoolStore | None] = {}
        self._transferred: dict[str, list[tuple[int, float]]] = {"in": [], "out": []}
        self._lock = threading.Lock()
        self.registered_pools: dict[Any, Any] = {}
        self.cache = open_cache(self._options, engine_name(served, self._ranks, self._options))

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        self._register(PoolName.KV, mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._register(host_pool_name, host_pool)

    def _register(self, name: Any, pool: Any) -> None:
        """Attach a pool; LayoutError where its pages cannot be described. SGLang then refuses to attach, and logs the
        reason."""
        if is_logical(pool):
            self._pool_stores[str(name)] = None
            return
        config, options = self._config, self._options
        ranks = self._ranks
        if config.is_mla_model and str(name) != PoolName.MAMBA.value:  # the same on each rank, written by the first
            ranks = Ranks(0, 1, ranks.pp_rank, ranks.pp_size)
        described = describe_pool(pool, ranks, canonical=options.share_across_engines)
        flat = not (config.extra_config or {}).get("interface_v1")
        if flat and str(name) == PoolName.KV.value and described.layout.groups[0].kind == "opaque":
            raise LayoutError(
                f"{type(pool).__name__}: only SGLang itself can read its flat pages; "
                'give "interface_v1": 1 in the extra configuration'
            )
        facts = self._identity.facts_of(str(name), str(getattr(pool, "storage_format_tag", None) or ""))
        if config.attn_cp_size > 1 or config.dcp_size > 1:
            facts["context_parallel"] = [config.attn_cp_size, config.attn_cp_rank, config.dcp_size, config.dcp_rank]
        handle = self.cache.namespace(
            described.layout,
            model=self._identity.model,
            revision=self._identity.revision,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            facts=facts,
            shards=described.shards,
        )
        self._pool_stores[str(name)] = PoolStore(handle, described, options.deadline_s)

    # Lookups

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    def batch_exists(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None) -> int:
        return self._leading(keys, extra_info, self._call_deadline())

    def _leading(self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None, until: float) -> int:
        pool_store = self._pool_stores[PoolName.KV.value]
        return len(keys) if pool_store is None else pool_store.match_prefix(keys, _prefix_keys(extra_info), until)

    def _call_deadline(self) -> float:
        """Return the deadline of a call that begins now, over any number of pools."""
        return time.monotonic() + self._options.deadline_s

    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        until = self._call_deadline()
        kv = self._leading(keys, extra_info, until)
        hits: dict[str, int] = {PoolName.KV: kv} if kv else {}
        restorable = set(range(1, kv + 1))
        for transfer in pool_transfers or ():
            if not restorable:
                break
            if transfer.hit_policy == PoolHitPolicy.BLOCK_GROUPS:
                continue  # never decides; SGLang reads no result for it
            pool_store = self._pool_stores.get(str(transfer.name))
            counts = str(transfer.name) in self._pool_stores  # a pool without a store has no memory of its own
            counts_by_page = pool_store.present(keys[:kv], until) if pool_store is not None else [counts] * kv
            if transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                lengths = lengths_with_last_pages(counts_by_page, max(1, len(transfer.keys or ())))
            else:
                lengths = lengths_with_all_pages(counts_by_page)
            if lengths:
                hits[transfer.name] = max(lengths)
            restorable &= lengths
        return PoolTransferResult(max(restorable, default=0), hits, sorted(restorable))

    # Transfers between SGLang's pools and the tiers

    def batch_get_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._move(PoolName.KV, keys, host_indices, extra_info, self._call_deadline(), is_load=True)

    def batch_set_v1(
        self, keys: list[str], host_indices: torch.Tensor, extra_info: HiCacheStorageExtraInfo | None = None
    ) -> list[bool]:
        return self._move(PoolName.KV, keys, host_indices, extra_info, self._call_deadline(), is_load=False)

    def batch_get_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._move_all(transfers, extra_info, is_load=True)

    def batch_set_v2(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> dict[str, list[bool]]:
        return self._move_all(transfers, extra_info, is_load=False)

    def _move_all(
        self, transfers: list[PoolTransfer], extra_info: HiCacheStorageExtraInfo | None, *, is_load: bool
    ) -> dict[str, list[bool]]:
        until = self._call_deadline()
        return {
            t.name: self._move(t.name, t.keys or [], t.host_indices, extra_info, until, is_load=is_load)
            for t in transfers
        }

    def _move(
        self,
        name: Any,
        keys: Sequence[str],
        host_indices: torch.Tensor | None,
        extra_info: HiCacheStorageExtraInfo | None,
        until: float,
        *,
        is_load: bool,
    ) -> list[bool]:
        if str(name) not in self._pool_stores:
            return [False] * len(keys)
        pool_store = self._pool_stores[str(name)]
        if pool_store is None or not keys:
            return [True] * len(keys)
        tokens = pool_store.described.page_tokens
        if host_indices is None or host_indices.numel() != len(keys) * tokens:
            found = 0 if host_indices is None else host_indices.numel()
            _log.error("%s: %d host indices for %d pages of %d tokens; not moved", name, found, len(keys), tokens)
            return [False] * len(keys)
        page_ids = [index // tokens for index in host_indices[::tokens].tolist()]
        # Only the first pool's pages form a chain: of the others any page may be stored without the one before.
        before = _prefix_keys(extra_info) if str(name) == PoolName.KV.value else None
        work = pool_store.load if is_load else pool_store.store
        return self._timed("in" if is_load else "out", pool_store, lambda: work(keys, page_ids, before, until=until))

    # v0: flat tensors

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> torch.Tensor | None:
        return self.batch_get([key], None if target_location is None else [target_location])[0]

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Return the targets, filled; without targets, new tensors of the pool's type."""
        pool_store = self._pool_stores[PoolName.KV.value]
        if pool_store is None or not keys:
            return [None] * len(keys)
        flat = torch.empty((len(keys), pool_store.described.page_bytes), dtype=torch.uint8)
        pages = pool_store.described.flat(flat, len(keys))
        came = self._timed("in", pool_store, lambda: pool_store.load(keys, range(len(keys)), None, pages))
        made: list[torch.Tensor | None] = []
        for i, loaded in enumerate(came):
            if not loaded:
                made.append(None)
            elif target_locations is None:
                made.append(flat[i].view(self.mem_pool_host.dtype))
            else:
                target_locations[i].view(torch.uint8).view(-1).copy_(flat[i])
                made.append(target_locations[i])
        return made

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return self.batch_set([key], [value])

    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pool_store = self._pool_stores[PoolName.KV.value]
        if pool_store is None or not keys:
            return True
        flat = torch.stack([value.contiguous().view(torch.uint8).view(-1) for value in values])
        pages = pool_store.described.flat(flat, len(keys))
        return all(self._timed("out", pool_store, lambda: pool_store.store(keys, range(len(keys)), None, pages)))

    # Statistics, clear, close

    def _timed(self, direction: str, pool_store: PoolStore, work: Callable[[], list[bool]]) -> list[bool]:
        start = time.monotonic()
        moved = work()
        if self._config.enable_storage_metrics:
            seconds = max(1e-9, time.monotonic() - start)
            with self._lock:
                self._transferred[direction].append(
                    (sum(moved), sum(moved) * pool_store.described.page_bytes / seconds / 1e9)
                )
        return moved

    def get_stats(self) -> Any:
        """Return the transfers since the last call, in pages and GB/s; None where SGLang keeps no metrics."""
        if not self._config.enable_storage_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        with self._lock:
            moved, self._transferred = self._transferred, {"in": [], "out": []}
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in moved["in"]],
            prefetch_bandwidth=[rate for _, rate in moved["in"]],
            backup_pgs=[pages for pages, _ in moved["out"]],
            backup_bandwidth=[rate for _, rate in moved["out"]],
        )

    def clear(self) -> None:
        """Erase what this server's pools have stored, and what other servers of the same model have."""
        run_detached(self._clear, "clearing")

    def _clear(self) -> None:
        for pool_store in self._pool_stores.values():
            if pool_store is not None:
                _log.info("cleared %d records", pool_store.handle.clear())

    def close(self) -> None:
        close_cache(self.cache)


def _prefix_keys(extra_info: HiCacheStorageExtraInfo | None) -> list[str] | None:
    """Return the pages before a call's first; None where SGLang does not pass them
    (hicache_storage_pass_prefix_keys)."""
    return extra_info.prefix_keys if extra_info is not None else None


class _ServerArguments:
    """The server's arguments as SGLang resolved them, where there is a server."""

    def __getattr__(self, name: str) -> Any:
        from sglang.srt.runtime_context import get_context

        # None where it is not published, or not under that name
        return recover(lambda: get_context().config_leaf(name), lambda error: None)

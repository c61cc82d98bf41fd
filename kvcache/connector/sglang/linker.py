"""The unified cache linker: moves device pages directly to and from the host tier, without SGLang's host pool.

A lookup promises only pages that `LookupLeases` holds, since a failed load is an error to SGLang. Loads begin with a
batch and report each layer. Computed pages are stored in the background, in order.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvcache.cache.api import NamespaceHandle, Request, Transfer
from kvcache.connector.guard import call_guarded, log_once
from kvcache.connector.sglang.config import Options, close_cache, engine_name, identify_model, open_cache
from kvcache.connector.sglang.device_pools import KV, DevicePool, device_pools
from kvcache.connector.sglang.host_pools import Ranks
from kvcache.connector.sglang.lookup_leases import LookupLeases, RankConsensus
from kvcache.connector.sglang.pool_store import release
from kvcache.errors import ConfigError, LayoutError
from kvcache.tier.tier import Outcome


class _PoolPages(NamedTuple):
    """Pages of one pool."""

    pool: DevicePool
    keys: list[str]
    page_ids: list[int]


class _QueuedLoad(NamedTuple):
    parts: list[_PoolPages]
    requests: dict[str, Request]  # by pool


class _QueuedOffload(NamedTuple):
    parts: list[_PoolPages]
    ready: Sequence[Any]  # events of the device
    generation: int


class KVCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]  # SGLang is imported without its types
    def __init__(
        self,
        server_args: Any,
        params: Any,
        *,
        components: Iterable[Any] = (),
        extra_config: dict[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        options = Options.read(extra_config)
        for name in ("pp_size", "attn_cp_size"):
            count = getattr(params, name, 1)
            if count > 1:
                raise ConfigError(
                    f"{name} = {count}: only tensor ranks can agree on a linker's lookups; use the storage backend"
                )
        self._consensus = RankConsensus.of(params)
        ranks = Ranks(self._consensus.rank, self._consensus.size)
        try:
            device = device_pools(params, tuple(components or ()), ranks)
        except LayoutError as error:
            raise ConfigError(f"the linker does not support this model's pages: {error}") from None
        self._pools = {pool.name: pool for pool in device.all}
        if options.share_across_engines and set(self._pools) != {KV}:
            raise ConfigError(
                f"pools {', '.join(self._pools)}: other engines do not read them; set share_across_engines = false"
            )
        self._stores = ranks.tp_rank == 0 or not device.replicated
        self.forward_stream = forward_stream
        self.pools = {PoolName(name): pool.described.owner for name, pool in self._pools.items()}
        self.cache = open_cache(options, engine_name(server_args, ranks, options))
        identity = identify_model(server_args, None, options)
        self._handles: dict[str, NamespaceHandle] = {
            name: self.cache.namespace(
                pool.described.layout,
                model=identity.model,
                revision=identity.revision,
                tenant=options.tenant,
                cache_salt=options.cache_salt,
                facts=identity.facts_of(name, pool.form),
                shards=pool.described.shards,
            )
            for name, pool in self._pools.items()
        }
        self._deadline_s = options.deadline_s
        self._leases = LookupLeases(self._handles, options.lookup_wait_s)
        self._layers = device.layers
        self.layer_done_counter = LayerWiseLoadCounter(self._layers)
        if PoolName.MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._queued: dict[str, _QueuedLoad] = {}
        self._completed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._offloads: queue.Queue[_QueuedOffload | None] = queue.Queue()
        self._generation = 0  # counts resets; a store from before a reset is not reported after it
        self._loading: list[threading.Thread] = []
        self._storing = threading.Thread(target=self._store_all, name="kvcache-offload", daemon=True)
        self._storing.start()

    # Loads

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Return every length at which all pools are in host memory, verified and held. Waits `lookup_wait_s` at
        most."""

        def lengths() -> list[int]:
            by_source = {str(transfer.name): transfer for transfer in transfers}
            last = {
                name: len(by_source[pool.source].keys or ())
                for name, pool in self._pools.items()
                if by_source[pool.source].hit_policy == PoolHitPolicy.TRAILING_PAGES
            }
            return self._leases.loadable_lengths(rid, by_source[KV].keys or [], last)

        return call_guarded([], lengths)

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """Return whether the promised pages can be loaded. All ranks return the same: False if any rank has lost a
        page, and SGLang computes."""

        def claim() -> tuple[list[_PoolPages], dict[str, Request] | None]:
            parts = self._parts(transfers)
            return parts, self._leases.claim(rid, {part.pool.name: part.keys for part in parts})

        parts, requests = call_guarded(([], None), claim)
        if not self._consensus.all_agree(requests is not None):
            release((requests or {}).values())
            return False
        assert requests is not None, "this rank is one of them"
        self._queued[rid] = _QueuedLoad(parts, requests)
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        thread = threading.Thread(target=self._load_all, args=(index, loads), name="kvcache-load", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the system has no thread left
            log_once("a load keeps the scheduler", error)
            self._load_all(index, loads)
        else:
            self._loading = [*(each for each in self._loading if each.is_alive()), thread]
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        self._leases.cancel(rid)
        load = self._queued.pop(rid, None)
        if load is not None:
            release(load.requests.values())
        return load is not None

    def _load_all(self, index: int, loads: Sequence[_QueuedLoad]) -> None:
        """Report each layer once it is loaded, and the last one only once all pages have arrived. Pools that do not
        load layer by layer load before the first layer."""
        until = time.monotonic() + self._deadline_s
        under_way: list[tuple[_PoolPages, Transfer]] = []
        try:
            for load in loads:
                for part in load.parts:
                    described = part.pool.described
                    ids = [part.page_ids] * len(described.pages)
                    request = load.requests[part.pool.name]
                    under_way.append((part, request.load(len(part.keys), described.pages, ids)))
            for part, transfer in under_way:
                if not part.pool.layers:
                    self._came(part, transfer, until)
            for layer in range(self._layers):
                for part, transfer in under_way:
                    if layer in part.pool.layers:
                        transfer.wait_layer(part.pool.layers[layer], max(0.0, until - time.monotonic()))
                    if layer == self._layers - 1 or transfer.done:
                        self._came(part, transfer, until)
                self.layer_done_counter.complete(index, layer)
        except Exception as error:  # noqa: BLE001  worker thread that must survive; SGLang takes the error from the counter
            log_once("load failed; SGLang fails its requests", error)
            until = time.monotonic() + self._deadline_s
            for _, transfer in under_way:
                self._stop(transfer, until)  # the pages are assigned to others afterwards
            self.layer_done_counter.fail(index, error)
        finally:
            for load in loads:
                release(load.requests.values())

    def _came(self, part: _PoolPages, transfer: Transfer, until: float) -> None:
        if not transfer.wait(max(0.0, until - time.monotonic())):
            raise TimeoutError(f"a load exceeded its deadline of {self._deadline_s} s")
        if transfer.blocks < len(part.keys):
            raise LookupError(
                f"pool {part.pool.name}: {transfer.blocks} of {len(part.keys)} promised pages were loaded"
            )

    @staticmethod
    def _stop(transfer: Transfer, until: float) -> None:
        # the layers' waiters must get the load's own error in any case
        call_guarded(None, transfer.cancel)
        call_guarded(False, transfer.wait, max(0.0, until - time.monotonic()))

    # Stores

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        def queue() -> bool:
            parts = self._parts(transfers) if self._stores else []
            self._offloads.put(_QueuedOffload(parts, self.record_offload_ready(), self._generation))
            return True

        return call_guarded(False, queue)

    def num_completed_offloads(self) -> int:
        return self._completed.qsize()

    def pop_completed_offload(self) -> bool:
        return self._completed.get_nowait()

    def _store_all(self) -> None:
        while (work := self._offloads.get()) is not None:
            kept = call_guarded(False, self._store, work)
            if work.generation == self._generation:
                self._completed.put(kept)
            self._offloads.task_done()
        self._offloads.task_done()  # for the entry that ends the thread

    def _store(self, work: _QueuedOffload) -> bool:
        for event in work.ready:
            event.synchronize()
        until = time.monotonic() + self._deadline_s
        kept = [self._store_part(part, until) for part in work.parts]
        return all(kept)

    def _store_part(self, part: _PoolPages, until: float) -> bool:
        described = part.pool.described
        with self._handles[part.pool.name].request() as request:
            request.match(digests=[bytes.fromhex(key) for key in part.keys], after=b"")
            transfer = request.store(described.pages, [part.page_ids] * len(described.pages))
            if not transfer.wait(max(0.0, until - time.monotonic())):
                self._stop(transfer, until + self._deadline_s)
            return all(outcome is Outcome.DONE for outcome in transfer.outcomes)

    def _parts(self, transfers: Sequence[PoolTransfer]) -> list[_PoolPages]:
        """Return the pages of these transfers by pool, without the pools that SGLang names nothing of."""
        by_source = {str(transfer.name): transfer for transfer in transfers}
        parts = []
        for pool in self._pools.values():
            transfer = by_source.get(pool.source)
            if transfer is None or not transfer.keys:
                continue
            assert transfer.device_indices is not None, "a load and a store name their places"
            tokens, places = pool.described.page_tokens, pool.translate(transfer.device_indices)
            parts.append(
                _PoolPages(pool, list(transfer.keys), [place // tokens for place in places[::tokens].tolist()])
            )
        return parts

    # Reset and close

    def reset(self) -> None:
        """Stop all transfers: afterwards nothing reads or writes device pages. Stores that miss the deadline are
        dropped."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._leases.clear()
        until = time.monotonic() + self._deadline_s
        for thread in self._loading:
            thread.join(max(0.0, until + self._deadline_s - time.monotonic()))
        if not self._idle(until):
            self._forget_offloads()
            self._idle(time.monotonic() + 2 * self._deadline_s)  # running transfers end within that time
        self._generation += 1
        while self._completed.qsize():
            self._completed.get_nowait()
        self.layer_done_counter.reset()

    def _idle(self, until: float) -> bool:
        """Wait until all stores have ended; return False on a timeout."""
        work = self._offloads
        with work.all_tasks_done:
            return work.all_tasks_done.wait_for(lambda: not work.unfinished_tasks, max(0.0, until - time.monotonic()))

    def _forget_offloads(self) -> None:
        with suppress(queue.Empty):
            while True:
                self._offloads.get_nowait()
                self._offloads.task_done()

    def close(self) -> None:
        self.reset()
        self._offloads.put(None)
        self._storing.join(self._deadline_s)
        close_cache(self.cache)

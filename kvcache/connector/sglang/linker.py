"""The unified cache linker: device pages straight to and from our host tier, without SGLang's own.

A lookup promises only what `Promises` can keep, since a load that fails is an error to SGLang. Loads begin when a batch
does, and are told layer by layer; what is computed is stored in the background, in order.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter, UnifiedCacheLinker

from kvcache.connector.sglang.device import describe_device
from kvcache.connector.sglang.identity import identify
from kvcache.connector.sglang.opening import close_cache, open_cache
from kvcache.connector.sglang.pool import Ranks
from kvcache.connector.sglang.promises import Promises
from kvcache.connector.sglang.wishes import Wishes
from kvcache.errors import ConfigError
from kvcache.hierarchy.face import Request, Transfer
from kvcache.tier.tier import Outcome

_log = logging.getLogger("kvcache.sglang")


class _Load(NamedTuple):
    request: Request
    page_ids: list[int]


class _Offload(NamedTuple):
    keys: list[str]
    page_ids: list[int]
    ready: Sequence[Any]  # events of the device


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
        other = set(components or ()) - {ComponentType.FULL}
        if other:
            names = ", ".join(sorted(component.name for component in other))
            raise ConfigError(f"components {names}: this linker keeps full attention only; use the storage backend")
        wishes = Wishes.read(extra_config)
        ranks = Ranks(tp_size=getattr(server_args, "tp_size", 1), pp_size=getattr(server_args, "pp_size", 1))
        if not ranks.alone:
            raise ConfigError(
                f"tp_size = {ranks.tp_size}, pp_size = {ranks.pp_size}: this linker serves one rank, since a promise "
                "has to hold on all of them; use the storage backend"
            )
        pool = params.token_to_kv_pool_allocator.get_kvcache()
        self.forward_stream = forward_stream
        self.pools = {PoolName.KV: pool}
        self.cache = open_cache(wishes)
        self._described = describe_device(pool, params.page_size, ranks)
        identity = identify(server_args, None, wishes)
        bound = self.cache.namespace(
            self._described.layout,
            model=identity.model,
            revision=identity.revision,
            tenant=wishes.tenant,
            cache_salt=wishes.cache_salt,
            facts=identity.facts_of(PoolName.KV.value, ""),
            shards=self._described.shards,
        )
        self._bound, self._deadline_s = bound, wishes.deadline_s
        self._promises = Promises(bound, wishes.lookup_wait_s)
        self._layers = self._described.shards[0].layers
        self.layer_done_counter = LayerWiseLoadCounter(self._layers)
        self._queued: dict[str, _Load] = {}
        self._completed: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._offloads: queue.Queue[_Offload | None] = queue.Queue()
        self._loading: list[threading.Thread] = []
        self._storing = threading.Thread(target=self._store_all, name="kvcache-offload", daemon=True)
        self._storing.start()

    # --- from the cache ------------------------------------------------------------------------------------------

    def lookup(self, rid: str, transfers: list[PoolTransfer]) -> list[int]:
        """Every length up to what is in host memory, verified and held. Waits `lookup_wait_s` at most."""
        keys = _of(transfers).keys or []
        try:
            return list(range(1, self._promises.pages(rid, keys) + 1))
        except Exception:  # noqa: BLE001  law: never in the way
            _log.exception("a lookup failed; it is a miss")
            return []

    def load(self, rid: str, transfers: list[PoolTransfer]) -> bool:
        """False, and SGLang computes, where what was promised is gone all the same."""
        transfer = _of(transfers)
        try:
            request = self._promises.take(rid, transfer.keys or [])
        except Exception:  # noqa: BLE001  law: never in the way
            _log.exception("a load was refused")
            return False
        if request is None:
            return False
        self._queued[rid] = _Load(request, self._page_ids(transfer))
        return True

    def start_layer_wise_loading(self) -> int:
        if not self._queued:
            return -1
        loads, self._queued = list(self._queued.values()), {}
        index: int = self.layer_done_counter.update_producer()
        thread = threading.Thread(target=self._load_all, args=(index, loads), name="kvcache-load", daemon=True)
        self._loading = [*(each for each in self._loading if each.is_alive()), thread]
        thread.start()
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return bool(self.layer_done_counter.finish(counter_index))

    def cancel_queued_load(self, rid: str) -> bool:
        self._promises.give_up(rid)
        load = self._queued.pop(rid, None)
        if load is not None:
            load.request.close()
        return load is not None

    def _load_all(self, index: int, loads: Sequence[_Load]) -> None:
        """Tell each layer once it is there; the last one only once all of it is known to have come."""
        until = time.monotonic() + self._deadline_s
        transfers: list[tuple[Transfer, int]] = []
        try:
            for load in loads:
                count = len(load.page_ids)
                transfers.append((load.request.load(count, self._described.pages, [load.page_ids]), count))
            for layer in range(self._layers):
                for transfer, count in transfers:
                    transfer.wait_layer(layer, max(0.0, until - time.monotonic()))
                    if layer == self._layers - 1 and not transfer.wait(max(0.0, until - time.monotonic())):
                        raise TimeoutError(f"a load took longer than {self._deadline_s} s")
                    if transfer.done and transfer.blocks < count:
                        raise LookupError(f"{transfer.blocks} of {count} promised pages came")
                self.layer_done_counter.complete(index, layer)
        except Exception as error:  # noqa: BLE001  SGLang takes it from the counter
            _log.warning("a load failed: %s", error)
            for transfer, _ in transfers:
                transfer.cancel()
                transfer.wait(self._deadline_s)  # the pages are given to others afterwards
            self.layer_done_counter.fail(index, error)
        finally:
            for load in loads:
                load.request.close()

    # --- to the cache --------------------------------------------------------------------------------------------

    def offload(self, transfers: list[PoolTransfer], session_id: str | None = None) -> bool:
        transfer = _of(transfers)
        self._offloads.put(_Offload(list(transfer.keys or []), self._page_ids(transfer), self.record_offload_ready()))
        return True

    def num_completed_offloads(self) -> int:
        return self._completed.qsize()

    def pop_completed_offload(self) -> bool:
        return self._completed.get_nowait()

    def _store_all(self) -> None:
        while (work := self._offloads.get()) is not None:
            try:
                kept = self._store(work)
            except Exception:  # noqa: BLE001  law: never in the way
                _log.exception("a store failed; its pages are not kept")
                kept = False
            self._completed.put(kept)
            self._offloads.task_done()

    def _store(self, work: _Offload) -> bool:
        for event in work.ready:
            event.synchronize()
        with self._bound.request() as request:
            request.match(digests=[bytes.fromhex(key) for key in work.keys], after=b"")
            transfer = request.store(self._described.pages, [work.page_ids])
            if not transfer.wait(self._deadline_s):
                transfer.cancel()
                transfer.wait(self._deadline_s)
            return all(outcome is Outcome.DONE for outcome in transfer.outcomes)

    def _page_ids(self, transfer: PoolTransfer) -> list[int]:
        """Of whole pages, each by its first token's place."""
        tokens = self._described.page_tokens
        assert transfer.device_indices is not None, "a load and a store name their places"
        return [place // tokens for place in transfer.device_indices[::tokens].tolist()]

    # --- the rest ------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Afterwards nothing reads or writes device pages."""
        for rid in list(self._queued):
            self.cancel_queued_load(rid)
        self._promises.clear()
        for thread in self._loading:
            thread.join(2 * self._deadline_s)
        self._offloads.join()
        while self._completed.qsize():
            self._completed.get_nowait()
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.reset()
        self._offloads.put(None)
        self._storing.join(self._deadline_s)
        close_cache(self.cache)


def _of(transfers: Sequence[PoolTransfer]) -> PoolTransfer:
    """The only pool that this linker has."""
    return next(transfer for transfer in transfers if transfer.name == PoolName.KV)

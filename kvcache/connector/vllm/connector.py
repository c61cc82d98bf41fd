"""`KVCacheConnector`, the class that vLLM loads, and the cache that both of its roles share.

    vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVCacheConnector",
        "kv_connector_module_path":"kvcache.connector.vllm","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'

vLLM creates one connector in the scheduler's process and one in each worker's. This class only forwards each hook to
the side that it was created as: `ConnectorScheduler` (scheduler.py) or `ConnectorWorker` (worker.py). The scheduler
matches prompts, and names the blocks to load and to store. The worker of each rank copies blocks between its pages and
the cache. The scheduler sends its decisions with each step (metadata.py); a rank sends the shapes of its pages once.

The life of a request:

1. `get_num_new_matched_tokens` matches the prompt. A pending lookup returns None, and vLLM asks again in the next step.
2. `update_state_after_alloc` queues the load into the pages that vLLM allocated.
3. `start_load_kv` begins the loads of a step, on every rank.
4. `wait_for_save` stores the blocks that the step filled.
5. `get_finished` or `get_transfer_results` reports the loads that ended, and `update_connector_output` hands them to
   the scheduler.
6. `request_finished` closes the request. Pages are never held back for a store.

Alternatives. vLLM's own offloading keeps blocks in host memory and can use this cache as a secondary tier (tier.py). A
secondary tier sees opaque chunks only: other vLLM versions, layouts and numbers of ranks do not find them. The
connector describes the layout of the pages (kv_layout.py), so plain blocks do not depend on vLLM's version. Storing
layer by layer (`save_kv_layer`) is not used, because a block is stored whole, after the step.

One cache an engine. Scheduler and only worker of one process share a cache (`SharedCache`). An engine of several
processes connects to a daemon: the one in `address`, or one that the first process starts.

Invariants:

- A cache fault never fails a request. Hooks are guarded (guard.py), and an exception reads as an empty cache. Only the
  start raises: for an unsupported configuration, invalid options, or a cache that cannot be opened. The scheduler sets
  `kv_load_failure_policy` to `recompute`, since vLLM would fail a request whose blocks were not loaded.
- A page is not overwritten while a store reads it. `handle_preemptions` waits for stores that read pages which the step
  assigns. After `STORE_WAIT_S` the store is cancelled, and its running copy is awaited for up to `COPY_TIMEOUT_S`.
- A request whose load failed stores nothing until the scheduler has acknowledged the failure.
- Blocks are found again only under the same identity: model, weights, layout, adapter, tenant, and the origin of the
  digests (identity.py, namespaces.py). A reset begins a new namespace.

Threads. vLLM calls every hook on the engine's own thread of that process. Two more threads read from the cache:
`kvcache-stats` (stats.py) and `kvcache-events` (events.py). The table of open caches
(shared_cache.py) has a lock; nothing else here is shared between threads.

To change it: a new hook is forwarded here and implemented on one side. A new vLLM version belongs in version.py and,
for new tensor shapes, in kv_layout.py. A field that crosses processes belongs in metadata.py.
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from kvcache.connector.guard import call_guarded, guarded, recover
from kvcache.connector.vllm.config import Options, parse_options, reject_unsupported, uncached_reason
from kvcache.connector.vllm.kv_layout import LayerGroup, describe_layers
from kvcache.connector.vllm.metadata import ConnectorMetadata, HandshakeMetadata, WorkerMetadata
from kvcache.connector.vllm.scheduler import ConnectorScheduler
from kvcache.connector.vllm.shared_cache import (
    share_cache,
)
from kvcache.connector.vllm.stats import ConnectorStats, PrometheusMetrics, StatsSampler
from kvcache.connector.vllm.version import KVConnectorTransferResults, hit_source
from kvcache.connector.vllm.worker import ConnectorWorker
from kvcache.errors import LayoutError

_log = logging.getLogger("kvcache.connector.vllm")


class KVCacheConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        reject_unsupported(vllm_config)
        self._options = parse_options(vllm_config.kv_transfer_config.kv_connector_extra_config, Options)
        self._kv_config = kv_cache_config
        self._share = share_cache(vllm_config, self._options)
        self._handshake: HandshakeMetadata | None = None
        self._handshake_sent = False
        disabled_reason = uncached_reason(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._recompute(vllm_config.kv_transfer_config)
            self._scheduler = ConnectorScheduler(
                vllm_config, kv_cache_config, self._options, self._share.cache, disabled_reason=disabled_reason
            )
            self._sampler = StatsSampler(self._share.cache, self._scheduler.uncached.counters)
            if disabled_reason:
                _log.warning("caching is off: %s", disabled_reason)
        else:
            self._disabled_reason = disabled_reason
            self._worker = ConnectorWorker(
                self._options,
                self._share.cache,
                _rank(vllm_config),
                groups=len(kv_cache_config.kv_cache_groups),
                blocks=kv_cache_config.num_blocks,
            )

    @staticmethod
    def _recompute(config: Any) -> None:
        """Make vLLM recompute blocks that were not loaded, instead of failing the request."""
        if config.kv_load_failure_policy != "recompute":
            config.kv_load_failure_policy = "recompute"
            _log.info("kv_load_failure_policy is set to recompute: blocks that do not load are computed")

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # Worker hooks

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        def refuse(error: Exception) -> None:
            reason = str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
            _log.error("caching is off on this rank: %s", reason)
            self._handshake = HandshakeMetadata(refusal=reason)

        def describe() -> tuple[LayerGroup, ...]:
            groups, packing = self._kv_config.kv_cache_groups, _packing(self._vllm_config)
            return describe_layers(kv_caches, groups, self._kv_config.num_blocks, packing=packing)

        shapes = recover(describe, refuse)
        if shapes is None:
            return
        replicas = getattr(self._kv_config, "kv_tp_replicas", 1)
        self._worker.register(kv_caches, shapes)
        self._handshake = HandshakeMetadata(shapes, replicas)

    def get_handshake_metadata(self) -> HandshakeMetadata | None:
        self._handshake_sent = self._handshake is not None
        return self._handshake

    @guarded()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, ConnectorMetadata):
            self._worker.begin(kv_connector_metadata)

    @guarded()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        message = self._message()
        if message.loads:
            self._worker.load(message, wait=message.wait, by_layer=message.by_layer)

    @guarded()
    def wait_for_layer_load(self, layer_name: str) -> None:
        self._worker.wait_for_layer(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Do nothing: blocks are stored whole, after the step."""

    @guarded()
    def wait_for_save(self) -> None:
        message = self._message()
        self._worker.wait_for_loads()
        self._worker.store(message)

    @guarded((None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._worker.results(idle=self._message().idle)
        return None, results.arrived or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._worker.results(idle=self._message().idle)
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=results.arrived, failed_recving=results.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._worker.take_invalid_pages()

    def build_connector_worker_meta(self) -> WorkerMetadata | None:
        if self._handshake_sent or self._handshake is None:
            return None
        self._handshake_sent = True
        return WorkerMetadata({_rank(self._vllm_config): self._handshake})

    def _message(self) -> ConnectorMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ConnectorMetadata)
        return metadata

    # Scheduler hooks

    @guarded()
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduler.add_ranks(
            {rank: handshake for rank, handshake in metadata.items() if isinstance(handshake, HandshakeMetadata)}
        )

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): handshake for rank, handshake in metadata.items()})

    @guarded((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduler.match_tokens(request, num_computed_tokens)

    @guarded()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduler.on_allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        sources: dict[Any, int] = {}
        for tier, tokens in call_guarded({}, self._scheduler.sources, request, num_external_tokens).items():
            source = hit_source(tier)
            sources[source] = sources.get(source, 0) + tokens
        return sources or super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> ConnectorMetadata:
        return self._scheduler.build_metadata(scheduler_output)

    @guarded()
    def update_connector_output(self, connector_output: Any) -> None:
        worker_metadata = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(worker_metadata, WorkerMetadata):
            self._scheduler.add_ranks(worker_metadata.ranks)
        self._scheduler.on_loads_finished(
            set(connector_output.invalid_block_ids or ()),
            list(getattr(connector_output, "failed_recving", None) or ()),
            list(connector_output.finished_recving or ()),
        )

    @guarded((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduler.on_request_finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    @guarded(())
    def take_events(self) -> Iterable[Any]:
        self._scheduler.step_timer.end()  # vLLM calls this once a step, when the output has arrived
        events = self._scheduler.events
        return () if events is None else events.drain()

    def has_pending_push_work(self) -> bool:
        """Return whether events are pending. vLLM publishes events with a step, so the engine runs extra steps for
        them, even without requests."""
        events = self._scheduler.events if self.role == KVConnectorRole.SCHEDULER else None
        return events is not None and events.pending

    @guarded(False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # Hooks of both roles

    @guarded()
    def get_kv_connector_stats(self) -> ConnectorStats | None:
        return self._sampler.take() if self.role == KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> ConnectorStats:
        return ConnectorStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> PrometheusMetrics:
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            call_guarded(None, self._sampler.close)
            call_guarded(None, self._scheduler.close)
        else:
            call_guarded(None, self._worker.close)
        call_guarded(None, self._share.close)


def _rank(config: Any) -> tuple[int, int]:
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    try:
        return get_pp_group().rank_in_group, get_tp_group().rank_in_group
    except AssertionError:  # no process groups: a single rank
        return 0, 0


def _packing(config: Any) -> str:
    """Return the name of the code that packs blocks on a CPU."""

    def isa() -> str:
        from vllm.v1.attention.backends import cpu_attn

        model = config.model_config
        return str(cpu_attn._get_attn_isa(model.dtype, config.cache_config.block_size, model.get_head_size()))  # noqa: SLF001  vLLM has no public name for it

    # on another version or platform, the processor's name has to do
    return f"cpu_attn {recover(isa, lambda error: f'unknown {platform.processor() or platform.machine()}')}"

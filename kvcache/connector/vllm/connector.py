"""`KVCacheConnector`: what vLLM calls, handed to the side that this object is.

    vllm serve MODEL --kv-transfer-config '{"kv_connector":"KVCacheConnector",
        "kv_connector_module_path":"kvcache.connector.vllm","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'

Every hook runs on the engine's own thread, and none raises for a fault of the cache: it is off then, or finds nothing.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterable
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

import kvcache
from kvcache.cache.api import KVCache
from kvcache.connector.vllm.config import Options, TierOptions, parse_options, reject_unsupported, uncached_reason
from kvcache.connector.vllm.guard import call_guarded, guarded
from kvcache.connector.vllm.kv_layout import describe_layers
from kvcache.connector.vllm.metadata import ConnectorMetadata, HandshakeMetadata, WorkerMetadata
from kvcache.connector.vllm.observe_mode import ObserveMode
from kvcache.connector.vllm.scheduler import ConnectorScheduler
from kvcache.connector.vllm.stats import ConnectorStats, PrometheusMetrics, StatsSampler
from kvcache.connector.vllm.version import KVConnectorTransferResults, hit_source
from kvcache.connector.vllm.worker import ConnectorWorker
from kvcache.daemon.client.autostart import find_or_start
from kvcache.errors import LayoutError

# The cache of an engine: one for both roles where they share a process, else a daemon between them.

HOST_BYTES = "1GiB"
"""Our own host memory under vLLM's, where nobody sets it: what passes through, since what is near stands in vLLM's."""

_lock = threading.Lock()
_open_caches: dict[str, tuple[KVCache | ObserveMode, int]] = {}  # by engine: its cache, and how many roles use it


class SharedCache:
    """One role's claim on the cache of its engine, which is closed when the last role lets go."""

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
    """The cache of this engine, opened by whichever role comes first."""
    engine_id = str(config.kv_transfer_config.engine_id)
    with _lock:
        cache, users = _open_caches.get(engine_id, (None, 0))
        if cache is None:
            cache = _open_cache(config, options)
        _open_caches[engine_id] = (cache, users + 1)
    return SharedCache(engine_id, cache)


def open_tier_cache(options: TierOptions) -> KVCache:
    """The cache under vLLM's own offloading: this process alone reaches it, unless it is a daemon's."""
    if options.address is not None:
        return kvcache.open(options.address)
    return kvcache.open(options.config, **{"host": {"capacity_bytes": HOST_BYTES}, **options.settings})


def is_single_process(config: Any) -> bool:
    """Whether the scheduler and the only worker live together, and no replica beside them."""
    parallel = config.parallel_config
    replicas = getattr(parallel, "data_parallel_size", 1)
    return bool(parallel.world_size == replicas == 1 and parallel.distributed_executor_backend == "uni")


def engine_name(config: Any) -> str:
    """The engine's, which its replicas share: vLLM numbers theirs."""
    return re.sub(r"_dp\d+$", "", str(config.kv_transfer_config.engine_id))


def _open_cache(config: Any, options: Options) -> KVCache | ObserveMode:
    if options.mode == "observe":
        return ObserveMode.of(options)
    if options.address is None and is_single_process(config):
        return kvcache.open(options.config, **options.settings)
    where = options.address or find_or_start(engine_name(config), options.config, **options.settings)
    return kvcache.open(where, engine=str(config.kv_transfer_config.engine_id))


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
                _log.warning("nothing is cached: %s", disabled_reason)
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
        """A block that does not come is computed: a request never fails for it."""
        if config.kv_load_failure_policy != "recompute":
            config.kv_load_failure_policy = "recompute"
            _log.info("kv_load_failure_policy is set to recompute: a block that does not come is computed again")

    @property
    def requires_kv_delivery(self) -> bool:
        return False

    # worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        try:
            packing = _packing(self._vllm_config)
            shapes = describe_layers(
                kv_caches, self._kv_config.kv_cache_groups, self._kv_config.num_blocks, packing=packing
            )
        except Exception as error:  # noqa: BLE001  law: never in the way
            why = str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
            _log.error("this rank's pages are not cached: %s", why)
            self._handshake = HandshakeMetadata(refusal=why)
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
        """Blocks are stored whole, after the step."""

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

    # scheduler

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
        self._scheduler.step_timer.end()  # vLLM asks once a step, when the output is there
        events = self._scheduler.events
        return () if events is None else events.drain()

    def has_pending_push_work(self) -> bool:
        """Events go out with a step: the engine makes some more, also when no request is left."""
        events = self._scheduler.events if self.role == KVConnectorRole.SCHEDULER else None
        return events is not None and events.pending

    @guarded(False)
    def reset_cache(self) -> bool | None:
        return self._scheduler.reset()

    # both

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
    except AssertionError:  # no groups of processes: a single rank
        return 0, 0


def _packing(config: Any) -> str:
    """What packs blocks on a processor."""
    try:
        from vllm.v1.attention.backends import cpu_attn

        model = config.model_config
        isa = cpu_attn._get_attn_isa(model.dtype, config.cache_config.block_size, model.get_head_size())  # noqa: SLF001  nothing else tells it
    except Exception:  # noqa: BLE001  another version, another platform: the machine's name is the least that is known
        import platform

        isa = f"unknown {platform.processor() or platform.machine()}"
    return f"cpu_attn {isa}"

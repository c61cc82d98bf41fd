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
from kvcache.connector.vllm.config import Options, TierOptions, declines, read, refuse
from kvcache.connector.vllm.guard import quiet, quietly
from kvcache.connector.vllm.kv_layout import describe
from kvcache.connector.vllm.metadata import Described, Heard, Message
from kvcache.connector.vllm.observe_mode import Trial
from kvcache.connector.vllm.scheduler import Scheduling
from kvcache.connector.vllm.stats import Prometheus, Sampler, Stats
from kvcache.connector.vllm.version import KVConnectorTransferResults, hit_source
from kvcache.connector.vllm.worker import Working
from kvcache.daemon.client.autostart import find_or_start
from kvcache.errors import LayoutError

# The cache of an engine: one for both roles where they share a process, else a daemon between them.

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


_log = logging.getLogger("kvcache.connector.vllm")


class KVCacheConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        refuse(vllm_config)
        self._options = read(vllm_config.kv_transfer_config.kv_connector_extra_config, Options)
        self._kv_config = kv_cache_config
        self._share = share(vllm_config, self._options)
        self._described: Described | None = None
        self._spoken = False
        off = declines(vllm_config)
        if role == KVConnectorRole.SCHEDULER:
            self._recompute(vllm_config.kv_transfer_config)
            self._scheduling = Scheduling(vllm_config, kv_cache_config, self._options, self._share.cache, off=off)
            self._sampler = Sampler(self._share.cache, self._scheduling.declined.counters)
            if off:
                _log.warning("nothing is cached: %s", off)
        else:
            self._off = off
            self._working = Working(
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
            shapes = describe(kv_caches, self._kv_config.kv_cache_groups, self._kv_config.num_blocks, packing=packing)
        except Exception as error:  # noqa: BLE001  law: never in the way
            why = str(error) if isinstance(error, LayoutError) else f"{type(error).__name__}: {error}"
            _log.error("this rank's pages are not cached: %s", why)
            self._described = Described(refusal=why)
            return
        replicas = getattr(self._kv_config, "kv_tp_replicas", 1)
        self._working.register(kv_caches, shapes)
        self._described = Described(shapes, replicas)

    def get_handshake_metadata(self) -> Described | None:
        self._spoken = self._described is not None
        return self._described

    @quiet()
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        if isinstance(kv_connector_metadata, Message):
            self._working.begin(kv_connector_metadata)

    @quiet()
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        message = self._message()
        if message.loads:
            self._working.load(message, wait=message.wait, by_layer=message.by_layer)

    @quiet()
    def wait_for_layer_load(self, layer_name: str) -> None:
        self._working.reach(layer_name)

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Blocks are stored whole, after the step."""

    @quiet()
    def wait_for_save(self) -> None:
        message = self._message()
        self._working.arrive()
        self._working.store(message)

    @quiet((None, None))
    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self._working.results(idle=self._message().idle)
        return None, results.arrived or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = self._working.results(idle=self._message().idle)
        return KVConnectorTransferResults(
            finished_sending=set(), finished_recving=results.arrived, failed_recving=results.failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._working.invalid()

    def build_connector_worker_meta(self) -> Heard | None:
        if self._spoken or self._described is None:
            return None
        self._spoken = True
        return Heard({_rank(self._vllm_config): self._described})

    def _message(self) -> Message:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Message)
        return metadata

    # scheduler

    @quiet()
    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        self._scheduling.learn({rank: told for rank, told in metadata.items() if isinstance(told, Described)})

    def set_xfer_handshake_metadata(self, metadata: dict[int, Any]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): told for rank, told in metadata.items()})

    @quiet((0, False))
    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._scheduling.matched(request, num_computed_tokens)

    @quiet()
    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._scheduling.allocated(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        sources: dict[Any, int] = {}
        for tier, tokens in quietly({}, self._scheduling.sources, request, num_external_tokens).items():
            source = hit_source(tier)
            sources[source] = sources.get(source, 0) + tokens
        return sources or super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> Message:
        return self._scheduling.message(scheduler_output)

    @quiet()
    def update_connector_output(self, connector_output: Any) -> None:
        heard = getattr(connector_output, "kv_connector_worker_meta", None)
        if isinstance(heard, Heard):
            self._scheduling.learn(heard.ranks)
        self._scheduling.learned(
            set(connector_output.invalid_block_ids or ()),
            list(getattr(connector_output, "failed_recving", None) or ()),
            list(connector_output.finished_recving or ()),
        )

    @quiet((False, None))
    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._scheduling.finished(request)
        return False, None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    @quiet(())
    def take_events(self) -> Iterable[Any]:
        self._scheduling.steps.end()  # vLLM asks once a step, when the output is there
        events = self._scheduling.events
        return () if events is None else events.take()

    def has_pending_push_work(self) -> bool:
        """Events go out with a step: the engine makes some more, also when no request is left."""
        events = self._scheduling.events if self.role == KVConnectorRole.SCHEDULER else None
        return events is not None and events.pending

    @quiet(False)
    def reset_cache(self) -> bool | None:
        return self._scheduling.reset()

    # both

    @quiet()
    def get_kv_connector_stats(self) -> Stats | None:
        return self._sampler.take() if self.role == KVConnectorRole.SCHEDULER else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        return Stats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: list[str], per_engine_labelvalues: Any
    ) -> Prometheus:
        return Prometheus(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self.role == KVConnectorRole.SCHEDULER:
            quietly(None, self._sampler.close)
            quietly(None, self._scheduling.close)
        else:
            quietly(None, self._working.close)
        quietly(None, self._share.close)


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

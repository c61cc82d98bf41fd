"""The scheduler's side: matches prompts, and names the blocks to load and to store in each step.

No call blocks. The local index answers at once, and a pending lookup is read again in the next step. Each call from
vLLM matches the request anew, so a preempted request needs no special case.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from kvcache.cache.api import KVCache, NamespaceHandle, SupportsKVEvents
from kvcache.connector.guard import call_guarded, recover
from kvcache.connector.vllm import version
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.events import KVEventPublisher
from kvcache.connector.vllm.identity import (
    AdapterNames,
    BlockDigests,
    DigestOrigin,
    NamespaceKey,
    model_facts,
    model_name_and_revision,
    read_every_byte,
    unnamed_reason,
)
from kvcache.connector.vllm.kv_layout import ModelIdentity, Rank, combine_ranks
from kvcache.connector.vllm.metadata import LOAD_FAILED, ConnectorMetadata, HandshakeMetadata, TransferSpec
from kvcache.connector.vllm.namespaces import Namespaces, share_model
from kvcache.connector.vllm.observe_mode import ObserveMode
from kvcache.connector.vllm.request_state import RequestOptions, RequestState, Uncached, tokens_by_tier
from kvcache.connector.vllm.step_timer import StepTimer
from kvcache.daemon.client.request import UNREACHABLE
from kvcache.errors import KVCacheError, LayoutError
from kvcache.observe.reasons import meaning

_log = logging.getLogger("kvcache.connector.vllm")


class ConnectorScheduler:
    def __init__(
        self, config: Any, kv_config: Any, options: Options, cache: KVCache | ObserveMode, *, disabled_reason: str = ""
    ) -> None:
        """`disabled_reason` says why nothing is cached; "" when the cache is on."""
        self.cache, self.disabled_reason = cache, disabled_reason
        self._config, self._kv_config, self._options = config, kv_config, options
        role = config.kv_transfer_config
        self._loads, self._stores = role.is_kv_consumer, role.is_kv_producer
        self._ranks: dict[Rank, HandshakeMetadata] = {}
        self._model: ModelIdentity | None = None
        self._adapters = AdapterNames(read_every_byte=read_every_byte(options))
        self._epoch = ""
        self._origin: DigestOrigin | None = None
        self.requests: dict[str, RequestState] = {}
        self._pending: list[TransferSpec] = []
        self._acknowledged_failures: set[str] = set()
        events_config = getattr(config, "kv_events_config", None)
        wanted = events_config is not None and events_config.enable_kv_cache_events
        self.events = KVEventPublisher(cache, version) if wanted and isinstance(cache, SupportsKVEvents) else None
        self._namespaces = Namespaces(self.events)
        self.step_timer = StepTimer()
        self.uncached = Uncached()

    @property
    def asynchronous(self) -> bool:
        """Return whether loads are asynchronous. Several groups always are: only then can a failed load be reported."""
        return self._options.load == "async" or len(self._kv_config.kv_cache_groups) > 1

    # The model

    def add_ranks(self, ranks: dict[Rank, HandshakeMetadata]) -> None:
        """Add what ranks report of their pages. The model is complete when every rank has reported."""
        self._ranks.update(ranks)
        parallel = self._config.parallel_config
        if self._model is not None or self.disabled_reason or len(self._ranks) < parallel.world_size:
            return
        self._model = recover(lambda: build_model_identity(self._config, self._options, self._ranks), self._disable)

    def _disable(self, error: Exception) -> None:
        is_expected = isinstance(error, (KVCacheError, OSError))
        self.disabled_reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
        _log.error("caching is off: %s", self.disabled_reason)

    def _name(self) -> DigestOrigin:
        """Choose how blocks are named. The first request decides, because vLLM chooses the root of its hashes late."""
        if self._origin is None:
            assert self._model is not None
            algorithm = self._config.cache_config.prefix_caching_hash_algo
            own = version.hash_origin(algorithm)
            if self._options.share_across_engines:
                self._origin = "pages"
                return self._origin
            if own is not None and self._layout_tokens % self._hash_tokens == 0:
                self._origin, origin = "vllm", own
            else:
                self._origin, origin = "chain", "kvcache vllm chain 1"
                _log.info(
                    "vLLM's block hashes (%s) differ between processes: kvcache uses its own block hashes",
                    algorithm,
                )
            self._model = replace(self._model, facts={**self._model.facts, "digests": origin})
        return self._origin

    @property
    def _layout_tokens(self) -> int:
        assert self._model is not None
        return self._model.layout.block_tokens

    @property
    def _hash_tokens(self) -> int:
        return version.hash_tokens(self._config.cache_config, self._kv_config)

    # Requests

    def track(self, request: Any) -> RequestState | None:
        """Return the state of a request; None where the request is not cached."""
        known = self.requests.get(request.request_id)
        if self.disabled_reason:
            self.uncached.mark(request.request_id, "off")
        if known is not None or self._model is None or request.request_id in self.uncached:
            return known
        origin = self._name()
        request_options, wrong = RequestOptions.of(request.kv_transfer_params)
        if wrong:
            self.uncached.log_once(f"ignoring invalid kv_transfer_params: {wrong}")
        if reason := unnamed_reason(request, origin):
            self.uncached.mark(request.request_id, reason, meaning("declined", "reason", reason))
            return None
        adapter = recover(
            lambda: self._adapters.name(request.lora_request),
            lambda error: self.uncached.mark(request.request_id, "adapter", f"its adapter cannot be read: {error}"),
        )
        if request.request_id in self.uncached:
            return None
        namespace_key = NamespaceKey(
            tenant=request_options.tenant or self._options.tenant,
            adapter=adapter,
            salt=(request.cache_salt or "") if origin == "pages" else "",
            epoch=self._epoch,
        )
        digests = BlockDigests(request, origin, self._layout_tokens, self._hash_tokens)
        state = self.requests[request.request_id] = RequestState(request, namespace_key, digests, request_options)
        return state

    def match_tokens(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Return the tokens cached beyond the engine's own `local_tokens`, and whether their load is asynchronous.

        None instead of a number means that a lookup is pending. Never raises: an error of the cache is a miss.
        """
        state = call_guarded(None, self.track, request)
        if state is None:
            return 0, False

        def miss(error: Exception) -> tuple[int | None, bool]:
            self.uncached.mark_failed(state, error)
            return 0, False

        return recover(lambda: self._match_tokens(request, state, local_tokens), miss)

    def _match_tokens(self, request: Any, state: RequestState, local_tokens: int) -> tuple[int | None, bool]:
        state.local_tokens = local_tokens
        size = self._layout_tokens
        if (
            not self._loads
            or state.failed
            or state.request_options.skip_load
            or getattr(request, "skip_reading_prefix_cache", False)
        ):
            state.close()
            return 0, False
        if isinstance(self.cache, ObserveMode):
            assert self._model is not None
            if not state.matched_blocks:
                state.matched_blocks = request.num_tokens // size
                state.stored = self.cache.lookup(
                    state.namespace_key,
                    state.digests.up_to(state.matched_blocks),
                    size,
                    self._model.block_bytes,
                    request.num_tokens,
                )
            return 0, False
        # With several groups, or a step that waits, at least one token is left to compute. Otherwise vLLM itself steps
        # back where it needs one.
        may_load_all = self.asynchronous and len(self._kv_config.kv_cache_groups) == 1
        limit = (request.num_tokens if may_load_all else request.num_tokens - 1) // size
        if state.request_options.max_load_tokens is not None:
            limit = min(limit, state.request_options.max_load_tokens // size)
        hit = self._match(state, limit)
        if hit.pending and monotonic() < state.give_up_s:
            return None, False
        tokens = hit.blocks * size - local_tokens
        return (tokens, self.asynchronous) if tokens > 0 else (0, False)

    def _match(self, state: RequestState, limit: int) -> Any:
        if state.cache_request is None or state.matched_blocks != limit:
            state.close()
            request_options = state.request_options
            state.cache_request = self._bind(state.namespace_key).request(
                state.request.request_id,
                agent=request_options.agent,
                session=request_options.session,
                ttl_s=request_options.ttl,
                deadline_s=self._options.load_s,
            )
            state.matched_blocks = limit
            state.give_up_s = monotonic() + self._options.lookup_s
            ids = state.request.prompt_token_ids  # None where the prompt is given as embeddings
            state.hit = state.cache_request.match(ids, digests=list(state.digests.up_to(limit)))
        else:
            state.hit = state.cache_request.match()
        return state.hit

    def _bind(self, namespace_key: NamespaceKey) -> NamespaceHandle:
        assert self._model is not None
        assert not isinstance(self.cache, ObserveMode)
        return self._namespaces.bind(self._model, self.cache, namespace_key)

    def on_allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """Queue the load of `tokens` cached tokens into the pages that vLLM allocated.

        Once tokens were promised, a load is always queued, even one that has failed: the engine waits for it.
        """
        state = call_guarded(None, self.track, request)
        if state is None:
            if self._model is None:
                self.uncached.mark(request.request_id, "starting")
            return
        state.blocks = [list(ids) for ids in blocks.get_block_ids()]
        size, hit = self._layout_tokens, state.hit
        if tokens:
            first, end = state.local_tokens // size, (state.local_tokens + tokens) // size
            self._pending.append(self._load_spec(state, first, end))
            state.sources = tokens_by_tier(hit.by_tier, first, end, size) if hit is not None else {}
            state.stored, state.loading, state.hit = end, True, None
            if state.cache_request is not None:
                call_guarded(None, state.cache_request.admit)
        elif hit is not None and state.cache_request is not None:  # not after a load
            if hit.reason == UNREACHABLE and not state.cached:
                self.uncached.mark(request.request_id, "unreachable")
            if not hit.blocks:
                call_guarded(None, state.cache_request.admit)  # counted as a miss
            state.stored = hit.blocks
            state.close()

    def _load_spec(self, state: RequestState, first: int, end: int) -> TransferSpec:

        def failed(error: Exception) -> TransferSpec:
            self.uncached.mark_failed(state, error)
            return self._move(state, first, end, known=LOAD_FAILED)

        return recover(lambda: self._move(state, first, end), failed)

    def _move(self, state: RequestState, first: int, end: int, known: int | None = None) -> TransferSpec:
        """`known` is `LOAD_FAILED` for a load that the ranks have to report as failed."""
        assert self._model is not None
        digests: tuple[bytes, ...] = ()
        if known is None:
            known = state.sent_digests
            digests = tuple(state.digests.up_to(end)[known:])
            state.sent_digests += len(digests)
        if digests:
            call_guarded(None, self._name_events, state, digests, known)
        return TransferSpec(
            request_id=state.request.request_id,
            namespace_key=state.namespace_key,
            known_digests=known,
            digests=digests,
            first=first,
            pages=tuple(tuple(state.blocks[g][first:end]) for g in self._model.vllm_groups),
            ttl_s=state.request_options.ttl,
            agent=state.request_options.agent,
            session=state.request_options.session,
        )

    def _name_events(self, state: RequestState, digests: tuple[bytes, ...], known: int) -> None:
        """Give the event publisher the names of these blocks."""
        if self.events is not None:
            handle = self._bind(state.namespace_key)
            self.events.name_blocks(handle, state.request, digests, known, self._layout_tokens // self._hash_tokens)

    # Steps

    def build_metadata(self, out: Any) -> ConnectorMetadata:
        metadata = self._build_metadata(out)
        self.step_timer.begin(out.total_num_scheduled_tokens)
        return metadata

    def _build_metadata(self, out: Any) -> ConnectorMetadata:
        metadata = ConnectorMetadata(
            loads=self._pending, finished_requests=set(out.finished_req_ids), idle=not out.total_num_scheduled_tokens
        )
        metadata.acknowledged_failures, self._acknowledged_failures = self._acknowledged_failures, set()
        self._pending = []
        if self._model is None or self.disabled_reason:
            return metadata
        if not self.asynchronous:
            metadata.wait, metadata.by_layer = self._options.load == "sync", self._options.load == "layers"
        metadata.model = self._model if self._origin is not None else None
        for move in metadata.loads:
            metadata.assigned_pages.update(*move.pages)
        for new in out.scheduled_new_reqs:
            self._step(metadata, out, new.req_id, new.block_ids, new.num_computed_tokens, anew=True)
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            anew = request_id in cached.resumed_req_ids
            self._step(metadata, out, request_id, cached.new_block_ids[i], cached.num_computed_tokens[i], anew=anew)
        for request_id in getattr(out, "preempted_req_ids", None) or ():
            self._forget(request_id)
        return metadata

    def _step(
        self, metadata: ConnectorMetadata, out: Any, request_id: str, ids: Any, computed: int, *, anew: bool
    ) -> None:
        """Record the pages of one request, and queue the store of the blocks that this step fills."""
        size = self._layout_tokens
        for group in ids or ():
            metadata.assigned_pages.update(group[computed // size :] if anew else group)
        state = self.requests.get(request_id)
        if state is None:
            return
        if state.loading and not anew:  # loaded within the previous step
            state.loading = False
            state.close()
        scheduled = out.num_scheduled_tokens[request_id]
        observer = self.cache if isinstance(self.cache, ObserveMode) else self._namespaces.get(state.namespace_key)
        self.step_timer.prompt(observer, min(scheduled, state.request.num_prompt_tokens - computed))
        table = version.block_table(out, request_id)
        if table is not None:
            state.blocks = [list(group) for group in table]
        elif anew:
            state.blocks = [list(group) for group in ids]
        elif ids is not None:
            for mine, group in zip(state.blocks, ids, strict=True):
                mine.extend(group)
        if not self._stores or state.request_options.skip_store:
            return
        recover(
            lambda: self._store(metadata, state, computed + scheduled),
            lambda error: self.uncached.mark_failed(state, error),
        )

    def _store(self, metadata: ConnectorMetadata, state: RequestState, computed: int) -> None:
        assert self._model is not None
        size = self._layout_tokens
        # Draft tokens lie behind the known tokens; `num_tokens` does not count them.
        end = min(computed, state.request.num_tokens) // size
        end = min(end, len(state.digests.up_to(end)), *map(len, state.blocks))
        first = state.first_storable(self._model.vllm_groups, min(state.stored, end), end)
        if first < end and isinstance(self.cache, ObserveMode):
            self.cache.record_store(state.namespace_key, state.digests.up_to(end)[first:end], self._model.block_bytes)
        elif first < end:
            metadata.stores.append(self._move(state, first, end))
        state.stored = max(state.stored, end)

    def sources(self, request: Any, tokens: int) -> dict[str, int]:
        """Return the tokens promised to a request, by tier; empty where their sum is not `tokens`."""
        state = self.requests.get(request.request_id)
        return {} if state is None or sum(state.sources.values()) != tokens else dict(state.sources)

    def _forget(self, request_id: str) -> None:
        state = self.requests.get(request_id)
        if state is not None:
            state.close()
            state.blocks, state.stored = [], 0

    def on_loads_finished(self, invalid: set[int], failed: Sequence[str], arrived: Sequence[str]) -> None:
        """Handle the results of a step: invalid pages, requests whose load failed, requests whose load ended."""
        for request_id in arrived:
            if request_id in self.requests:
                state = self.requests[request_id]
                state.loading = False
                state.close()
        for request_id in failed:
            if request_id in self.requests:
                self.requests[request_id].failed = True
                self.requests[request_id].stored = 0
                self._acknowledged_failures.add(request_id)
        if not invalid:
            return
        for request_id, state in self.requests.items():
            for ids in state.blocks:
                bad = next((i for i, page in enumerate(ids) if page in invalid), None)
                if bad is not None:
                    state.failed = True
                    state.stored = min(state.stored, bad)
                    self._acknowledged_failures.add(request_id)

    def on_request_finished(self, request: Any) -> None:
        self.uncached.forget(request.request_id)
        state = self.requests.pop(request.request_id, None)
        if state is not None:
            state.close()

    def reset(self) -> bool:
        """Begin a new namespace, so that this engine finds nothing stored before."""
        self._epoch = uuid.uuid4().hex
        self._namespaces.clear()
        if self.events is not None:
            call_guarded(None, self.events.forget)
        for request_id, state in list(self.requests.items()):
            state.close()
            del self.requests[request_id]
        return True

    def close(self) -> None:
        if self.events is not None:
            self.events.close()
        for state in self.requests.values():
            state.close()
        self.requests.clear()


def build_model_identity(config: Any, options: Options, ranks: Mapping[Rank, HandshakeMetadata]) -> ModelIdentity:
    """Return the identity, from what every rank reports of its pages.

    Raises:
        LayoutError, ModelError: the blocks cannot be cached; the message says why.
    """
    refusals = sorted({rank.refusal for rank in ranks.values() if rank.refusal})
    if refusals:
        raise LayoutError("; ".join(refusals))
    layout, shards, vllm_groups, packing = combine_ranks(
        {rank: handshake.shapes for rank, handshake in ranks.items()}, replicas=next(iter(ranks.values())).replicas
    )
    if options.share_across_engines:
        return share_model(config, options, ModelIdentity("", "", {}, layout, shards, vllm_groups))
    name, revision = model_name_and_revision(config, options)
    facts = model_facts(config) | {"packing": packing}
    if any(kind != "plain" for kind in packing):
        facts["version"] = version.VERSION  # another version may pack differently
    return ModelIdentity(name, revision, facts, layout, shards, vllm_groups)

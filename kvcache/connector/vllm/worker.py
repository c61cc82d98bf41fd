"""A rank's side: loads blocks into its pages, stores blocks from its pages, and reports the results.

Stores run beside the engine, and vLLM may assign their pages to another request meanwhile. `begin` waits for the stores
that read the pages which a step assigns. This covers preemption, sliding windows and finished requests, and no page is
held back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kvcache.cache.api import KVCache, Request
from kvcache.connector.guard import GuardedTransfer, call_guarded, guarded
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.identity import NamespaceKey
from kvcache.connector.vllm.kv_layout import LayerGroup, ModelIdentity, Rank, pages_of
from kvcache.connector.vllm.metadata import ConnectorMetadata, TransferSpec
from kvcache.connector.vllm.namespaces import Namespaces
from kvcache.connector.vllm.observe_mode import ObserveMode
from kvcache.transfer.pages import Pages

IDLE_STEP_WAIT_S = 0.002
"""How long a step without computation waits for a load, instead of spinning."""

STORE_WAIT_S = 0.05
"""How long an assigned page waits for the store that reads it, before the rest of that store is cancelled."""

COPY_TIMEOUT_S = 30.0
"""How long to wait for a copy between pages and host memory after cancelling it; then an error is logged."""

_log = logging.getLogger("kvcache.connector.vllm")


@dataclass
class WorkerRequest:
    """A request as the cache knows it on this rank."""

    namespace_key: NamespaceKey
    request: Request
    blocks: int = 0
    last_store: GuardedTransfer | None = None


@dataclass
class PendingLoad:
    spec: TransferSpec
    transfer: GuardedTransfer | None  # None: it could not begin
    give_up_s: float

    @property
    def done(self) -> bool:
        return self.transfer is None or self.transfer.done

    @property
    def loaded_blocks(self) -> int:
        return 0 if self.transfer is None else self.transfer.blocks


@dataclass
class LoadResults:
    arrived: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class ConnectorWorker:
    def __init__(self, options: Options, cache: KVCache | ObserveMode, rank: Rank, *, groups: int, blocks: int) -> None:
        """`groups` is the number of vLLM's groups, `blocks` the number of pages of each layer."""
        self.cache, self._options, self._rank = cache, options, rank
        self._groups, self._page_count = groups, blocks
        self._caches: Mapping[str, Any] = {}
        self._shapes: tuple[LayerGroup, ...] = ()
        self._model: ModelIdentity | None = None
        self._pages: Pages = ()
        self._namespaces = Namespaces()
        self._known: dict[str, WorkerRequest] = {}
        self._loading: dict[str, PendingLoad] = {}
        self._waiting: list[PendingLoad] = []  # loads that this step's layers wait for
        self._storing: list[tuple[GuardedTransfer, set[int], TransferSpec]] = []
        self._incomplete_requests: set[str] = set()  # requests that may compute on blocks that were not loaded
        self._invalid: set[int] = set()

    def register(self, caches: Mapping[str, Any], shapes: tuple[LayerGroup, ...]) -> None:
        self._caches, self._shapes = caches, shapes

    # Steps

    def begin(self, metadata: ConnectorMetadata) -> None:
        """Prepare a step, before anything writes into pages."""
        call_guarded(None, self._set_model, metadata.model)
        self._incomplete_requests -= metadata.acknowledged_failures | metadata.finished_requests
        self._settle_stores()
        for transfer, pages, spec in self._storing:
            if not pages.isdisjoint(metadata.assigned_pages):
                self._wait_for_store(transfer, spec)
        for request_id in metadata.finished_requests:
            loading = self._loading.get(request_id)
            if loading is not None and loading.transfer is not None:
                loading.transfer.cancel()
            known = self._known.pop(request_id, None)
            if known is not None:
                call_guarded(None, known.request.close)

    def load(self, metadata: ConnectorMetadata, *, wait: bool, by_layer: bool) -> None:
        """Begin the loads of this step.

        Args:
            wait: return when the loads have ended.
            by_layer: the loads end before the layer that needs them runs.
        """
        for spec in metadata.loads:
            loading = PendingLoad(spec, self._begin_load(spec), monotonic() + self._options.load_s)
            if wait or by_layer:
                self._waiting.append(loading)
            else:
                self._loading[spec.request_id] = loading
        if wait:
            self.wait_for_loads()

    def wait_for_layer(self, layer: str) -> None:
        """Wait until this layer of all blocks that the step loads is in its pages."""
        for loading in self._waiting:
            if loading.transfer is not None:
                index = next((s.layers.index(layer) for s in self._shapes if layer in s.layers), 0)
                loading.transfer.wait_layer(index, max(0.0, loading.give_up_s - monotonic()))

    def wait_for_loads(self) -> None:
        """Wait for every load that this step waits for, and cancel those that exceed their deadline."""
        for loading in self._waiting:
            if loading.transfer is not None and not loading.transfer.wait(max(0.0, loading.give_up_s - monotonic())):
                self._abort_transfer(loading.transfer, loading.spec)
            self._is_complete(loading)
        self._waiting.clear()

    def store(self, metadata: ConnectorMetadata) -> None:
        """Begin the stores of a step that has computed."""
        for spec in metadata.stores:
            if spec.request_id not in self._incomplete_requests:
                self._begin_store(spec)

    def results(self, *, idle: bool) -> LoadResults:
        """Return the loads that ended since the last call."""
        if idle and self._loading:
            first = next(iter(self._loading.values()))
            if first.transfer is not None:
                first.transfer.wait(IDLE_STEP_WAIT_S)
        results, now = LoadResults(), monotonic()
        for request_id, loading in list(self._loading.items()):
            if not loading.done:
                if now > loading.give_up_s and loading.transfer is not None:
                    loading.transfer.cancel()
                continue
            del self._loading[request_id]
            results.arrived.add(request_id)
            if not self._is_complete(loading) and self._groups > 1:
                results.failed.add(request_id)
        return results

    def take_invalid_pages(self) -> set[int]:
        pages, self._invalid = self._invalid, set()
        return pages

    @property
    def busy(self) -> bool:
        return bool(self._loading or self._storing)

    def close(self) -> None:
        for loading in [*self._loading.values(), *self._waiting]:
            if loading.transfer is not None:
                self._abort_transfer(loading.transfer, loading.spec)
        for transfer, _, spec in self._storing:
            self._wait_for_store(transfer, spec)
        for known in self._known.values():
            call_guarded(None, known.request.close)
        self._loading.clear()
        self._waiting.clear()
        self._storing.clear()
        self._known.clear()

    # Internals

    def _set_model(self, model: ModelIdentity | None) -> None:
        if model is None or model is self._model or (self._model is not None and model == self._model):
            return
        self._pages = [
            pages_of(shape, self._caches, self._page_count, model.layout, g, model.shards[self._rank][g])
            for g, shape in enumerate(self._shapes)
        ]
        self._model = model
        self._namespaces.clear()

    def _request(self, spec: TransferSpec) -> WorkerRequest:
        """Return the request, with the digests of all blocks up to the last one moved."""
        known = self._known.get(spec.request_id)
        if known is None or known.namespace_key != spec.namespace_key or known.blocks != spec.known_digests:
            if spec.known_digests:
                raise LookupError(
                    f"request {spec.request_id}: digests from {spec.known_digests} on, of which none was told"
                )
            if known is not None:
                del self._known[spec.request_id]
                call_guarded(None, known.request.close)
            assert self._model is not None
            assert not isinstance(self.cache, ObserveMode), "observe mode moves no blocks"
            handle = self._namespaces.bind(self._model, self.cache, spec.namespace_key, self._rank)
            named = {"agent": spec.agent, "session": spec.session}
            request = handle.request(spec.request_id, ttl_s=spec.ttl_s, deadline_s=self._options.load_s, **named)
            with ExitStack() as on_fault:
                on_fault.callback(call_guarded, None, request.close)
                request.match(digests=list(spec.digests))
                on_fault.pop_all()
            known = self._known[spec.request_id] = WorkerRequest(spec.namespace_key, request, len(spec.digests))
        elif spec.digests:
            known.request.extend(digests=list(spec.digests))
            known.blocks += len(spec.digests)
        return known

    def _begin_load(self, spec: TransferSpec) -> GuardedTransfer | None:
        """Begin a load; None where it could not begin, and its blocks are computed."""

        def begin() -> GuardedTransfer | None:
            request, end = self._request(spec).request, spec.first + spec.count
            return GuardedTransfer(request.load(end, self._pages, spec.pages, first_block=spec.first))

        return call_guarded(None, begin)

    @guarded()
    def _begin_store(self, spec: TransferSpec) -> None:
        """Begin a store; where it cannot begin, its blocks are not kept."""
        known = self._request(spec)
        if known.last_store is not None and not known.last_store.done:
            self._wait_for_store(known.last_store, spec)  # a block is kept only behind its parent
        transfer = GuardedTransfer(known.request.store(self._pages, spec.pages, first_block=spec.first))
        known.last_store = transfer
        self._storing.append((transfer, set().union(*spec.pages), spec))

    def _is_complete(self, loading: PendingLoad) -> bool:
        """Return whether all blocks were loaded. The missing ones are recomputed, and nothing computed on them is
        stored."""
        spec = loading.spec
        if loading.loaded_blocks == spec.count:
            return True
        self._incomplete_requests.add(spec.request_id)
        if self._groups == 1:
            self._invalid.update(spec.pages[0][loading.loaded_blocks :])
        return False

    def _settle_stores(self) -> None:
        self._storing = [entry for entry in self._storing if not entry[0].done]

    def _wait_for_store(self, transfer: GuardedTransfer, spec: TransferSpec) -> None:
        """Wait until a store has stopped reading its pages: the time of a copy, unless many others are queued before
        it."""
        if not transfer.wait(STORE_WAIT_S):
            self._abort_transfer(transfer, spec)

    def _abort_transfer(self, transfer: GuardedTransfer, spec: TransferSpec) -> None:
        """Cancel a transfer and wait for its end, so that its pages can be used."""
        transfer.cancel()
        if not transfer.wait(COPY_TIMEOUT_S):
            _log.error("copy has not ended: request=%s blocks=%d", spec.request_id, spec.count)

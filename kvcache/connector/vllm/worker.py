"""A rank's side: brings blocks into its pages and takes them out, and says what came of it.

Stores run beside the engine. Their pages may be given to others meanwhile: whoever is given one waits for what is still
read from it, which covers preemption, windows that move on, and requests that end, without holding anything back.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from kvcache.cache.api import KVCache, Request
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.guard import Calm, quietly, say
from kvcache.connector.vllm.identity import Who
from kvcache.connector.vllm.kv_layout import Model, Rank, Shape, pages_of
from kvcache.connector.vllm.metadata import Message, Move
from kvcache.connector.vllm.namespaces import Bounds
from kvcache.connector.vllm.observe_mode import Trial
from kvcache.transfer.pages import Pages

IDLE_S = 0.002
"""So long a step that computes nothing waits for a load, rather than going round."""

BEHIND_S = 0.05
"""So long whoever is given a page waits for the store that reads it to end, before what has not begun is given up."""

PATIENCE_S = 30.0
"""A copy between pages and host memory that takes longer than this is no longer waited for; it is logged."""

_log = logging.getLogger("kvcache.connector.vllm")


@dataclass
class Known:
    """A request as the cache knows it on this rank."""

    who: Who
    request: Request
    blocks: int = 0
    last_store: Calm | None = None


@dataclass
class Loading:
    move: Move
    transfer: Calm | None  # None: it could not even begin
    give_up_s: float

    @property
    def done(self) -> bool:
        return self.transfer is None or self.transfer.done

    @property
    def brought(self) -> int:
        return 0 if self.transfer is None else self.transfer.blocks


@dataclass
class Results:
    arrived: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class Working:
    def __init__(self, options: Options, cache: KVCache | Trial, rank: Rank, *, groups: int, blocks: int) -> None:
        """`groups` are vLLM's, `blocks` is how many pages each layer has."""
        self.cache, self._options, self._rank = cache, options, rank
        self._groups, self._page_count = groups, blocks
        self._caches: Mapping[str, Any] = {}
        self._shapes: tuple[Shape, ...] = ()
        self._model: Model | None = None
        self._pages: Pages = ()
        self._bound = Bounds()
        self._known: dict[str, Known] = {}
        self._loading: dict[str, Loading] = {}
        self._waiting: list[Loading] = []  # loads that this step's layers wait for
        self._storing: list[tuple[Calm, set[int], Move]] = []
        self._poisoned: set[str] = set()  # requests that may compute on what did not come
        self._invalid: set[int] = set()

    def register(self, caches: Mapping[str, Any], shapes: tuple[Shape, ...]) -> None:
        self._caches, self._shapes = caches, shapes

    # a step

    def begin(self, message: Message) -> None:
        """Before anything writes into pages."""
        quietly(None, self._learn, message.model)
        self._poisoned -= message.healed | message.ended
        self._settle_stores()
        for transfer, pages, move in self._storing:
            if not pages.isdisjoint(message.given):
                self._finish(transfer, move)
        for request_id in message.ended:
            loading = self._loading.get(request_id)
            if loading is not None and loading.transfer is not None:
                loading.transfer.cancel()
            known = self._known.pop(request_id, None)
            if known is not None:
                quietly(None, known.request.close)

    def load(self, message: Message, *, wait: bool, by_layer: bool) -> None:
        """Begin the loads of this step. `wait`: they are over when this returns; `by_layer`: when one is reached."""
        for move in message.loads:
            loading = Loading(move, self._begin_load(move), monotonic() + self._options.load_s)
            if wait or by_layer:
                self._waiting.append(loading)
            else:
                self._loading[move.request_id] = loading
        if wait:
            self.arrive()

    def reach(self, layer: str) -> None:
        """Until this layer of what this step loads is in its pages."""
        for loading in self._waiting:
            if loading.transfer is not None:
                index = next((s.layers.index(layer) for s in self._shapes if layer in s.layers), 0)
                loading.transfer.wait_layer(index, max(0.0, loading.give_up_s - monotonic()))

    def arrive(self) -> None:
        """Every load that this step waits for is over, one way or the other."""
        for loading in self._waiting:
            if loading.transfer is not None and not loading.transfer.wait(max(0.0, loading.give_up_s - monotonic())):
                self._give_up(loading.transfer, loading.move)
            self._judge(loading)
        self._waiting.clear()

    def store(self, message: Message) -> None:
        """After the step has computed."""
        for move in message.stores:
            if move.request_id not in self._poisoned:
                self._begin_store(move)

    def results(self, *, idle: bool) -> Results:
        """The loads that are over since the last call."""
        if idle and self._loading:
            first = next(iter(self._loading.values()))
            if first.transfer is not None:
                first.transfer.wait(IDLE_S)
        results, now = Results(), monotonic()
        for request_id, loading in list(self._loading.items()):
            if not loading.done:
                if now > loading.give_up_s and loading.transfer is not None:
                    loading.transfer.cancel()
                continue
            del self._loading[request_id]
            results.arrived.add(request_id)
            if not self._judge(loading) and self._groups > 1:
                results.failed.add(request_id)
        return results

    def invalid(self) -> set[int]:
        pages, self._invalid = self._invalid, set()
        return pages

    @property
    def busy(self) -> bool:
        return bool(self._loading or self._storing)

    def close(self) -> None:
        for loading in [*self._loading.values(), *self._waiting]:
            if loading.transfer is not None:
                self._give_up(loading.transfer, loading.move)
        for transfer, _, move in self._storing:
            self._finish(transfer, move)
        for known in self._known.values():
            quietly(None, known.request.close)
        self._loading.clear()
        self._waiting.clear()
        self._storing.clear()
        self._known.clear()

    # within

    def _learn(self, model: Model | None) -> None:
        if model is None or model is self._model or (self._model is not None and model == self._model):
            return
        self._pages = [
            pages_of(shape, self._caches, self._page_count, model.layout, g, model.shards[self._rank][g])
            for g, shape in enumerate(self._shapes)
        ]
        self._model = model
        self._bound.clear()

    def _request(self, move: Move) -> Known:
        """The request, with the digests of all blocks up to the last one moved."""
        known = self._known.get(move.request_id)
        if known is None or known.who != move.who or known.blocks != move.known:
            if move.known:
                raise LookupError(f"request {move.request_id}: digests from {move.known} on, of which none was told")
            if known is not None:
                del self._known[move.request_id]
                quietly(None, known.request.close)
            assert self._model is not None
            assert not isinstance(self.cache, Trial), "a trial moves nothing"
            bound = self._bound.bind(self._model, self.cache, move.who, self._rank)
            named = {"agent": move.agent, "session": move.session}
            request = bound.request(move.request_id, ttl_s=move.ttl_s, deadline_s=self._options.load_s, **named)
            try:
                request.match(digests=list(move.digests))
            except Exception:
                quietly(None, request.close)
                raise
            known = self._known[move.request_id] = Known(move.who, request, len(move.digests))
        elif move.digests:
            known.request.extend(digests=list(move.digests))
            known.blocks += len(move.digests)
        return known

    def _begin_load(self, move: Move) -> Calm | None:
        """None: it could not begin, and its blocks are computed."""
        try:
            request = self._request(move).request
            return Calm(request.load(move.first + move.count, self._pages, move.pages, first_block=move.first))
        except Exception as error:  # noqa: BLE001  law: never in the way
            say("a load", error)
            return None

    def _begin_store(self, move: Move) -> None:
        try:
            known = self._request(move)
            if known.last_store is not None and not known.last_store.done:
                self._finish(known.last_store, move)  # a block is kept only behind its parent
            transfer = Calm(known.request.store(self._pages, move.pages, first_block=move.first))
        except Exception as error:  # noqa: BLE001  law: never in the way; its blocks are not kept
            say("a store", error)
            return
        known.last_store = transfer
        self._storing.append((transfer, set().union(*move.pages), move))

    def _judge(self, loading: Loading) -> bool:
        """Whether all came. What did not is computed again, and nothing computed on it is stored."""
        move = loading.move
        if loading.brought == move.count:
            return True
        self._poisoned.add(move.request_id)
        if self._groups == 1:
            self._invalid.update(move.pages[0][loading.brought :])
        return False

    def _settle_stores(self) -> None:
        self._storing = [entry for entry in self._storing if not entry[0].done]

    def _finish(self, transfer: Calm, move: Move) -> None:
        """Wait until nobody reads the pages of a store any more: a copy, unless many stand before it."""
        if not transfer.wait(BEHIND_S):
            self._give_up(transfer, move)

    def _give_up(self, transfer: Calm, move: Move) -> None:
        """End a transfer, so that its pages can be used."""
        transfer.cancel()
        if not transfer.wait(PATIENCE_S):
            _log.error("request %s: a copy of %d blocks has not ended", move.request_id, move.count)

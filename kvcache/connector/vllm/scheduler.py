"""The scheduler's side: what of a prompt is known, which blocks to load and to store, and who is told what.

Nothing here waits: the local index answers at once, and a lookup that is still pending is asked again in the next step.
A request is looked up again whenever vLLM asks, so that preemption is nothing special: it begins anew.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from kvcache.cache.api import Bound, Followed, KVCache
from kvcache.connector.vllm import version
from kvcache.connector.vllm.config import Options
from kvcache.connector.vllm.events import Announcer
from kvcache.connector.vllm.guard import quietly
from kvcache.connector.vllm.identity import Adapters, Digests, Origin, Who, read_every_byte, unnamed
from kvcache.connector.vllm.kv_layout import Model, Rank
from kvcache.connector.vllm.metadata import UNTOLD, Described, Message, Move
from kvcache.connector.vllm.model_identity import whole
from kvcache.connector.vllm.namespaces import Bounds
from kvcache.connector.vllm.observe_mode import Trial
from kvcache.connector.vllm.request_state import Declined, Tracked, Wishes, behind
from kvcache.connector.vllm.step_timer import Steps
from kvcache.daemon.client.request import UNREACHABLE
from kvcache.errors import KVCacheError
from kvcache.observe.reasons import meaning

_log = logging.getLogger("kvcache.connector.vllm")


class Scheduling:
    def __init__(self, config: Any, kv_config: Any, options: Options, cache: KVCache | Trial, *, off: str = "") -> None:
        """`off`: why nothing is cached; "" where it is."""
        self.cache, self.off = cache, off
        self._config, self._kv_config, self._options = config, kv_config, options
        role = config.kv_transfer_config
        self._loads, self._stores = role.is_kv_consumer, role.is_kv_producer
        self._ranks: dict[Rank, Described] = {}
        self._model: Model | None = None
        self._told = 0  # steps in which the ranks were told of the model
        self._adapters = Adapters(read_every_byte=read_every_byte(options))
        self._since = ""
        self._origin: Origin | None = None
        self.requests: dict[str, Tracked] = {}
        self._pending: list[Move] = []
        self._healed: set[str] = set()
        told = getattr(config, "kv_events_config", None)
        wanted = told is not None and told.enable_kv_cache_events
        self.events = Announcer(cache, version) if wanted and isinstance(cache, Followed) else None
        self._bound = Bounds(self.events)
        self.steps = Steps()
        self.declined = Declined()

    @property
    def asynchronous(self) -> bool:
        """Several groups are always loaded so: it is the only way to say that such a load failed."""
        return self._options.load == "async" or len(self._kv_config.kv_cache_groups) > 1

    # the model

    def learn(self, ranks: dict[Rank, Described]) -> None:
        """What the ranks say of their pages; complete when every rank has spoken."""
        self._ranks.update(ranks)
        parallel = self._config.parallel_config
        if self._model is not None or self.off or len(self._ranks) < parallel.world_size:
            return
        try:
            self._model = whole(self._config, self._options, self._ranks)
        except (KVCacheError, OSError) as error:
            self._turn_off(str(error))
        except Exception as error:  # noqa: BLE001  law: never in the way
            self._turn_off(f"{type(error).__name__}: {error}")

    def _turn_off(self, why: str) -> None:
        self.off = why
        _log.error("nothing is cached: %s", why)

    def _name(self) -> Origin:
        """How blocks are named, chosen at the first request, when vLLM has chosen the root of its hashes."""
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
                    "vLLM's block hashes (%s) differ between processes: blocks are named by our own",
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

    # a request

    def track(self, request: Any) -> Tracked | None:
        """None where the request is not cached."""
        known = self.requests.get(request.request_id)
        if self.off:
            self.declined.because(request.request_id, "off")
        if known is not None or self._model is None or request.request_id in self.declined:
            return known
        origin = self._name()
        wishes, wrong = Wishes.of(request.kv_transfer_params)
        if wrong:
            self.declined.say(f"kv_transfer_params that make no sense are ignored: {wrong}")
        if reason := unnamed(request, origin):
            self.declined.because(request.request_id, reason, meaning("declined", "reason", reason))
            return None
        try:
            adapter = self._adapters.name(request.lora_request)
        except Exception as error:  # noqa: BLE001  law: never in the way
            self.declined.because(request.request_id, "adapter", f"its adapter cannot be read: {error}")
            return None
        who = Who(
            tenant=wishes.tenant or self._options.tenant,
            adapter=adapter,
            salt=(request.cache_salt or "") if origin == "pages" else "",
            since=self._since,
        )
        digests = Digests(request, origin, self._layout_tokens, self._hash_tokens)
        tracked = self.requests[request.request_id] = Tracked(request, who, digests, wishes)
        return tracked

    def matched(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """Tokens beyond those that the engine has; None: not known yet. Never raises: an error of ours is a miss."""
        tracked = quietly(None, self.track, request)
        if tracked is None:
            return 0, False
        try:
            return self._matched(request, tracked, local_tokens)
        except Exception as error:  # noqa: BLE001  law: never in the way
            self.declined.failed(tracked, error)
            return 0, False

    def _matched(self, request: Any, tracked: Tracked, local_tokens: int) -> tuple[int | None, bool]:
        tracked.local_tokens = local_tokens
        size = self._layout_tokens
        if (
            not self._loads
            or tracked.failed
            or tracked.wishes.skip_load
            or getattr(request, "skip_reading_prefix_cache", False)
        ):
            tracked.close()
            return 0, False
        if isinstance(self.cache, Trial):
            assert self._model is not None
            if not tracked.asked:
                tracked.asked = request.num_tokens // size
                tracked.stored = self.cache.ask(
                    tracked.who,
                    tracked.digests.first(tracked.asked),
                    size,
                    self._model.block_bytes,
                    request.num_tokens,
                )
            return 0, False
        # Several groups, and a step that waits, leave a token to compute; vLLM itself steps back where one is needed.
        whole = self.asynchronous and len(self._kv_config.kv_cache_groups) == 1
        limit = (request.num_tokens if whole else request.num_tokens - 1) // size
        if tracked.wishes.max_load_tokens is not None:
            limit = min(limit, tracked.wishes.max_load_tokens // size)
        hit = self._match(tracked, limit)
        if hit.pending and monotonic() < tracked.give_up_s:
            return None, False
        tokens = hit.blocks * size - local_tokens
        return (tokens, self.asynchronous) if tokens > 0 else (0, False)

    def _match(self, tracked: Tracked, limit: int) -> Any:
        if tracked.face is None or tracked.asked != limit:
            tracked.close()
            wishes = tracked.wishes
            tracked.face = self._bind(tracked.who).request(
                tracked.request.request_id,
                agent=wishes.agent,
                session=wishes.session,
                ttl_s=wishes.ttl,
                deadline_s=self._options.load_s,
            )
            tracked.asked = limit
            tracked.give_up_s = monotonic() + self._options.lookup_s
            ids = tracked.request.prompt_token_ids  # None where it is given as embeddings
            tracked.hit = tracked.face.match(ids, digests=list(tracked.digests.first(limit)))
        else:
            tracked.hit = tracked.face.match()
        return tracked.hit

    def _bind(self, who: Who) -> Bound:
        assert self._model is not None
        assert not isinstance(self.cache, Trial)
        return self._bound.bind(self._model, self.cache, who)

    def allocated(self, request: Any, blocks: Any, tokens: int) -> None:
        """The engine admits the request, and has pages for `tokens` of ours. What was promised is told of in any case:
        a load that never begins would be waited for."""
        tracked = quietly(None, self.track, request)
        if tracked is None:
            if self._model is None:
                self.declined.because(request.request_id, "starting")
            return
        tracked.blocks = [list(ids) for ids in blocks.get_block_ids()]
        size, hit = self._layout_tokens, tracked.hit
        if tokens:
            first, end = tracked.local_tokens // size, (tracked.local_tokens + tokens) // size
            self._pending.append(self._promised(tracked, first, end))
            tracked.sources = behind(hit.by_tier, first, end, size) if hit is not None else {}
            tracked.stored, tracked.loading, tracked.hit = end, True, None
            if tracked.face is not None:
                quietly(None, tracked.face.admit)
        elif hit is not None and tracked.face is not None:  # not after a load
            if hit.reason == UNREACHABLE and not tracked.cached:
                self.declined.because(request.request_id, "unreachable")
            if not hit.blocks:
                quietly(None, tracked.face.admit)  # counted as a miss
            tracked.stored = hit.blocks
            tracked.close()

    def _promised(self, tracked: Tracked, first: int, end: int) -> Move:
        try:
            return self._move(tracked, first, end)
        except Exception as error:  # noqa: BLE001  law: never in the way
            self.declined.failed(tracked, error)
            return self._move(tracked, first, end, known=UNTOLD)

    def _move(self, tracked: Tracked, first: int, end: int, known: int | None = None) -> Move:
        """`known`: UNTOLD for a load that the ranks are to say has failed."""
        assert self._model is not None
        digests: tuple[bytes, ...] = ()
        if known is None:
            known = tracked.told
            digests = tuple(tracked.digests.first(end)[known:])
            tracked.told += len(digests)
        if digests:
            quietly(None, self._tell, tracked, digests, known)
        return Move(
            request_id=tracked.request.request_id,
            who=tracked.who,
            known=known,
            digests=digests,
            first=first,
            pages=tuple(tuple(tracked.blocks[g][first:end]) for g in self._model.of),
            ttl_s=tracked.wishes.ttl,
            agent=tracked.wishes.agent,
            session=tracked.wishes.session,
        )

    def _tell(self, tracked: Tracked, digests: tuple[bytes, ...], known: int) -> None:
        """The events, by which names their blocks are known."""
        if self.events is not None:
            bound = self._bind(tracked.who)
            self.events.name(bound, tracked.request, digests, known, self._layout_tokens // self._hash_tokens)

    # a step

    def message(self, out: Any) -> Message:
        message = self._message(out)
        self.steps.begin(out.total_num_scheduled_tokens)
        return message

    def _message(self, out: Any) -> Message:
        message = Message(loads=self._pending, ended=set(out.finished_req_ids), idle=not out.total_num_scheduled_tokens)
        message.healed, self._healed = self._healed, set()
        self._pending = []
        if self._model is None or self.off:
            return message
        if not self.asynchronous:
            message.wait, message.by_layer = self._options.load == "sync", self._options.load == "layers"
        message.model = self._model if self._origin is not None else None
        for move in message.loads:
            message.given.update(*move.pages)
        for new in out.scheduled_new_reqs:
            self._step(message, out, new.req_id, new.block_ids, new.num_computed_tokens, anew=True)
        cached = out.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            anew = request_id in cached.resumed_req_ids
            self._step(message, out, request_id, cached.new_block_ids[i], cached.num_computed_tokens[i], anew=anew)
        for request_id in getattr(out, "preempted_req_ids", None) or ():
            self._forget(request_id)
        return message

    def _step(self, message: Message, out: Any, request_id: str, ids: Any, computed: int, *, anew: bool) -> None:
        """What one request was given, and what of it will be full when the step is over."""
        size = self._layout_tokens
        for group in ids or ():
            message.given.update(group[computed // size :] if anew else group)
        tracked = self.requests.get(request_id)
        if tracked is None:
            return
        if tracked.loading and not anew:  # loaded within the step before
            tracked.loading = False
            tracked.close()
        scheduled = out.num_scheduled_tokens[request_id]
        told = self.cache if isinstance(self.cache, Trial) else self._bound.get(tracked.who)
        self.steps.prompt(told, min(scheduled, tracked.request.num_prompt_tokens - computed))
        table = version.block_table(out, request_id)
        if table is not None:
            tracked.blocks = [list(group) for group in table]
        elif anew:
            tracked.blocks = [list(group) for group in ids]
        elif ids is not None:
            for mine, group in zip(tracked.blocks, ids, strict=True):
                mine.extend(group)
        if not self._stores or tracked.wishes.skip_store:
            return
        try:
            self._store(message, tracked, computed + scheduled)
        except Exception as error:  # noqa: BLE001  law: never in the way
            self.declined.failed(tracked, error)

    def _store(self, message: Message, tracked: Tracked, computed: int) -> None:
        assert self._model is not None
        size = self._layout_tokens
        # Drafts lie behind the tokens that are known, and are not counted among them.
        end = min(computed, tracked.request.num_tokens) // size
        end = min(end, len(tracked.digests.first(end)), *map(len, tracked.blocks))
        first = tracked.storable(self._model.of, min(tracked.stored, end), end)
        if first < end and isinstance(self.cache, Trial):
            self.cache.keep(tracked.who, tracked.digests.first(end)[first:end], self._model.block_bytes)
        elif first < end:
            message.stores.append(self._move(tracked, first, end))
        tracked.stored = max(tracked.stored, end)

    def sources(self, request: Any, tokens: int) -> dict[str, int]:
        """By tier, the tokens that a request was promised of ours."""
        tracked = self.requests.get(request.request_id)
        return {} if tracked is None or sum(tracked.sources.values()) != tokens else dict(tracked.sources)

    def _forget(self, request_id: str) -> None:
        tracked = self.requests.get(request_id)
        if tracked is not None:
            tracked.close()
            tracked.blocks, tracked.stored = [], 0

    def learned(self, invalid: set[int], failed: Sequence[str], arrived: Sequence[str]) -> None:
        """What a step brought: pages and requests whose load failed, requests whose load is over."""
        for request_id in arrived:
            if request_id in self.requests:
                tracked = self.requests[request_id]
                tracked.loading = False
                tracked.close()
        for request_id in failed:
            if request_id in self.requests:
                self.requests[request_id].failed = True
                self.requests[request_id].stored = 0
                self._healed.add(request_id)
        if not invalid:
            return
        for request_id, tracked in self.requests.items():
            for ids in tracked.blocks:
                bad = next((i for i, page in enumerate(ids) if page in invalid), None)
                if bad is not None:
                    tracked.failed = True
                    tracked.stored = min(tracked.stored, bad)
                    self._healed.add(request_id)

    def finished(self, request: Any) -> None:
        self.declined.over(request.request_id)
        tracked = self.requests.pop(request.request_id, None)
        if tracked is not None:
            tracked.close()

    def reset(self) -> bool:
        """What was stored until now is another namespace from now on: this engine finds none of it."""
        self._since = uuid.uuid4().hex
        self._bound.clear()
        if self.events is not None:
            quietly(None, self.events.forget)
        for request_id, tracked in list(self.requests.items()):
            tracked.close()
            del self.requests[request_id]
        return True

    def close(self) -> None:
        if self.events is not None:
            self.events.close()
        for tracked in self.requests.values():
            tracked.close()
        self.requests.clear()

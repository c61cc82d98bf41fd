"""Why a prefix ended where it did: one reason per request, for the first block that was not found.

The sources are the index, the ring of recent requests and the history of lost blocks. `reason` runs on every match with
a miss: a few lookups by name, and a few comparisons of 32 bytes with prompts of the same beginning. `explain` runs for
an operator and computes the rest: where two prompts diverge and meet again, and how two namespaces differ. `MissRecord`
is the state of one request.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import SIGNATURE_BYTES, digest_chain, tokens
from kvcache.block.namespace import Namespace
from kvcache.cache.operation import BlockTransfer
from kvcache.index.block_run import BlockRun
from kvcache.index.index import Index
from kvcache.log import RequestContext
from kvcache.observe.events import BlockFate, EvictionHistory
from kvcache.observe.metrics import Counters
from kvcache.observe.recent_requests import Ids, RecentRequest, RecentRequests, kept, shared_blocks, shared_tokens
from kvcache.os_env import Clock
from kvcache.tier.tier import Outcome

HEAD_MATCH_DIVISOR = 2
"""A prompt without a found block diverges from one that shares at least 1/HEAD_MATCH_DIVISOR of its first block."""
CONTEXT_TOKENS = 24
"""Tokens shown on each side of the divergence."""
RESYNC_GRAM_TOKENS, RESYNC_WINDOW_TOKENS = 8, 512
"""Two prompts meet again if 8 tokens in a row agree, within 512 tokens after the divergence."""

REASON_BY_OUTCOME: Mapping[str, str] = {
    "damaged": "refused",
    "foreign": "refused",
    "late": "late",
    "cancelled": "late",  # the engine has its own deadline
    "no_room": "no_room",
    "failed": "failed",
}
"""The miss reason for a found block that did not load, by the outcome of its load."""


class MissExplainer:
    """Finds miss reasons.

    `shared`: tiers whose contents are only partly known, so that a forgotten block is not lost.
    """

    def __init__(self, index: Index, clock: Clock, max_bytes: int, shared: Collection[str] = ()) -> None:
        self._index, self._clock, self._shared = index, clock, shared
        self.eviction_history, self.recent_requests = EvictionHistory(clock), RecentRequests(max_bytes)
        self._on_request: Callable[[RecentRequest], object] | None = None

    def subscribe(self, on_request: Callable[[RecentRequest], object]) -> None:
        """Call `on_request` with each admitted request; there is at most one subscriber."""
        self._on_request = on_request

    def admitted(self, request: RecentRequest) -> None:
        """Keep a request, and pass it to the subscriber."""
        self.recent_requests.add(request)
        if self._on_request is not None:
            self._on_request(request)

    def on_evicted(self, tier: str, signatures: Iterable[bytes]) -> None:
        """Note blocks evicted from the last tier that had them."""
        if tier not in self._shared:
            policy, clock = self._index.policy.name, self._index.clock
            self.eviction_history.add(signatures, "evicted", tier=tier, why=policy, clock=clock)

    def expired(self, tier: str, signatures: Iterable[bytes]) -> None:
        """Note blocks that expired."""
        self.eviction_history.add(signatures, "expired", tier=tier, why="ttl_s", clock=self._index.clock)

    def dropped(self, tier: str, signatures: Iterable[bytes], why: str, *, failed: bool = False) -> None:
        """Note blocks that were offered to a tier and not stored."""
        reason = "store_failed" if failed else "store_dropped"
        self.eviction_history.add(signatures, reason, tier=tier, why=why, clock=self._index.clock)

    def refused(self, tier: str, signature: bytes, check: str) -> None:
        """Note a record that failed a check in its tier."""
        self.eviction_history.add([signature], "refused", tier=tier, why=check, clock=self._index.clock)

    def reason(self, request: RecentRequest) -> str:
        """The reason for the first block of `asked` that was not found; "" if all were found."""
        if request.hit_blocks == request.blocks:
            return ""
        request.fate = self.eviction_history.find(request.signature(request.hit_blocks))
        if request.fate is not None:
            return request.fate.reason
        return "apart" if self._same_tokens_elsewhere(request) is not None else self.reason_within_namespace(request)

    def reason_within_namespace(self, request: RecentRequest) -> str:
        """As `reason`, for a block of unknown fate, without a look at other namespaces, whose contents are secret."""
        return "cold" if self._diverging_request(request) is None else "diverged"

    def _diverging_request(self, request: RecentRequest) -> RecentRequest | None:
        """The newest prompt that shares all found blocks and continues differently."""
        if request.hit_blocks:
            for other, shared in self._related(request):
                if shared == request.hit_blocks < other.blocks:
                    return other
            return None
        ours = request.tokens(0, request.block_tokens)
        for other in _earlier_requests(
            request, self.recent_requests.same_start(ours, {request.namespace}) if len(ours) else ()
        ):
            shared = shared_tokens(ours, other.tokens(0, request.block_tokens))
            if request.block_tokens // HEAD_MATCH_DIVISOR <= shared < request.block_tokens:
                return other
        return None

    def _related(self, request: RecentRequest) -> Iterator[tuple[RecentRequest, int]]:
        """Earlier prompts with the same first block, newest first, and the number of blocks that they share."""
        for other in _earlier_requests(
            request, self.recent_requests.same_head(request.namespace, request.signature(0))
        ):
            yield other, shared_blocks(request.packed, other.packed)

    def _same_tokens_elsewhere(
        self, request: RecentRequest, among: Collection[bytes] | None = None
    ) -> RecentRequest | None:
        """The newest prompt with the same tokens through the first missing block, whose blocks another namespace has.

        `among`: the namespaces to search; None for all.
        """
        end = (request.hit_blocks + 1) * request.block_tokens
        ours = request.tokens(0, end)
        for other in self.recent_requests.same_start(ours, among) if len(ours) else ():
            if other.namespace != request.namespace and np.array_equal(ours, other.tokens(0, end)):
                block = -(-end // other.block_tokens) - 1
                if block < other.blocks and any(
                    self._index.tier_masks(BlockRun(shard_key, other.signature(block)))[0]
                    for shard_key in other.shard_keys
                ):
                    return other
        return None

    # the full explanation

    def explain(
        self, request: RecentRequest, namespaces: Iterable[Namespace] = (), among: Collection[bytes] | None = None
    ) -> dict[str, Any]:
        """All that is known about a miss, in types that any message format supports. Token ids stand for text.

        `among`: the namespaces that the reader may know of. The explanation is as if there were no others.
        """
        now, first = self._clock.wall(), request.hit_blocks * request.block_tokens
        named = {namespace.id: namespace for namespace in namespaces}
        reason, same_tokens = (
            request.reason,
            self._same_tokens_elsewhere(request, among) if request.reason == "apart" else None,
        )
        if reason == "apart" and same_tokens is None and among is not None:
            reason = self.reason_within_namespace(request)
        explanation: dict[str, Any] = {
            "request": request.request,
            **{name: value for name, value in (("agent", request.agent), ("session", request.session)) if value},
            "time": request.time,
            "ago_s": now - request.time,
            "namespace": _namespace_summary(named.get(request.namespace), request.namespace),
            "block_tokens": request.block_tokens,
            "blocks": request.blocks,
            "found_blocks": request.hit_blocks,
            "reason": reason,
            "ids": request.tokens(first, first + CONTEXT_TOKENS).tolist(),
            **request.detail,
        }
        if reason in {"evicted", "expired", "store_dropped", "store_failed", "refused"}:
            explanation |= self._fate(request, now)
        elif reason == "diverged":
            other = self._diverging_request(request)
            explanation |= _divergence(request, other, now) if other is not None else {}
        elif same_tokens is not None:
            explanation["other"] = _request_summary(same_tokens, now)
            explanation["other"]["namespace"] = _namespace_summary(
                named.get(same_tokens.namespace), same_tokens.namespace
            )
            explanation["differs"] = _namespace_diff(named.get(request.namespace), named.get(same_tokens.namespace))
        elif reason == "cold":
            explanation |= self._earlier_request(request, now)
        return explanation

    def _fate(self, request: RecentRequest, now: float) -> dict[str, Any]:
        fate = request.fate or self.eviction_history.find(
            request.signature(request.hit_blocks)
        )  # a tier may report the fate after the load ended
        if fate is None:
            return {}
        explanation = {"tier": fate.tier, "why": fate.why, "lost_time": fate.time, "lost_ago_s": now - fate.time}
        used = self._last_use(request, fate)
        if used is not None:
            explanation |= {"age_requests": fate.clock - used.clock, "age_s": fate.time - used.time}
        return explanation

    def _last_use(self, request: RecentRequest, fate: BlockFate) -> RecentRequest | None:
        """The newest request before the loss whose prompt has this block."""
        found = (other for other, shared in self._related(request) if shared > request.hit_blocks)
        return next((other for other in found if other.clock <= fate.clock), None)

    def _earlier_request(self, request: RecentRequest, now: float) -> dict[str, Any]:
        """An earlier request for a block that is neither cached nor known to be lost."""
        found = next((other for other, shared in self._related(request) if shared > request.hit_blocks), None)
        return {} if found is None else {"other": _request_summary(found, now)}


def _earlier_requests(request: RecentRequest, others: Iterable[RecentRequest]) -> Iterator[RecentRequest]:
    return (other for other in others if other is not request and not (request.kept and other.clock > request.clock))


def _request_summary(request: RecentRequest, now: float) -> dict[str, Any]:
    return {"request": request.request, "time": request.time, "ago_s": now - request.time}


def _namespace_summary(namespace: Namespace | None, id: bytes) -> dict[str, Any]:
    if namespace is None:
        return {"id": id.hex()}
    fields = namespace.describe()
    return {name: fields[name] for name in ("id", "model", "revision", "adapter", "tenant", "cache_salt")}


def _namespace_diff(one: Namespace | None, other: Namespace | None) -> dict[str, list[str]]:
    """By field, both values. A salt is secret: only whether it is set is shown."""
    if one is None or other is None:
        return {}
    ours, theirs = _flat_fields(one), _flat_fields(other)
    found = {
        name: [str(ours.get(name)), str(theirs.get(name))]
        for name in sorted(ours.keys() | theirs.keys())
        if ours.get(name) != theirs.get(name)
    }
    if one.cache_salt != other.cache_salt:
        found["cache_salt"] = ["set" if each.cache_salt else "none" for each in (one, other)]
    return found


def _flat_fields(namespace: Namespace) -> dict[str, Any]:
    fields = namespace.describe()
    for name in ("facts", "layout"):
        inner = fields.pop(name)
        fields |= {f"{name}.{key}": value for key, value in inner.items()} if isinstance(inner, Mapping) else {}
    return {name: value for name, value in fields.items() if name not in {"id", "cache_salt"}}


def _divergence(request: RecentRequest, other: RecentRequest, now: float) -> dict[str, Any]:
    """Where two prompts diverge, the tokens there, and where they meet again."""
    first = request.hit_blocks * request.block_tokens
    ours, theirs = (
        request.tokens(first, first + RESYNC_WINDOW_TOKENS),
        other.tokens(first, first + RESYNC_WINDOW_TOKENS),
    )
    explanation: dict[str, Any] = {"other": _request_summary(other, now), "block": request.hit_blocks}
    if not len(ours) or not len(theirs):
        return explanation
    at = first + shared_tokens(ours, theirs)
    explanation |= {
        "token": at,
        "before": request.tokens(max(0, at - CONTEXT_TOKENS), at).tolist(),
        "ours": request.tokens(at, at + CONTEXT_TOKENS).tolist(),
        "theirs": other.tokens(at, at + CONTEXT_TOKENS).tolist(),
    }
    end = max(request.blocks * request.block_tokens, other.blocks * other.block_tokens)
    meet = resync_point(request.tokens(at, end), other.tokens(at, end))
    if meet is not None:
        explanation["meet"] = dict(zip(("ours", "theirs", "tokens"), meet, strict=True))
    return explanation


def resync_point(ours: Ids, theirs: Ids) -> tuple[int, int, int] | None:
    """Where two sequences that differ at their first token agree again.

    Returns:
        Tokens skipped of each, and how many equal tokens follow. None if they do not agree soon.
    """
    grams: dict[bytes, int] = {}
    for i in range(min(RESYNC_WINDOW_TOKENS, len(theirs) - RESYNC_GRAM_TOKENS + 1)):
        grams.setdefault(theirs[i : i + RESYNC_GRAM_TOKENS].tobytes(), i)
    best: tuple[int, int] | None = None
    for i in range(min(RESYNC_WINDOW_TOKENS, len(ours) - RESYNC_GRAM_TOKENS + 1)):
        if best is not None and i >= sum(best):
            break
        j = grams.get(ours[i : i + RESYNC_GRAM_TOKENS].tobytes())
        if j is not None and (best is None or i + j < sum(best)):
            best = i, j
    if best is None:
        return None
    return (*best, shared_tokens(ours[best[0] :], theirs[best[1] :]))


def hypothetical_request(
    packed: bytes,
    ids: Ids | None,
    *,
    namespace: bytes,
    shard_keys: list[bytes],
    block_tokens: int,
    clock: int,
    time: float,
) -> RecentRequest:
    """A prompt that no client has sent yet, for `explain`."""
    known = [ids[: len(packed) // SIGNATURE_BYTES * block_tokens]] if ids is not None else []
    return RecentRequest("", namespace, shard_keys, block_tokens, packed, clock, time, known)


# The missing part of one request's prompt: one reason, counted once. It is counted when the request stores or is
# closed, because a load may still bring less than was found.


class MissRecord:
    def __init__(
        self,
        miss_explainer: MissExplainer,
        counters: Counters,
        *,
        work: RequestContext,
        namespace: bytes,
        shard_keys: Sequence[bytes],
        block_tokens: int,
    ) -> None:
        self._miss_explainer, self._counters = miss_explainer, counters
        request, agent, session = work
        self._request = RecentRequest(
            request, namespace, shard_keys, block_tokens, b"", 0, 0.0, agent=agent, session=session
        )
        self._prompt_blocks = 0
        self._later_ids: list[NDArray[np.uint32]] = []
        self._loads: list[tuple[int, int, BlockTransfer]] = []  # rank, first block, transfer
        self._admitted = self._counted = False

    def look(
        self,
        packed: bytes,
        found: int,
        ids: NDArray[Any] | None = None,
        beside: Any = None,
        *,
        reason: str | None = None,
        **detail: Any,
    ) -> str:
        """Record that `found` blocks of this chain were found; the reason for the rest, as this client may know it.

        Args:
            ids: token ids of the chain's full blocks, if the chain is new.
            beside: tokens from the first one on, if the chain was given as digests.
            reason: a known reason other than that the next block is missing.
        """
        request = self._request
        if packed is not request.packed:
            if request.kept:  # another prompt in the same request
                cleared: dict[str, Any] = {"ids": [], "hit_blocks": 0, "reason": "", "fate": None, "detail": {}}
                self._request = request = replace(request, kept=False, **cleared)
            request.packed, request.ids, request.known_from = packed, [], 0
        request.hit_blocks, request.detail = found, detail
        if found == request.blocks:
            if not request.ids:
                request.known_from = found * request.block_tokens
            request.reason = reason or ""
            return request.reason
        if self._miss_explainer.recent_requests.max_bytes and ids is None and beside is not None:
            ids = tokens(beside)[: request.blocks * request.block_tokens]
        if ids is not None and self._miss_explainer.recent_requests.max_bytes:
            request.ids = [kept(ids)]
        request.reason = self._miss_explainer.reason(request) if reason is None else reason
        # an answer must not reveal what another tenant has stored
        return self._miss_explainer.reason_within_namespace(request) if request.reason == "apart" else request.reason

    def digest(self, parent: bytes, ids: NDArray[Any], block_tokens: int, extras: list[bytes] | None) -> bytes:
        """Hash the tokens after the prompt, and keep their ids for `extended`."""
        if self._miss_explainer.recent_requests.max_bytes:
            self._later_ids.append(kept(ids))
        return digest_chain(parent, ids, block_tokens, extras)

    def extended(self, packed: bytes) -> None:
        """Record that the chain has more blocks."""
        later_ids, self._later_ids = self._later_ids, []
        if packed is not self._request.packed:
            self._miss_explainer.recent_requests.grow(self._request, later_ids, packed)

    def add_token_ids(self, ids: Any) -> None:
        """Add the chain's tokens, from a client that hashes its own blocks.

        As `look`, for a request that was answered before.
        """
        request = self._request
        if request.hit_blocks < request.blocks and not request.kept and self._miss_explainer.recent_requests.max_bytes:
            request.ids, request.known_from = [kept(tokens(ids)[: request.blocks * request.block_tokens])], 0
            if request.reason in {"cold", "diverged"}:
                request.reason = self._miss_explainer.reason(request)

    def admit(self, clock: int, time: float) -> None:
        self._admitted = True
        request = self._request
        request.clock, request.time = clock, time
        self._prompt_blocks = request.blocks
        self._miss_explainer.admitted(request)

    def loading(self, rank: int, first_block: int, transfer: BlockTransfer) -> None:
        """Record a load. `rank`: any number, the same for successive loads of one rank."""
        self._loads.append((rank, first_block, transfer))

    def count(self) -> bool:
        """Count an admitted request once; True if this call counted it."""
        if not self._admitted or self._counted:
            return False
        self._counted = True
        request = self._request
        for _, first_block, transfer in self._loads:
            if transfer.failure is not None and first_block + transfer.failure[0] < request.hit_blocks:
                request.hit_blocks = first_block + transfer.failure[0]
                request.reason, request.detail = self._failed(request, transfer.failure[1])
        missed = self._prompt_blocks - request.hit_blocks
        if request.reason and missed > 0:
            self._counters.add("misses", reason=request.reason)
            self._counters.add("missed_tokens", missed * request.block_tokens, reason=request.reason)
        return True

    def loaded(self) -> tuple[int, int, float] | None:
        """The result of the loads, once: requested end block, blocks that every rank then had, and duration.

        None without loads. A rank that only loads the blocks that its scheduler found counts too.
        """
        loads, self._loads = self._loads, []
        if not loads:
            return None
        reached: dict[int, int] = {}
        seconds: dict[int, float] = {}
        for rank, first, load in loads:
            reached[rank] = max(reached.get(rank, 0), first + load.blocks)
            seconds[rank] = seconds.get(rank, 0.0) + load.seconds
        taken = max(first + len(load.outcomes) for _, first, load in loads)
        return taken, min(reached.values()), max(seconds.values())

    def _failed(self, request: RecentRequest, outcome: Outcome) -> tuple[str, dict[str, Any]]:
        """The reason why a found block did not load."""
        reason = REASON_BY_OUTCOME.get(outcome.value)
        request.fate = fate = self._miss_explainer.eviction_history.find(request.signature(request.hit_blocks))
        if reason is None:  # it was evicted between match and load, or the tier did not have it any more
            return ("refused", {"outcome": outcome.value}) if fate is None else (fate.reason, {})
        return reason, {"outcome": outcome.value}

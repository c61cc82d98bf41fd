"""The scheduler's state of one request, and the requests that run without the cache."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcache.cache.api import MAX_TTL_S, Hit, Request
from kvcache.connector.guard import call_guarded
from kvcache.connector.vllm.identity import BlockDigests, NamespaceKey
from kvcache.errors import AccessError, ConfigError, UnreachableError
from kvcache.observe.metrics import Counters


@dataclass
class RequestOptions:
    """The options of one request, given in `kv_transfer_params` under names that begin with `kvcache.`."""

    skip_load: bool = False
    skip_store: bool = False
    max_load_tokens: int | None = None
    tenant: str | None = None
    ttl: float | None = None
    agent: str | None = None
    session: str | None = None

    @classmethod
    def of(cls, params: Mapping[str, Any] | None) -> tuple[RequestOptions, str]:
        """Return the options, and a description of the invalid ones. An invalid option is ignored, never an error."""
        kinds = {"skip_load": bool, "skip_store": bool, "max_load_tokens": int, "ttl": float}
        found: dict[str, Any] = {}
        wrong = []
        for name, value in (params or {}).items():
            wish = name.removeprefix("kvcache.")
            if wish == name:
                continue
            given = float(value) if kinds.get(wish) is float and type(value) is int else value
            fits = wish in cls.__dataclass_fields__ and type(given) is kinds.get(wish, str)
            if wish == "ttl" and fits:
                fits = 0 < given < MAX_TTL_S
            if fits and not (type(given) in {int, float} and given < 0):
                found[wish] = given
            else:
                wrong.append(f"{name} = {value!r}")
        return cls(**found), ", ".join(wrong)


@dataclass
class RequestState:
    request: Any  # vLLM's request
    namespace_key: NamespaceKey
    digests: BlockDigests
    request_options: RequestOptions
    cache_request: Request | None = None
    hit: Hit | None = None
    matched_blocks: int = 0  # blocks that were matched
    local_tokens: int = 0  # at the last match: tokens that the engine has itself
    give_up_s: float = 0.0  # until when a lookup may be pending
    blocks: list[list[int]] = field(default_factory=list)  # page ids by vLLM's group
    stored: int = 0  # blocks stored, being stored, or not to be stored
    sent_digests: int = 0  # digests that the ranks have received
    loading: bool = False
    sources: dict[str, int] = field(default_factory=dict)  # tokens of the last load, by tier
    failed: bool = False  # a load failed: this request computes its blocks

    @property
    def cached(self) -> bool:
        """Whether any block of it was found, loaded or stored."""
        return bool(self.stored or self.sources)

    def first_storable(self, groups: Sequence[int], first: int, end: int) -> int:
        """Return the first block from which on each of these groups has its own page. Page 0 belongs to no block: it
        replaces pages that a sliding window has passed."""
        for g in groups:
            first = max([first, *(i + 1 for i in range(first, end) if self.blocks[g][i] == 0)])
        return first

    def disable_cache(self) -> None:
        """Continue without the cache."""
        self.request_options = RequestOptions(skip_load=True, skip_store=True)
        self.close()

    def close(self) -> None:
        if self.cache_request is not None:
            call_guarded(None, self.cache_request.close)
        self.cache_request = self.hit = None
        self.matched_blocks = 0


def tokens_by_tier(by_tier: Mapping[str, int], first: int, end: int, block_tokens: int) -> dict[str, int]:
    """Return the tokens of blocks `first` to `end`, by tier.

    `by_tier` holds numbers of blocks, fastest tier first. Tails are evicted before heads, so the fastest tier is
    assumed to hold the head.
    """
    found, at = {}, 0
    for tier, blocks in by_tier.items():
        mine = min(at + blocks, end) - max(at, first)
        if mine > 0:
            found[tier] = mine * block_tokens
        at += blocks
    return found


# Requests without the cache: each is counted once, by reason. Each kind is logged once, so that no caller can fill the
# log.

MAX_LOGGED_REASONS = 256
"""Limit of different log lines."""

_log = logging.getLogger("kvcache.connector.vllm")


class Uncached:
    def __init__(self) -> None:
        self.counters = Counters()  # the row `declined`
        self._requests: set[str] = set()  # counted and not finished
        self._said: set[str] = set()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def mark(self, request_id: str, reason: str, why: str = "") -> None:
        """Count a request as uncached.

        Args:
            reason: the label of the metric.
            why: text for the log, written once.
        """
        if request_id not in self._requests:
            self._requests.add(request_id)
            self.counters.add("declined", reason=reason)
        if why:
            self.log_once(f"request is not cached: {why}; later ones are counted only")

    def mark_failed(self, state: RequestState, error: Exception) -> None:
        """Continue a request without the cache after an error; a cache fault never fails a request. It is counted
        unless blocks of it were cached before."""
        kind = type(error).__name__
        what = "the rest of a request" if state.cached else "a request"
        if not state.cached:
            self.mark(state.request.request_id, _reason(error))
        state.disable_cache()
        self.log_once(f"{what} is not cached: {kind}: {error}; later errors of this kind are not logged", once=kind)

    def forget(self, request_id: str) -> None:
        self._requests.discard(request_id)

    def log_once(self, text: str, *, once: str = "") -> None:
        key = once or text
        if key not in self._said and len(self._said) < MAX_LOGGED_REASONS:
            self._said.add(key)
            _log.warning("%s", text)


def _reason(error: Exception) -> str:
    if isinstance(error, (AccessError, ConfigError)):
        return "refused"
    return "unreachable" if isinstance(error, UnreachableError) else "failed"

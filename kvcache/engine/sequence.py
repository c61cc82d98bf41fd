"""One request on its way through the engine, and what it came to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvcache.cache.api import Request, Transfer
from kvcache.engine.sampling import Sampler, SamplingParams

FinishReason = Literal["", "stop", "length", "abort"]
"""Why an answer ended: a stop token or string; no more tokens allowed; the caller's wish. Empty: it has not."""


class SequenceState(Enum):
    WAITING = "waiting"  # holds no pages
    LOADING = "loading"  # its pages are being filled from the cache
    RUNNING = "running"
    FINISHED = "finished"  # holds nothing


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. `token_ids` is the answer, an end token included; times are seconds from `add`.

    `reused` counts the prompt tokens that were not computed, by the tier they came from: `hbm` is the engine's own
    pool. What a preempted request finds again of its own work is not in it.
    """

    id: str
    token_ids: list[int]
    finish: FinishReason
    prompt_tokens: int
    reused: Mapping[str, int]
    start_s: float  # until it first held pages
    ttft_s: float  # until its first token
    total_s: float
    preemptions: int

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


@dataclass(eq=False, slots=True)
class Sequence:
    """Owned by the engine's thread. The keys and values of the first `computed` of its `tokens` are in its `pages`."""

    id: str
    arrival: int  # order of arrival, kept through preemption
    prompt_tokens: int
    tokens: list[int]  # prompt and answer
    end_tokens: int  # no more tokens than this, the prompt included
    params: SamplingParams
    sampler: Sampler
    added_s: float
    request: Request | None = None  # of the cache; None: nothing is reused
    state: SequenceState = SequenceState.WAITING
    finish: FinishReason = ""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    published: int = 0  # blocks from the front that the pool can be asked for
    stored: int = 0  # blocks from the front that the cache has, or was given
    hashed: int = 0  # tokens that the request of the cache knows
    transfer: Transfer | None = None  # the load under way, into the last of `pages`
    tiers: list[str] = field(default_factory=list)  # where the cache had each block when it was first found
    wait_until_s: float = 0.0  # the moment at which a load, or an unanswered lookup, is waited for no longer
    reused: dict[str, int] = field(default_factory=dict)
    start_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    preemptions: int = 0

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.prompt_tokens :]

    @property
    def missing(self) -> int:
        """Tokens to compute before the next one can be chosen; at least 1 while it runs."""
        return len(self.tokens) - self.computed

    def result(self) -> RequestOutput:
        return RequestOutput(
            id=self.id,
            token_ids=self.answer,
            finish=self.finish,
            prompt_tokens=self.prompt_tokens,
            reused=dict(self.reused),
            start_s=self.start_s,
            ttft_s=self.ttft_s,
            total_s=self.total_s,
            preemptions=self.preemptions,
        )

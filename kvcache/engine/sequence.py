"""The state of one request in the engine, and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

from kvcache.cache.api import Request, Transfer
from kvcache.engine.sampling import Sampler, SamplingParams

FinishReason = Literal["", "stop", "length", "abort"]
"""Why an answer ended: a stop token or string, the limit of tokens, or an abort. Empty while it runs."""


class SequenceState(Enum):
    WAITING = "waiting"  # holds no pages
    LOADING = "loading"  # its pages are being loaded from the cache
    RUNNING = "running"
    FINISHED = "finished"  # holds nothing


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A finished request. `token_ids` is the answer with its end token; times are seconds since `add`.

    `reused` counts the prompt tokens that were not computed, by tier; `hbm` is the engine's own pool. Blocks that a
    preempted request finds again are not counted.
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
    """A request in the engine. The keys and values of the first `computed` of its `tokens` are in its `pages`.

    Thread safety: owned by the engine's thread.
    """

    id: str
    arrival: int  # order of arrival, kept through preemption
    prompt_tokens: int
    tokens: list[int]  # prompt and answer
    end_tokens: int  # most tokens, the prompt included
    params: SamplingParams
    sampler: Sampler
    added_s: float
    request: Request | None = None  # of the cache; None: nothing is reused
    state: SequenceState = SequenceState.WAITING
    finish: FinishReason = ""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    published: int = 0  # leading blocks that the pool can find
    stored: int = 0  # leading blocks that the cache has or was given
    hashed: int = 0  # tokens that the cache's request has hashed
    transfer: Transfer | None = None  # the running load, into the last of `pages`
    tiers: list[str] = field(default_factory=list)  # tier of each block when it was first found
    wait_until_s: float = 0.0  # deadline of a load or a pending lookup
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
        """Number of tokens to compute before the next one can be chosen; at least 1 while it runs."""
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

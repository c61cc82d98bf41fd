"""A pass: a script played on an engine, one call after the other, and what it came to."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from kvcache.cli.demo.script import Script
from kvcache.engine.engine import Engine
from kvcache.engine.sampling import Params
from kvcache.engine.tokenizer import Tokenizer

TIERS = ("hbm", "host", "nvme")


@dataclass(frozen=True, slots=True)
class Call:
    """`reused`: prompt tokens that were not computed, by the tier they came from."""

    agent: str
    prompt_tokens: int
    reused: Mapping[str, int]
    ttft_s: float
    total_s: float
    token_ids: list[int]
    text: str

    @property
    def reused_tokens(self) -> int:
        return sum(self.reused.values())


@dataclass(slots=True)
class Pass:
    """`planned` calls, of which those in `calls` were played."""

    name: str
    about: str
    planned: int
    calls: list[Call] = field(default_factory=list)
    start_s: float = 0.0  # of a new process: until it could take the first call; no part of any call

    @property
    def request_s(self) -> float:
        """Time of all calls, the whole user request where all were played."""
        return sum(call.total_s for call in self.calls)

    @property
    def prompt_tokens(self) -> int:
        return sum(call.prompt_tokens for call in self.calls)

    @property
    def saved(self) -> float:
        """The part of the prompt tokens that was not computed."""
        return sum(call.reused_tokens for call in self.calls) / self.prompt_tokens if self.calls else 0.0

    def ttft_ms(self, percentile: float) -> float:
        """Between neighbours by distance, as numpy does."""
        return float(np.percentile([1000 * call.ttft_s for call in self.calls], percentile))

    def times_faster(self, other: Pass, time: Literal["ttft_s", "total_s"]) -> float:
        """How many times faster than the other in all, over the calls that both played."""
        both = list(zip(self.calls, other.calls, strict=False))
        mine, theirs = (sum(getattr(pair[i], time) for pair in both) for i in (0, 1))
        return float(theirs / mine)

    def plain(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "about": self.about,
            "planned": self.planned,
            "start_s": self.start_s,
            "prompt_tokens": self.prompt_tokens,
            "saved": self.saved,
            "ttft_ms": {f"p{p}": self.ttft_ms(p) for p in (50, 95, 99)},
            "request_s": self.request_s,
            "calls": [asdict(call) for call in self.calls],
        }


def play(script: Script, engine: Engine, tokenizer: Tokenizer, params: Params) -> Iterator[Call]:
    """Each call as it ends; a caller that stops asking ends the play."""
    answer: list[int] | None = None
    while True:
        try:
            prompt = next(script) if answer is None else script.send(answer)
        except StopIteration:
            return
        [result] = engine.generate([prompt.token_ids], params)
        answer = result.token_ids
        yield Call(
            agent=prompt.agent,
            prompt_tokens=result.prompt_tokens,
            reused=result.reused,
            ttft_s=result.ttft_s,
            total_s=result.total_s,
            token_ids=answer,
            text=tokenizer.decode(answer),
        )


def within(calls: Iterator[Call], budget_s: float | None) -> Iterator[Call]:
    """The calls that begin before the budget is spent; at least one."""
    end = None if budget_s is None else time.monotonic() + budget_s
    for call in calls:
        yield call
        if end is not None and time.monotonic() >= end:
            return


def differences(passes: Sequence[Pass]) -> list[str]:
    """Where a pass answered otherwise than the first did: its first such call, one line a pass."""
    found = []
    for other in passes[1:]:
        for number, (one, two) in enumerate(zip(passes[0].calls, other.calls, strict=False), 1):
            if one.token_ids != two.token_ids:
                found.append(f"call {number}: {other.name} answered {two.text!r}, {passes[0].name} {one.text!r}")
                break
    return found

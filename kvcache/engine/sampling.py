"""From logits to the next token: greedy, temperature, top-p; each request has a generator of its own.

One uniform number is drawn a token, whatever else is in the batch, so that the same seed gives the same choices from
the same logits wherever and with whomever the request runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from random import Random
from typing import TYPE_CHECKING

from kvcache.errors import ConfigError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """What a request asks of its answer. `temperature` 0 is greedy; `seed` None draws one.

    `stop`: the answer ends where one of these first appears in its text (the engine must have been given a decoder).
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ConfigError(f"max_tokens = {self.max_tokens}: expected at least 1")
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"temperature = {self.temperature}: expected 0 (greedy) or more")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p = {self.top_p}: expected more than 0, at most 1")
        if "" in self.stop:
            raise ConfigError("stop = '': expected strings of at least one character")


class Sampler:
    """Chooses the tokens of one request, in order."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._random = Random(params.seed)  # noqa: S311 a dice, not a secret

    @property
    def greedy(self) -> bool:
        return self._params.temperature == 0

    def draw(self, logits: torch.Tensor) -> int:
        """The next token from one row of logits, (vocab,): the first whose cumulated probability passes the draw,
        the likeliest counted first, within the shortest head that reaches `top_p`."""
        logits = logits.double().cpu()
        probabilities, order = (
            ((logits - logits.max()) / self._params.temperature).softmax(0).sort(descending=True, stable=True)
        )
        reached = probabilities.cumsum(0)
        last = min(int((reached < self._params.top_p).sum()), len(reached) - 1)
        drawn = self._random.random() * float(reached[last])
        return int(order[min(int((reached <= drawn).sum()), last)])


def sample_tokens(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """The next token of each row of logits, (R, vocab) float32; greedy: of equal ones the lowest id."""
    tokens: list[int] = logits.argmax(-1).tolist()
    return [token if s.greedy else s.draw(row) for token, s, row in zip(tokens, samplers, logits, strict=True)]

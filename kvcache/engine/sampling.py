"""From logits to the next token: greedy, temperature, top-p. Each request has its own random generator.

One uniform number is drawn for each token, for any batch. So the same seed gives the same choices from the same logits,
in any engine and beside any other requests.
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
    """Sampling parameters of a request. `temperature` 0 is greedy; `seed` None draws one.

    `stop`: the answer ends where one of these first appears in its text. The engine then needs a decoder.
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
        self._random = Random(params.seed)  # noqa: S311 not a secret

    @property
    def greedy(self) -> bool:
        return self._params.temperature == 0

    def draw(self, logits: torch.Tensor) -> int:
        """Return the next token from one row of logits, (vocab,).

        Tokens are ordered by probability, and cut after the first at which the sum reaches `top_p`. The result is the
        first whose cumulative probability exceeds the number drawn.
        """
        logits = logits.double().cpu()
        probabilities, order = (
            ((logits - logits.max()) / self._params.temperature).softmax(0).sort(descending=True, stable=True)
        )
        reached = probabilities.cumsum(0)
        last = min(int((reached < self._params.top_p).sum()), len(reached) - 1)
        drawn = self._random.random() * float(reached[last])
        return int(order[min(int((reached <= drawn).sum()), last)])


def sample_tokens(logits: torch.Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Return the next token of each row of logits, (R, vocab) float32. Greedy takes the lowest id of equal logits."""
    tokens: list[int] = logits.argmax(-1).tolist()
    return [token if s.greedy else s.draw(row) for token, s, row in zip(tokens, samplers, logits, strict=True)]

"""A hierarchy priced on a trace: how long until the first token, with every tier played by itself.

What a tier lacks comes to it from below or is computed, and enters it in both cases; so each tier lives as if it were
alone, and a block is read from the nearest that has it. Time is what reading takes at the tier's rate, then computing
the rest at the engine's; queues are not played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.errors import ConfigError
from kvcache.settings.types import parse_bytes
from kvcache.trace.simulate import simulate
from kvcache.trace.trace import Trace

RATES = {"hbm": 1e12, "host": 20e9, "nvme": 3e9, "redis": 1e9, "object": 0.3e9}
"""Bytes a second where none is given."""
_MOST_RATE = 1e18


@dataclass(frozen=True)
class Level:
    name: str
    capacity_bytes: int
    bytes_per_s: float

    @classmethod
    def parse(cls, text: str, rates: Mapping[str, float] = RATES) -> Level:
        """`host:64GiB`, or with a rate `nvme:2TiB@5GB`, else that in `rates`; ConfigError for what is none."""
        name, _, rest = text.strip().partition(":")
        size, _, rate = rest.partition("@")
        try:
            if name not in RATES or not size:
                raise ValueError(f"expected one of {', '.join(RATES)} and a size")
            return cls(name, parse_bytes(size), float(parse_bytes(rate)) if rate else rates.get(name, RATES[name]))
        except ValueError as error:
            raise ConfigError(
                f"tier {text!r}: {error}; write host:64GiB, or with a rate a second nvme:2TiB@5GB"
            ) from None


def measured(stats: Mapping[str, Any]) -> dict[str, float]:
    """By tier, the bytes a second that a running cache read of late: from what `kvcache stats --json` says.
    ConfigError where there is nothing of that, or what is there is no rate."""
    tiers = stats.get("tiers") if isinstance(stats, Mapping) else None
    rates = {}
    for name, tier in tiers.items() if isinstance(tiers, Mapping) else ():
        rate = tier.get("read_bytes_per_s") if isinstance(tier, Mapping) else None
        if rate is None or rate == 0:
            continue
        if not isinstance(rate, (int, float)) or not 0 < rate <= _MOST_RATE:
            raise ConfigError(
                f"tiers.{name}.read_bytes_per_s = {rate!r}: expected a number of bytes a second, as "
                "`kvcache stats --json` says it"
            )
        rates[name] = float(rate)
    if not rates:
        raise ConfigError("no tier was read of late: expected what `kvcache stats --json` says of a cache at work")
    return rates


@dataclass(frozen=True)
class Priced:
    found: dict[str, float]
    """By tier, the share of all blocks that came from it."""
    first_token_s: NDArray[np.float64]
    """By request."""
    without_s: NDArray[np.float64]
    """As it would be with nothing kept."""


def price(trace: Trace, levels: Sequence[Level], policy: str, *, token_bytes: int, prefill_per_s: float) -> Priced:
    """Nearest tier first. `prefill_per_s`: tokens that the engine computes in a second."""
    block_bytes = token_bytes * trace.block_tokens
    reached = np.zeros(len(trace), np.int64)
    time = np.zeros(len(trace))
    found = {}
    for level in levels:
        capacity = max(1, level.capacity_bytes // block_bytes)
        here = np.maximum(simulate(trace, policy, capacity).hits, reached)
        time += (here - reached) * block_bytes / level.bytes_per_s
        found[level.name] = float((here - reached).sum()) / max(1, trace.accesses)
        reached = here
    left = np.maximum(trace.input_tokens - reached * trace.block_tokens, 1)  # the last token is always computed
    return Priced(found, time + left / prefill_per_s, trace.input_tokens / prefill_per_s)

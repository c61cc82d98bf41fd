"""Replays a trace against a real cache: real memory, drive and threads, with arrivals to scale. Only computing is
simulated, by a pause.

One engine serves the requests in order of arrival, one at a time. It matches, loads, computes the missing tokens at a
given rate (that is, sleeps), and stores. A block's bytes are made from its name, so each loaded block is compared with
the stored one.
"""

from __future__ import annotations

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvcache.block.layout import KVLayout
from kvcache.cache.api import KVCache
from kvcache.errors import ConfigError
from kvcache.transfer.pages import GroupPages

DEFAULT_BLOCK_TOKENS = 512
"""Tokens of a block, where a trace does not contain it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    time_s: float  # since the first one
    names: NDArray[np.int64]  # of its blocks, each of the whole prefix
    tokens: int


@dataclass(slots=True)
class ReplayResult:
    """Times to the first token in seconds, and the times that computing alone would have taken."""

    ttft_s: list[float] = field(default_factory=list)
    tokens: int = 0
    hit_tokens: Counter[str] = field(default_factory=Counter)  # tokens, by tier
    loaded_tokens: int = 0
    wrong_blocks: int = 0  # with other bytes than were stored: must be 0


class ReplayClock(Protocol):
    """A clock that can sleep."""

    def now(self) -> float: ...
    def sleep(self, seconds: float) -> None: ...


class WallClock:
    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(max(0.0, seconds))


def read_arrivals(path: Path, max_requests: int | None = None) -> tuple[list[Arrival], int]:
    """Return the arrivals of a trace of JSON lines (`.gz` or not), and the tokens of a block.

    The format is Mooncake's, or that of a cache's recorder. ConfigError for other files.
    """
    arrivals: list[Arrival] = []
    block_tokens = 0
    for number, row in enumerate(_rows(path), 1):
        if max_requests is not None and number > max_requests:
            break
        try:
            row_block_tokens = int(row.get("block_tokens", DEFAULT_BLOCK_TOKENS))
            names = np.asarray(row["hash_ids"], np.int64)
            arrivals.append(Arrival(float(row["timestamp"]) / 1000, names, int(row["input_length"])))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{path}, line {number}: {error!r}: expected timestamp (ms), input_length and hash_ids"
            ) from None
        if block_tokens not in (0, row_block_tokens):
            raise ConfigError(
                f"{path}, line {number}: blocks of {row_block_tokens} tokens, of {block_tokens} before: one size only"
            )
        block_tokens = row_block_tokens
    if not arrivals:
        raise ConfigError(f"{path}: found no requests; expected JSON lines")
    first = min(arrival.time_s for arrival in arrivals)
    moved = [Arrival(a.time_s - first, a.names, a.tokens) for a in arrivals]
    return sorted(moved, key=lambda a: a.time_s), block_tokens


def _rows(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                try:
                    yield json.loads(text)
                except ValueError as error:
                    raise ConfigError(f"{path}, line {number}: not JSON ({error})") from None


class Replay:
    """Replays arrivals.

    Args:
        token_bytes: bytes of keys and values of a token, a multiple of 4.
        tokens_a_second: the rate at which the engine computes.
    """

    def __init__(
        self,
        cache: KVCache,
        *,
        block_tokens: int,
        max_blocks: int,
        token_bytes: int,
        prefill_tokens_per_s: float,
        speed: float = 1.0,
        clock: ReplayClock | None = None,
    ) -> None:
        layout = KVLayout.mha(layers=1, kv_heads=1, head_dim=token_bytes // 4, dtype="fp16", block_tokens=block_tokens)
        self._handle = cache.namespace(layout, model="replay", revision="1", facts={"digests": "a trace's hash ids"})
        self._kv = np.zeros((1, 2, max_blocks, block_tokens, 1, token_bytes // 4), np.uint16)
        self._pages = [GroupPages.from_tensors(layout, list(self._kv), axes=("kv", "page", "token", "head", "dim"))]
        self._block_tokens, self._rate, self._speed = block_tokens, prefill_tokens_per_s * speed, speed
        self._clock = clock or WallClock()

    def run(self, arrivals: Sequence[Arrival]) -> ReplayResult:
        result, clock = ReplayResult(), self._clock
        begun = clock.now()
        for arrival in arrivals:
            at = begun + arrival.time_s / self._speed
            clock.sleep(at - clock.now())
            self._serve(arrival, at, result)
        return result

    def _serve(self, arrival: Arrival, at: float, result: ReplayResult) -> None:
        clock = self._clock
        full = min(len(arrival.names), arrival.tokens // self._block_tokens)
        names = arrival.names[:full]
        with self._handle.request() as r:
            hit = r.match(digests=[int(name).to_bytes(16, "little", signed=True) for name in names])
            while hit.pending:
                clock.sleep(0.001)
                hit = r.match()
            r.admit()
            result.hit_tokens.update({tier: blocks * self._block_tokens for tier, blocks in hit.by_tier.items()})
            load = r.load(hit.blocks, self._pages, [list(range(hit.blocks))])
            load.wait()
            loaded_blocks = load.blocks
            result.wrong_blocks += self._count_wrong_blocks(names[:loaded_blocks])
            missing = max(1, arrival.tokens - loaded_blocks * self._block_tokens)
            before = clock.now()
            clock.sleep(missing / self._rate)
            result.ttft_s.append(clock.now() - at)
            self._handle.computed(missing, clock.now() - before)
            self._write(names, loaded_blocks)
            r.store(self._pages, [list(range(loaded_blocks, full))], first_block=loaded_blocks).wait()
        result.tokens += arrival.tokens
        result.loaded_tokens += loaded_blocks * self._block_tokens

    def _write(self, names: NDArray[np.int64], first: int) -> None:
        self._kv[0, :, first : len(names)] = _block_pattern(names[first:])

    def _count_wrong_blocks(self, names: NDArray[np.int64]) -> int:
        loaded = self._kv[0, :, : len(names)]
        return int((loaded != _block_pattern(names)).any(axis=(0, 2, 3, 4)).sum())


def _block_pattern(names: NDArray[np.int64]) -> Any:
    """Return the number that fills each block: shape (blocks, 1, 1, 1)."""
    mixed = names.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(48)).astype(np.uint16)[:, None, None, None]

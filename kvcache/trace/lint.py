"""Reports how much a log of prompts would reuse, and what limits it, from token ids alone and without a cache.

Prompts are compared in order with all earlier ones, with unlimited memory: the upper bound for any cache of whole
blocks. Where a prompt differs from an earlier one and soon continues like it, the text between breaks the prefix.
Everything behind the break is computed again. Breaks are grouped by the text that follows them. Then the prompts are
replayed with each break moved to their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import Chain
from kvcache.cache.miss_explainer import RESYNC_GRAM_TOKENS, RESYNC_WINDOW_TOKENS, resync_point
from kvcache.observe.recent_requests import Ids, shared_tokens

MIN_REPEAT_TOKENS = 16
"""Length of a run of tokens that counts as repeated, at any position."""
MAX_ROUNDS = 4
"""Limit of breaks that are searched behind one another."""
MIN_LOST_TOKENS = 64
"""Breaks that cost fewer tokens in all are not reported."""


@dataclass(frozen=True, slots=True)
class PrefixBreak:
    """A break: at `token` the prompt has `ours`, an earlier one `theirs`. `lost_tokens` equal tokens follow."""

    prompt: int
    token: int
    before: Ids
    ours: Ids
    theirs: Ids
    following: Ids  # the first tokens that are equal again
    lost_tokens: int


@dataclass(slots=True)
class BreakGroup:
    """Breaks with the same text behind them, that of the first of `breaks`. `first` is the earliest token at which one
    of them differs."""

    breaks: list[PrefixBreak] = field(default_factory=list)

    @property
    def lost_tokens(self) -> int:
        return sum(item.lost_tokens for item in self.breaks)

    @property
    def first(self) -> int:
        return min(item.token for item in self.breaks)

    @property
    def end(self) -> int:
        return max(item.token + len(item.ours) for item in self.breaks)


@dataclass(frozen=True, slots=True)
class ReuseStats:
    """The reuse of a log. `hit_tokens` counts full blocks that an earlier prompt had, with the same prefix."""

    tokens: int
    hit_tokens: int
    breaks: list[PrefixBreak]

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class LintReport:
    prompts: int
    tokens: int
    repeated_tokens: int
    rate: float
    moved_rate: float
    groups: list[BreakGroup]  # the most expensive first


def lint_prompts(prompts: Sequence[Ids], block_tokens: int) -> LintReport:
    first = measure_reuse(prompts, block_tokens)
    found: list[BreakGroup] = []
    moved, now = list(prompts), first
    for _ in range(MAX_ROUNDS):
        groups = group_breaks(now.breaks)
        if not groups:
            break
        candidate = [_with_breaks_last(ids, groups) for ids in moved]
        after = measure_reuse(candidate, block_tokens)
        if after.hit_tokens <= now.hit_tokens:
            break
        found += groups
        moved, now = candidate, after
    found.sort(key=lambda group: -group.lost_tokens)
    return LintReport(len(prompts), first.tokens, count_repeated_tokens(prompts), first.rate, now.rate, found)


def measure_reuse(prompts: Sequence[Ids], block_tokens: int) -> ReuseStats:
    """Compare each prompt with all earlier ones."""
    last: dict[bytes, int] = {}  # signature: last prompt with this block
    starts: dict[bytes, int] = {}  # first tokens: prompt, for prompts that share less than a block
    tokens = hits = 0
    breaks: list[PrefixBreak] = []
    for number, ids in enumerate(prompts):
        tokens += len(ids)
        chain = Chain(bytes(32), block_tokens)
        chain.extend(ids)
        signatures = list(chain.signatures)
        found = next((i for i, signature in enumerate(signatures) if signature not in last), len(signatures))
        hits += found * block_tokens
        start = ids[:RESYNC_GRAM_TOKENS].tobytes()
        other = last[signatures[found - 1]] if found else starts.get(start)
        if other is not None and found < len(signatures):
            made = _find_break(number, ids, prompts[other], found * block_tokens)
            if made is not None:
                breaks.append(made)
        last.update(dict.fromkeys(signatures, number))
        starts[start] = number
    return ReuseStats(tokens, hits, breaks)


def _find_break(number: int, ids: Ids, other: Ids, shared: int) -> PrefixBreak | None:
    at = shared + shared_tokens(ids[shared:], other[shared:])
    meeting_point = resync_point(ids[at:], other[at:])
    if meeting_point is None or meeting_point[2] < MIN_REPEAT_TOKENS:
        return None
    ours, theirs, lost_tokens = meeting_point
    return PrefixBreak(
        number,
        at,
        ids[max(0, at - 6 * RESYNC_GRAM_TOKENS) : at],
        ids[at : at + ours],
        other[at : at + theirs],
        ids[at + ours : at + ours + RESYNC_GRAM_TOKENS],
        lost_tokens,
    )


def group_breaks(breaks: Sequence[PrefixBreak]) -> list[BreakGroup]:
    """Group breaks by the text behind them, most expensive first.

    Two prompts may differ within the same text and share part of it by chance. They seem to continue earlier, and
    belong to the group of the whole text.
    """
    by_text: dict[bytes, BreakGroup] = {}
    for item in breaks:
        by_text.setdefault(item.following.tobytes(), BreakGroup()).breaks.append(item)
    groups: list[BreakGroup] = []
    for group in sorted(by_text.values(), key=lambda group: -group.lost_tokens):
        whole = next((other for other in groups if other.first <= group.first <= other.end), None)
        if whole is None:
            groups.append(group)
        else:
            whole.breaks += group.breaks
    return [group for group in groups if group.lost_tokens >= MIN_LOST_TOKENS]


def _with_breaks_last(ids: Ids, groups: Sequence[BreakGroup]) -> Ids:
    """Return the tokens with the breaking texts moved to the end."""
    kept: list[Ids] = []
    moved_parts: list[Ids] = []
    at = 0
    for group in sorted(groups, key=lambda group: group.first):
        first = group.first
        if first < at:
            continue
        following = group.breaks[0].following
        for end in _occurrences(ids[first : first + RESYNC_WINDOW_TOKENS + RESYNC_GRAM_TOKENS], following):
            kept.append(ids[at:first])
            moved_parts.append(ids[first : first + end])
            at = first + end
            break
    return np.concatenate([*kept, ids[at:], *moved_parts]) if moved_parts else ids


def _occurrences(ids: Ids, following: Ids) -> Iterator[int]:
    """Yield the positions of `following` in `ids`, in order."""
    if len(ids) < len(following) or not len(following):
        return
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(following))
    yield from np.flatnonzero((windows == following).all(axis=1)).tolist()


def count_repeated_tokens(prompts: Sequence[Ids]) -> int:
    """Return the tokens in runs that an earlier prompt had, at any position in either: the upper bound for reuse beyond
    prefixes.

    Of earlier prompts every `STRETCH`th run is remembered. The ends of a long repetition are missed by up to `STRETCH`
    - 1 tokens, and one shorter than two runs may be missed whole.
    """
    known: set[int] = set()
    total = 0
    for ids in prompts:
        hashes = _hashes(ids)
        marks = np.zeros(len(ids) + 1, np.int64)
        for i in [i for i, value in enumerate(hashes.tolist()) if value in known]:
            marks[i] += 1
            marks[i + MIN_REPEAT_TOKENS] -= 1
        total += int((np.cumsum(marks[:-1]) > 0).sum())
        known.update(hashes[::MIN_REPEAT_TOKENS].tolist())
    return total


def _hashes(ids: Ids) -> NDArray[np.uint64]:
    """Return a hash of each run, by its first token."""
    count = len(ids) - MIN_REPEAT_TOKENS + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value = np.zeros(count, np.uint64)
    for i in range(MIN_REPEAT_TOKENS):
        value = value * np.uint64(0x100000001B3) + (mixed[i : i + count] ^ (mixed[i : i + count] >> np.uint64(29)))
    return value

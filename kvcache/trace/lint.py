"""What a log of prompts would reuse, and what keeps it from more: by token ids alone, without a cache.

Prompts are taken in their order, against all that came before them: with unlimited memory, that is the most that any
cache of whole blocks can give. Where one parts from an earlier prompt and soon goes on like it, what stands between
breaks the prefix, and everything behind it is computed again. Such breaks are gathered by the text that follows them,
and the prompts are played once more with each break at their end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import Chain
from kvcache.cache.miss_explainer import GRAM, WINDOW, meeting
from kvcache.observe.recent_requests import Ids, shared_tokens

STRETCH = 16
"""Tokens in a row that count as repeated, wherever they stand."""
ROUNDS = 4
"""Behind one break there may be another; so many are looked for one after another."""
LEAST_TOKENS = 64
"""Breaks that cost fewer tokens in all are not told."""


@dataclass(frozen=True, slots=True)
class Break:
    """`ours` of a prompt that parted from an earlier one (`theirs`) at this token, `lost` alike tokens before more."""

    prompt: int
    token: int
    before: Ids
    ours: Ids
    theirs: Ids
    behind: Ids  # the first tokens that are alike again
    lost: int


@dataclass(slots=True)
class Group:
    """Breaks with the same text behind them, that of the first of `breaks`; `first`: the earliest token at which one of
    them parts."""

    breaks: list[Break] = field(default_factory=list)

    @property
    def lost(self) -> int:
        return sum(each.lost for each in self.breaks)

    @property
    def first(self) -> int:
        return min(each.token for each in self.breaks)

    @property
    def end(self) -> int:
        return max(each.token + len(each.ours) for each in self.breaks)


@dataclass(frozen=True, slots=True)
class Play:
    """`hit_tokens`: of full blocks that an earlier prompt had, from its first token on."""

    tokens: int
    hit_tokens: int
    breaks: list[Break]

    @property
    def rate(self) -> float:
        return self.hit_tokens / self.tokens if self.tokens else 0.0


@dataclass(frozen=True, slots=True)
class Report:
    prompts: int
    tokens: int
    repeated_tokens: int
    rate: float
    moved_rate: float
    groups: list[Group]  # the dearest first


def report(prompts: Sequence[Ids], block_tokens: int) -> Report:
    first = play(prompts, block_tokens)
    found: list[Group] = []
    moved, now = list(prompts), first
    for _ in range(ROUNDS):
        groups = gather(now.breaks)
        if not groups:
            break
        tried = [_moved(ids, groups) for ids in moved]
        after = play(tried, block_tokens)
        if after.hit_tokens <= now.hit_tokens:
            break
        found += groups
        moved, now = tried, after
    found.sort(key=lambda group: -group.lost)
    return Report(len(prompts), first.tokens, repeated(prompts), first.rate, now.rate, found)


def play(prompts: Sequence[Ids], block_tokens: int) -> Play:
    """Each prompt against all before it."""
    last: dict[bytes, int] = {}  # by signature, the last prompt that had the block
    starts: dict[bytes, int] = {}  # by the first tokens, for prompts that share less than a block
    tokens = hits = 0
    breaks: list[Break] = []
    for number, ids in enumerate(prompts):
        tokens += len(ids)
        chain = Chain(bytes(32), block_tokens)
        chain.extend(ids)
        signatures = list(chain.signatures)
        found = next((i for i, signature in enumerate(signatures) if signature not in last), len(signatures))
        hits += found * block_tokens
        start = ids[:GRAM].tobytes()
        other = last[signatures[found - 1]] if found else starts.get(start)
        if other is not None and found < len(signatures):
            made = _break(number, ids, prompts[other], found * block_tokens)
            if made is not None:
                breaks.append(made)
        last.update(dict.fromkeys(signatures, number))
        starts[start] = number
    return Play(tokens, hits, breaks)


def _break(number: int, ids: Ids, other: Ids, shared: int) -> Break | None:
    at = shared + shared_tokens(ids[shared:], other[shared:])
    met = meeting(ids[at:], other[at:])
    if met is None or met[2] < STRETCH:
        return None
    ours, theirs, lost = met
    return Break(
        number,
        at,
        ids[max(0, at - 6 * GRAM) : at],
        ids[at : at + ours],
        other[at : at + theirs],
        ids[at + ours : at + ours + GRAM],
        lost,
    )


def gather(breaks: Sequence[Break]) -> list[Group]:
    """By the text behind them, the dearest first. Two that part within the same text, and have a part of it in common
    by chance, seem to go on earlier: they belong to the group whose text that is."""
    by_text: dict[bytes, Group] = {}
    for each in breaks:
        by_text.setdefault(each.behind.tobytes(), Group()).breaks.append(each)
    groups: list[Group] = []
    for group in sorted(by_text.values(), key=lambda group: -group.lost):
        whole = next((other for other in groups if other.first <= group.first <= other.end), None)
        if whole is None:
            groups.append(group)
        else:
            whole.breaks += group.breaks
    return [group for group in groups if group.lost >= LEAST_TOKENS]


def _moved(ids: Ids, groups: Sequence[Group]) -> Ids:
    """With what breaks it at its end."""
    kept: list[Ids] = []
    aside: list[Ids] = []
    at = 0
    for group in sorted(groups, key=lambda group: group.first):
        first = group.first
        if first < at:
            continue
        behind = group.breaks[0].behind
        for end in _places(ids[first : first + WINDOW + GRAM], behind):
            kept.append(ids[at:first])
            aside.append(ids[first : first + end])
            at = first + end
            break
    return np.concatenate([*kept, ids[at:], *aside]) if aside else ids


def _places(ids: Ids, behind: Ids) -> Iterator[int]:
    """Where that stands, the nearest first."""
    if len(ids) < len(behind) or not len(behind):
        return
    windows = np.lib.stride_tricks.sliding_window_view(ids, len(behind))
    yield from np.flatnonzero((windows == behind).all(axis=1)).tolist()


def repeated(prompts: Sequence[Ids]) -> int:
    """Tokens in stretches that an earlier prompt had, wherever they stand in either: what reuse of more than prefixes
    could reach at most. Of earlier prompts every `STRETCH`th stretch is remembered, so that the ends of a long
    repetition are missed by up to `STRETCH` - 1 tokens, and one shorter than two stretches may be missed whole."""
    known: set[int] = set()
    total = 0
    for ids in prompts:
        hashes = _hashes(ids)
        marks = np.zeros(len(ids) + 1, np.int64)
        for i in [i for i, value in enumerate(hashes.tolist()) if value in known]:
            marks[i] += 1
            marks[i + STRETCH] -= 1
        total += int((np.cumsum(marks[:-1]) > 0).sum())
        known.update(hashes[::STRETCH].tolist())
    return total


def _hashes(ids: Ids) -> NDArray[np.uint64]:
    """Of each stretch, by its first token."""
    count = len(ids) - STRETCH + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    value = np.zeros(count, np.uint64)
    for i in range(STRETCH):
        value = value * np.uint64(0x100000001B3) + (mixed[i : i + count] ^ (mixed[i : i + count] >> np.uint64(29)))
    return value

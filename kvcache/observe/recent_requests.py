"""The prompts that were asked for last, so that a miss can be held against what came before it.

A bounded ring of requests: the signatures of each (which its request has anyway, so that keeping them copies nothing),
and its token ids where not all of it was found: those cost a copy, which is nothing beside the prefill that follows.
Ids never leave the process but through `kvcache explain`, asked by the same user."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import SIGNATURE_BYTES
from kvcache.observe.events import BlockFate

MAX_REQUESTS = 1024
MAX_COMPARED_REQUESTS = 64
"""How many earlier prompts with the same beginning one is compared with, the newest first."""
_HEAD_TOKENS = 4  # tokens that file a prompt of whose blocks none was found

Ids = NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class RecentRequest:
    """One request. `reason` and what stands below it are of the first block that was not found, and change until the
    request has begun to compute."""

    request: str
    namespace: bytes
    places: Sequence[bytes]  # what the index knows its groups by
    block_tokens: int
    packed: bytes
    clock: int  # in requests
    time: float  # seconds since 1970
    ids: list[Ids] = field(default_factory=list)  # of full blocks, from `known_from` on
    known_from: int = 0
    found: int = 0
    reason: str = ""
    fate: BlockFate | None = None  # of that block, as it was remembered then
    detail: dict[str, Any] = field(default_factory=dict)
    kept: bool = False  # in the ring
    agent: str = ""  # that the request named
    session: str = ""

    @property
    def blocks(self) -> int:
        return len(self.packed) // SIGNATURE_BYTES

    def signature(self, block: int) -> bytes:
        return self.packed[block * SIGNATURE_BYTES : (block + 1) * SIGNATURE_BYTES]

    def tokens(self, first: int, end: int) -> Ids:
        """Those that are known of tokens `first` to `end` (excluded); nothing where the first of them is not."""
        ids = list(self.ids)
        if first < self.known_from or not ids:
            return np.empty(0, np.uint32)
        first, end = first - self.known_from, end - self.known_from
        return (ids[0] if end <= len(ids[0]) else np.concatenate(ids))[first:end]

    @property
    def start(self) -> bytes:
        return self.tokens(0, _HEAD_TOKENS).tobytes()

    @property
    def size_bytes(self) -> int:
        return len(self.packed) + sum(ids.nbytes for ids in self.ids)


def shared_blocks(one: bytes, other: bytes) -> int:
    """How many blocks two chains of packed signatures share: each signature stands for all before it."""
    low, high = 0, min(len(one), len(other)) // SIGNATURE_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * SIGNATURE_BYTES, middle * SIGNATURE_BYTES)
        low, high = (middle, high) if one[at] == other[at] else (low, middle - 1)
    return low


def shared_tokens(one: Ids, other: Ids) -> int:
    """How many tokens two sequences share from the first on."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def kept(ids: NDArray[Any]) -> Ids:
    """Token ids that stay as they are, whatever the caller does with his buffer: a copy, but for memory that nobody can
    change, as that of a list which was packed."""
    root: Any = ids
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    return ids if ids.dtype == np.uint32 and isinstance(root, bytes) else np.array(ids, np.uint32)


class RecentRequests:
    """Thread-safe. The oldest leave when there are `requests` of them, or more than `most_bytes`."""

    def __init__(self, max_bytes: int, requests: int = MAX_REQUESTS) -> None:
        self.max_bytes, self._requests = max_bytes, requests
        self._ring: deque[RecentRequest] = deque()
        self._heads: dict[tuple[bytes, bytes], deque[RecentRequest]] = {}  # by namespace and first signature
        self._starts: dict[bytes, deque[RecentRequest]] = {}  # by the first token ids
        self._size_bytes = 0
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._ring)

    def add(self, recent: RecentRequest) -> None:
        """One that is too large by itself is not kept."""
        if not recent.blocks or recent.size_bytes > self.max_bytes:
            return
        with self._lock:
            self._ring.append(recent)
            recent.kept = True
            self._size_bytes += recent.size_bytes
            self._heads.setdefault((recent.namespace, recent.signature(0)), deque()).append(recent)
            if recent.start:
                self._starts.setdefault(recent.start, deque()).append(recent)
            self._trim()

    def grow(self, recent: RecentRequest, ids: Sequence[Ids], packed: bytes) -> None:
        """The request went on: its answer became blocks."""
        with self._lock:
            before = recent.size_bytes
            recent.ids += ids
            recent.packed = packed
            if recent.kept:
                self._size_bytes += recent.size_bytes - before
                self._trim()

    def _trim(self) -> None:
        while len(self._ring) > self._requests or self._size_bytes > self.max_bytes:
            oldest = self._ring.popleft()
            oldest.kept = False
            self._size_bytes -= oldest.size_bytes
            self._leave(self._heads, (oldest.namespace, oldest.signature(0)), oldest)
            if oldest.start:
                self._leave(self._starts, oldest.start, oldest)

    @staticmethod
    def _leave(filed: dict[Any, deque[RecentRequest]], key: Any, recent: RecentRequest) -> None:
        filed[key].remove(recent)  # the first of them, as a rule
        if not filed[key]:
            del filed[key]

    def last(self) -> list[RecentRequest]:
        """The newest first."""
        with self._lock:
            return list(reversed(self._ring))

    def find(self, request: str) -> RecentRequest | None:
        """The newest request of that id."""
        return next((recent for recent in self.last() if recent.request == request), None)

    def same_head(self, namespace: bytes, signature: bytes) -> list[RecentRequest]:
        """Those that begin with this block, the newest first."""
        with self._lock:
            return list(islice(reversed(self._heads.get((namespace, signature), ())), MAX_COMPARED_REQUESTS))

    def same_start(self, ids: Ids, among: Collection[bytes] | None = None) -> Iterator[RecentRequest]:
        """Those that begin with these tokens, of these namespaces, or of all; the newest first."""
        with self._lock:
            filed = reversed(self._starts.get(ids[:_HEAD_TOKENS].tobytes(), deque()))
            found = list(
                islice((each for each in filed if among is None or each.namespace in among), MAX_COMPARED_REQUESTS)
            )
        return iter(found)


# What kind of text breaks a prefix: a timestamp, an id, a counter, by its form. Two prompts agree up to a character
# and part there. Where the text around it has one of a few forms in both of them, and is not the same in both, that
# is what keeps the rest from being found.

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*"
_DATE = (
    rf"(?:\d{{4}}-\d\d?-\d\d?|\d\d?[./]\d\d?[./]\d{{2,4}}|\d\d? {_MONTH},? \d{{4}}|"
    rf"{_MONTH} \d\d?(?:st|nd|rd|th)?,? \d{{4}})"
)
_TIME = r"\d\d?:\d\d(?::\d\d(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b)?(?:Z|\s?(?:UTC|GMT)|[+-]\d\d:?\d\d)?"

TEXT_FORMS: Mapping[str, re.Pattern[str]] = {
    name: re.compile(pattern)
    for name, pattern in {
        "a timestamp": rf"(?:{_DAY},? )?{_DATE}(?:[T ,]+(?:at )?)?{_TIME}",
        "a date": rf"(?:{_DAY},? )?{_DATE}|{_DAY}\b",
        "a time of day": _TIME,
        "a UUID": r"\b[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}\b",
        "a Unix time": r"(?<![\d.])1\d{9}(?:\d{3}|\.\d+)?(?![\d.])",
        "an id": r"(?i:\b(?:user|session|request|req|trace|span|conversation|chat|thread|message|msg|tenant|run|job|id)"
        r"[ _-]?(?:id|no|number|#)?\s*[:=#_ -]\s*[\"']?(?=[\w-]*\d)[\w-]{2,}\b)",
        "a hexadecimal id": r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{8,64}\b",
        "a number": r"(?<!\w)\d[\d,._]*",
    }.items()
}
"""By name, the most telling first."""


@dataclass(frozen=True, slots=True)
class VaryingText:
    """`name`: one of the forms. What stands there in the one text, and in the other."""

    name: str
    ours: str
    theirs: str


def find_varying_text(ours: str, theirs: str, at: int) -> VaryingText | None:
    """`ours` and `theirs` agree up to the character `at`; None where nothing there has a form that is known."""
    for name, form in TEXT_FORMS.items():
        mine, other = (_match_at(form, text, at) for text in (ours, theirs))
        if mine is not None and other is not None and mine.group() != other.group():
            return VaryingText(name, mine.group(), other.group())
    return None


def _match_at(form: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """The longest match that begins at or before the place, and ends behind it."""
    found = [match for match in form.finditer(text) if match.start() <= at <= match.end()]
    return max(found, key=lambda match: len(match.group()), default=None)


def first_difference(ours: str, theirs: str) -> int:
    """The first character at which two texts differ."""
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)


# With what the prompts of late begin alike: the prefixes that at least two of them share, the most valuable first.

NAME_BYTES = 8
"""Of the last block's signature: what a person calls a prefix by, in hexadecimal."""
SUBSUMED_SHARE = 0.9
"""A prefix is left out where a longer one is begun by nearly all of its requests: that one says more."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    namespace: bytes
    signature: bytes  # of its last block
    blocks: int
    block_tokens: int
    requests: int
    found_blocks: int  # of these requests together, within the prefix
    last: float  # when it was asked for last, in seconds since 1970

    @property
    def name(self) -> str:
        return self.signature[:NAME_BYTES].hex()

    @property
    def saved_blocks(self) -> int:
        """What all requests but the first need not compute."""
        return (self.requests - 1) * self.blocks


def prefixes(recent: Iterable[RecentRequest], most: int) -> list[SharedPrefix]:
    """At most so many, of prompts in any order."""
    ordered = sorted((a for a in recent if a.blocks), key=lambda a: (a.namespace, a.packed))
    found = [
        prefix for _, group in groupby(ordered, key=lambda a: a.namespace) for prefix in _of_namespace(list(group))
    ]
    return sorted(found, key=lambda p: (-p.saved_blocks * p.block_tokens, p.signature))[:most]


def _of_namespace(chains: Sequence[RecentRequest]) -> Iterator[SharedPrefix]:
    """`chains` in the order of their signatures: those that begin alike stand together. Each stretch of neighbours that
    share more blocks than it shares with those around it is one prefix."""
    open_: list[tuple[int, int, int]] = []  # blocks shared, the first of the stretch, most requests of one within it
    for i in range(1, len(chains) + 1):
        shared = shared_blocks(chains[i - 1].packed, chains[i].packed) if i < len(chains) else 0
        first, within = i - 1, 0
        while open_ and open_[-1][0] > shared:
            blocks, first, longer = open_.pop()
            requests = i - first
            if longer < SUBSUMED_SHARE * requests:
                yield _prefix(chains[first:i], blocks)
            within = max(within, requests)
            if open_ and open_[-1][0] > shared:
                above = open_.pop()
                open_.append((above[0], above[1], max(above[2], within)))
        if open_ and open_[-1][0] == shared:
            above = open_.pop()
            open_.append((above[0], above[1], max(above[2], within)))
        elif shared:
            open_.append((shared, first, within))


def _prefix(chains: Sequence[RecentRequest], blocks: int) -> SharedPrefix:
    one = chains[0]
    return SharedPrefix(
        one.namespace,
        one.signature(blocks - 1),
        blocks,
        one.block_tokens,
        len(chains),
        sum(min(blocks, each.found) for each in chains),
        max(each.time for each in chains),
    )


def find_prefix(recent: Iterable[RecentRequest], name: str) -> tuple[RecentRequest, int] | None:
    """The newest prompt with a block of this name, and up to which block (excluded) the prefix goes."""
    try:
        wanted = bytes.fromhex(name)
    except ValueError:
        return None
    if len(wanted) != NAME_BYTES:
        return None
    for each in recent:
        at = each.packed.find(wanted)
        while at >= 0:
            if at % SIGNATURE_BYTES == 0:
                return each, at // SIGNATURE_BYTES + 1
            at = each.packed.find(wanted, at + 1)
    return None

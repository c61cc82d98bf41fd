"""Recent requests in a bounded ring, to explain a miss by comparison with earlier prompts.

The ring keeps each request's signatures, which the request holds anyway, so that no copy is made. Where a prefix was
not found in full it also keeps the token ids. Their copy costs little beside the prefill that follows. Token ids leave
the process only through `kvcache explain`, run by the same user.

The module also finds the varying text (a timestamp, an id) that breaks a prefix, and the prefixes that recent prompts
share.
"""

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
"""Most earlier prompts with the same beginning that a prompt is compared with, newest first."""
_HEAD_TOKENS = 4  # first tokens that index a prompt of which no block was found

Ids = NDArray[np.uint32]


@dataclass(slots=True, eq=False)
class RecentRequest:
    """One request. `reason`, `fate` and `detail` describe the first block that was not found.

    They may change until the request begins to compute.
    """

    request: str
    namespace: bytes
    shard_keys: Sequence[bytes]  # the keys of its groups' shards
    block_tokens: int
    packed: bytes
    clock: int  # in requests
    time: float  # seconds since 1970
    ids: list[Ids] = field(default_factory=list)  # of full blocks, from `known_from` on
    known_from: int = 0
    hit_blocks: int = 0
    reason: str = ""
    fate: BlockFate | None = None  # of that block, as the history had it then
    detail: dict[str, Any] = field(default_factory=dict)
    kept: bool = False  # whether the ring holds it
    agent: str = ""  # as the request named it
    session: str = ""

    @property
    def blocks(self) -> int:
        return len(self.packed) // SIGNATURE_BYTES

    def signature(self, block: int) -> bytes:
        return self.packed[block * SIGNATURE_BYTES : (block + 1) * SIGNATURE_BYTES]

    def tokens(self, first: int, end: int) -> Ids:
        """Return the known ids of tokens [first, end); empty where token `first` is unknown."""
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
    """Return how many blocks two chains of packed signatures share. A signature covers all blocks before it."""
    low, high = 0, min(len(one), len(other)) // SIGNATURE_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        at = slice((middle - 1) * SIGNATURE_BYTES, middle * SIGNATURE_BYTES)
        low, high = (middle, high) if one[at] == other[at] else (low, middle - 1)
    return low


def shared_tokens(one: Ids, other: Ids) -> int:
    """Return how many tokens two sequences share from the first on."""
    length = min(len(one), len(other))
    differ = one[:length] != other[:length]
    return int(differ.argmax()) if differ.any() else length


def kept(ids: NDArray[Any]) -> Ids:
    """Return token ids that later changes of the caller's buffer do not affect.

    The ids are copied, unless their memory is an immutable `bytes` object, as for a packed list.
    """
    root: Any = ids
    while isinstance(root, np.ndarray) and root.base is not None:
        root = root.base
    return ids if ids.dtype == np.uint32 and isinstance(root, bytes) else np.array(ids, np.uint32)


class RecentRequests:
    """The ring. It drops the oldest requests above `requests` entries or `max_bytes`.

    Thread safety: any thread may call it.
    """

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
        """Add a request, unless it alone exceeds `max_bytes`."""
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
        """Extend a request by the blocks of its answer."""
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
        filed[key].remove(recent)  # usually the first entry
        if not filed[key]:
            del filed[key]

    def last(self) -> list[RecentRequest]:
        """Return all requests, newest first."""
        with self._lock:
            return list(reversed(self._ring))

    def find(self, request: str) -> RecentRequest | None:
        """Return the newest request of that id."""
        return next((recent for recent in self.last() if recent.request == request), None)

    def same_head(self, namespace: bytes, signature: bytes) -> list[RecentRequest]:
        """Return the requests that begin with this block, newest first."""
        with self._lock:
            return list(islice(reversed(self._heads.get((namespace, signature), ())), MAX_COMPARED_REQUESTS))

    def same_start(self, ids: Ids, among: Collection[bytes] | None = None) -> Iterator[RecentRequest]:
        """Return the requests that begin with these tokens, in namespaces `among` or in all, newest first."""
        with self._lock:
            filed = reversed(self._starts.get(ids[:_HEAD_TOKENS].tobytes(), deque()))
            found = list(
                islice((each for each in filed if among is None or each.namespace in among), MAX_COMPARED_REQUESTS)
            )
        return iter(found)


# Varying text that breaks a prefix: a timestamp, an id, a counter, recognised by its form. Two prompts agree up to a
# character. Where the text around that character has a known form in both prompts, and differs, it explains the miss.

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
"""Patterns by name, the most specific first."""


@dataclass(frozen=True, slots=True)
class VaryingText:
    """The varying text in two prompts; `name` is one of TEXT_FORMS."""

    name: str
    ours: str
    theirs: str


def find_varying_text(ours: str, theirs: str, at: int) -> VaryingText | None:
    """Return the varying text at `at`, up to which the texts agree; None where it has no known form."""
    for name, form in TEXT_FORMS.items():
        mine, other = (_match_at(form, text, at) for text in (ours, theirs))
        if mine is not None and other is not None and mine.group() != other.group():
            return VaryingText(name, mine.group(), other.group())
    return None


def _match_at(form: re.Pattern[str], text: str, at: int) -> re.Match[str] | None:
    """Return the longest match that begins at or before `at` and ends at or after it."""
    found = [match for match in form.finditer(text) if match.start() <= at <= match.end()]
    return max(found, key=lambda match: len(match.group()), default=None)


def first_difference(ours: str, theirs: str) -> int:
    """Return the index of the first character at which two texts differ."""
    shorter = min(len(ours), len(theirs))
    return next((i for i in range(shorter) if ours[i] != theirs[i]), shorter)


# Shared prefixes: those of at least two recent prompts, the most valuable first

NAME_BYTES = 8
"""Bytes of the last block's signature that name a prefix, in hexadecimal."""
SUBSUMED_SHARE = 0.9
"""A prefix is omitted where at least this share of its requests has a longer shared prefix, which says more."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    namespace: bytes
    signature: bytes  # of its last block
    blocks: int
    block_tokens: int
    requests: int
    hit_blocks: int  # blocks matched within the prefix, summed over the requests
    last: float  # time of the latest request, in seconds since 1970

    @property
    def name(self) -> str:
        return self.signature[:NAME_BYTES].hex()

    @property
    def saved_blocks(self) -> int:
        """The blocks that all requests but the first need not compute."""
        return (self.requests - 1) * self.blocks


def prefixes(recent: Iterable[RecentRequest], most: int) -> list[SharedPrefix]:
    """Return at most `most` shared prefixes, the most valuable first. The prompts may have any order."""
    ordered = sorted((a for a in recent if a.blocks), key=lambda a: (a.namespace, a.packed))
    found = [
        prefix for _, group in groupby(ordered, key=lambda a: a.namespace) for prefix in _of_namespace(list(group))
    ]
    return sorted(found, key=lambda p: (-p.saved_blocks * p.block_tokens, p.signature))[:most]


def _of_namespace(chains: Sequence[RecentRequest]) -> Iterator[SharedPrefix]:
    """Yield the shared prefixes of one namespace. `chains` are sorted by signatures, so that common prefixes adjoin.

    A run of neighbours that share more blocks with each other than with the chains around them is one prefix.
    """
    open_: list[tuple[int, int, int]] = []  # shared blocks, first of the run, most requests of a longer prefix in it
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
        sum(min(blocks, each.hit_blocks) for each in chains),
        max(each.time for each in chains),
    )


def find_prefix(recent: Iterable[RecentRequest], name: str) -> tuple[RecentRequest, int] | None:
    """Return the newest prompt with a block of this name, and the end block (excluded) of the prefix."""
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

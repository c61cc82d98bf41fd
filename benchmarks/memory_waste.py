"""How much of the memory for keys and values holds nothing, or the same thing twice.

A server is simulated: requests come, wait until there is room, gain a token a step, and go. Memory is given out by the
engine's own page pool, or as one piece a request, reserved when it begins, first fit. Shares of what is held or lost,
over the time in which requests come:

    waste/paged               pages of 16 tokens, prompts and answers of random lengths; peer: contiguous
    waste/contiguous          pieces for the longest that the model can, since the length of an answer is unknown
    waste/contiguous/pow2     pieces for the next power of two of what the request will need
    waste/contiguous/exact    pieces for what the request will need, as if that were known
    waste/duplicate           blocks held more than once by agents of common instructions; peer: without sharing pages

and the same for the arrivals of real services where ../shared/data/traces has them: `waste/azure-conv/paged`,
`waste/azure-code/paged` (lengths), `waste/mooncake/duplicate` (which blocks are the same).

Three kinds make up the waste: internal, held by a request and not filled (yet); external, free and of no use to the
request that waits, although there would be enough; duplicate, filled with what is held elsewhere too.
"""

from __future__ import annotations

import csv
import gzip
import json
import random
from bisect import insort
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Protocol

from harness import Row, options, publish

from kvcache.engine.pool import PagePool

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
BLOCK_TOKENS = 16
AMPLE_TOKENS = 1 << 22  # more than any of these ever holds
TICK_TOKENS, TICK_S = 8, 0.25  # a token each 31 ms: what a server of many requests reaches


@dataclass(eq=False)
class Request:
    """`blocks` names the content of each full block of the prompt, where requests may have some in common."""

    arrival_s: float
    prompt_tokens: int
    answer_tokens: int
    blocks: Sequence[bytes] = ()
    filled: int = 0  # tokens whose keys and values are there
    pages: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """In the end."""
        return self.prompt_tokens + self.answer_tokens


class Memory(Protocol):
    held_tokens: int  # room that requests have
    duplicate_tokens: int

    def admit(self, request: Request, tokens: int) -> bool:
        """Room for what the request has now."""

    def grow(self, request: Request, tokens: int) -> bool: ...
    def free(self, request: Request) -> None: ...
    def lost_tokens(self, request: Request) -> int:
        """Free, enough for this request, and of no use to it."""


class Paged:
    """The engine's pool. With `share`, blocks of the same content are one page."""

    def __init__(self, tokens: int, *, share: bool = True) -> None:
        self.pool = PagePool(tokens // BLOCK_TOKENS)
        self._share = share
        self._pages: defaultdict[bytes, Counter[int]] = defaultdict(Counter)  # requests, by content and page
        self.duplicate_tokens = 0

    @property
    def held_tokens(self) -> int:
        return (self.pool.pages - self.pool.available) * BLOCK_TOKENS

    def admit(self, request: Request, tokens: int) -> bool:
        request.pages = self.pool.acquire(request.blocks) if self._share else []
        found = len(request.pages)
        if not self.grow(request, tokens):
            self.pool.release(request.pages)
            request.pages = []
            return False
        if self._share:
            for i, content in enumerate(request.blocks[found:], found):
                request.pages[i] = self.pool.publish(request.pages[i], content)
        self._count(request, 1)
        return True

    def _count(self, request: Request, change: int) -> None:
        for content, page in zip(request.blocks, request.pages, strict=False):
            holders = self._pages[content]
            before = len(holders)
            holders[page] += change
            if not holders[page]:
                del holders[page]
            self.duplicate_tokens += BLOCK_TOKENS * (max(1, len(holders)) - max(1, before))

    def grow(self, request: Request, tokens: int) -> bool:
        more = self.pool.allocate(-(-tokens // BLOCK_TOKENS) - len(request.pages))
        request.pages += more or []
        return more is not None

    def free(self, request: Request) -> None:
        self._count(request, -1)
        self.pool.release(request.pages)
        request.pages = []

    def lost_tokens(self, request: Request) -> int:
        return 0  # any page serves any request


class Contiguous:
    """One piece a request, first fit, of the size that `reserve` says."""

    duplicate_tokens = 0

    def __init__(self, tokens: int, reserve: Callable[[Request], int]) -> None:
        self._reserve = reserve
        self._holes = [(0, tokens)]  # where, how long; in order
        self._pieces: dict[Request, tuple[int, int]] = {}
        self.held_tokens = 0

    def admit(self, request: Request, tokens: int) -> bool:
        size = self._reserve(request)
        for i, (at, length) in enumerate(self._holes):
            if length >= size:
                self._holes[i : i + 1] = [(at + size, length - size)] if length > size else []
                self._pieces[request] = (at, size)
                self.held_tokens += size
                return True
        return False

    def grow(self, request: Request, tokens: int) -> bool:
        return True

    def free(self, request: Request) -> None:
        piece = self._pieces.pop(request)
        self.held_tokens -= piece[1]
        insort(self._holes, piece)
        joined: list[tuple[int, int]] = []
        for at, length in self._holes:
            if joined and sum(joined[-1]) == at:
                joined[-1] = (joined[-1][0], joined[-1][1] + length)
            else:
                joined.append((at, length))
        self._holes = joined

    def lost_tokens(self, request: Request) -> int:
        free = sum(length for _, length in self._holes)
        return free if free >= self._reserve(request) else 0


@dataclass
class Waste:
    """Sums over time, in tokens."""

    held: int = 0
    internal: int = 0
    external: int = 0
    duplicate: int = 0
    running: int = 0
    ticks: int = 0

    def percent(self, *kinds: str) -> float:
        return 100 * sum(getattr(self, kind) for kind in kinds) / max(1, self.held + self.external)


def simulate(requests: Iterable[Request], memory: Memory) -> Waste:
    """Until the last request has come. One that finds no room while it runs starts again later, the newest first."""
    coming = deque(sorted(requests, key=lambda request: request.arrival_s))
    waiting: deque[Request] = deque()
    running: list[Request] = []
    waste, now = Waste(), 0.0
    while coming:
        now += TICK_S
        while coming and coming[0].arrival_s <= now:
            waiting.append(coming.popleft())
        while waiting and memory.admit(waiting[0], max(waiting[0].prompt_tokens, waiting[0].filled)):
            running.append(waiting.popleft())
            running[-1].filled = max(running[-1].prompt_tokens, running[-1].filled)
        _note(waste, memory, running, waiting)
        for request in list(running):
            if request not in running:
                continue
            filled = min(request.tokens, request.filled + TICK_TOKENS)
            while request in running and not memory.grow(request, filled):
                newest = running.pop()
                memory.free(newest)
                waiting.appendleft(newest)
            if request not in running:
                continue
            request.filled = filled
            if filled == request.tokens:
                memory.free(request)
                running.remove(request)
    return waste


def _note(waste: Waste, memory: Memory, running: Sequence[Request], waiting: Sequence[Request]) -> None:
    own = sum(request.filled for request in running)
    pages = sum(len(request.pages) for request in running)
    filled = own - max(0, pages * BLOCK_TOKENS - memory.held_tokens)  # a shared page is full, and counts once
    waste.held += memory.held_tokens
    waste.internal += memory.held_tokens - filled
    waste.external += memory.lost_tokens(waiting[0]) if waiting else 0
    waste.duplicate += memory.duplicate_tokens
    waste.running += len(running)
    waste.ticks += 1


def random_lengths(count: int, seed: int = 1) -> list[Request]:
    """Prompts and answers of any length, short ones more often, eight a second."""
    rng = random.Random(seed)
    return [Request(i / 8, int(2 ** rng.uniform(4, 11)), int(2 ** rng.uniform(4, 9))) for i in range(count)]


def agents(count: int, seed: int = 1) -> list[Request]:
    """Twelve agents, each with instructions of its own, and questions that are all different."""
    rng = random.Random(seed)
    instructions = [rng.randrange(32, 256) for _ in range(12)]  # blocks
    requests = []
    for i in range(count):
        agent = rng.randrange(12)
        own = rng.randrange(1, 32)
        blocks = [_name(f"agent {agent}", n) for n in range(instructions[agent])]
        blocks += [_name(f"request {i}", n) for n in range(own)]
        requests.append(Request(i / 2, BLOCK_TOKENS * len(blocks) + rng.randrange(16), rng.randrange(16, 512), blocks))
    return requests


def _name(of: str, block: int) -> bytes:
    return f"{of} block {block}".encode()


def azure(name: str, count: int) -> list[Request]:
    with gzip.open(TRACES / f"azure-{name}.csv.gz", "rt") as file:
        rows = list(islice(csv.DictReader(file), count))
    # seven digits of a second, where datetime knows six
    at = [datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in rows]
    return [
        Request((t - at[0]).total_seconds(), int(row["ContextTokens"]), int(row["GeneratedTokens"]))
        for t, row in zip(at, rows, strict=True)
    ]


def mooncake(count: int) -> list[Request]:
    """Each id stands for 512 tokens and all before them; a last one that is not full has no block in common."""
    requests = []
    with gzip.open(TRACES / "mooncake-conversation.jsonl.gz", "rt") as file:
        for row in map(json.loads, islice(file, count)):
            ids = row["hash_ids"][: row["input_length"] // 512]
            blocks = [_name(str(each), n) for each in ids for n in range(512 // BLOCK_TOKENS)]
            requests.append(Request(row["timestamp"] / 1000, row["input_length"], row["output_length"], blocks))
    return requests


def lengths_rows(name: str, made: Callable[[], list[Request]], notes: list[str]) -> list[Row]:
    """Paged against contiguous, in as much memory as the paged requests would need a half more than on average."""
    longest = 1 << (max(request.tokens for request in made()) - 1).bit_length()
    unbounded = simulate(made(), Paged(AMPLE_TOKENS))
    tokens = max(4 * longest, int(1.5 * unbounded.held / unbounded.ticks) // longest * longest)
    ways: dict[str, Memory] = {
        "paged": Paged(tokens),
        "contiguous": Contiguous(tokens, lambda request: longest),
        "contiguous/pow2": Contiguous(tokens, lambda request: 1 << (request.tokens - 1).bit_length()),
        "contiguous/exact": Contiguous(tokens, lambda request: request.tokens),
    }
    found = {way: simulate(made(), memory) for way, memory in ways.items()}
    lost = {way: waste.percent("internal", "external") for way, waste in found.items()}
    for way, waste in found.items():
        inner, outer, at_once = waste.percent("internal"), waste.percent("external"), waste.running / waste.ticks
        notes.append(f"{name}{way}: internal {inner:.2f} %, external {outer:.2f} %, {at_once:.1f} requests at once")
    return [
        Row(f"waste/{name}{way}", lost[way], "% waste", peer=lost["contiguous"] if way != "contiguous" else None)
        for way in ways
    ]


def duplicate_row(name: str, made: Callable[[], list[Request]], notes: list[str]) -> Row:
    apart, shared = (simulate(made(), Paged(AMPLE_TOKENS, share=share)) for share in (False, True))
    notes.append(
        f"{name}duplicate: {apart.held / apart.ticks / 1000:.0f} thousand tokens held apart, "
        f"{shared.held / shared.ticks / 1000:.0f} with pages shared"
    )
    return Row(f"waste/{name}duplicate", shared.percent("duplicate"), "% waste", peer=apart.percent("duplicate"))


def main() -> None:
    arguments = options(__doc__).parse_args()
    count = 2000 if arguments.quick else 20_000
    notes: list[str] = []
    rows = lengths_rows("", lambda: random_lengths(count), notes)
    rows.append(duplicate_row("", lambda: agents(count // 2), notes))
    for name in ("conv", "code"):
        if (TRACES / f"azure-{name}.csv.gz").exists():
            rows += lengths_rows(f"azure-{name}/", lambda name=name: azure(name, count), notes)
        else:
            notes.append(f"azure-{name}: left out, there is no {TRACES / f'azure-{name}.csv.gz'}")
    if (TRACES / "mooncake-conversation.jsonl.gz").exists():
        rows.append(duplicate_row("mooncake/", lambda: mooncake(count // 10), notes))
    else:
        notes.append(f"mooncake: left out, there is no {TRACES / 'mooncake-conversation.jsonl.gz'}")
    publish("memory_waste", rows, arguments.json, notes=notes)


if __name__ == "__main__":
    main()

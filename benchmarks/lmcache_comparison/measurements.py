"""What both sides take for the same work, in turns, as rows of the one form of a benchmark."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from statistics import median
from typing import Any, Protocol

from harness import MORE_IS_BETTER, Row
from harness.hardware_limit import copy_rate, drive_rate

from lmcache_comparison.workload import LEAST, LLAMA_3_8B, Shape, token_bytes

STRUCTURES = ("in-process", "multiprocess")
PATHS = {"direct": True, "buffered": False}
"""LMCache's two ways to a drive: around the page cache, and through it. Ours is always the first."""

WARM = 3  # prompts: memory that was touched once, room that was filled once


class WrongResult(SystemExit):
    """What was measured is not what the row's name says: no figure is better than a wrong one."""


class Worker(Protocol):
    def ask(self, verb: str, **arguments: Any) -> Any: ...


@dataclass(frozen=True)
class Sizes:
    match_tokens: int = 131_072
    tokens: int = 4096  # of a prompt whose bytes are moved
    shape: Shape = LLAMA_3_8B
    rounds: int = 9
    shared_tokens: int = 512  # of a prompt that goes through a server
    records: int = 1 << 15  # of which the memory beside their bytes is measured

    @property
    def prompt_bytes(self) -> int:
        return self.tokens * token_bytes(self.shape)


@dataclass(frozen=True)
class Measurement:
    """What both sides reached, a number a round."""

    id: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    floor: float | None = None

    @property
    def row(self) -> Row:
        return Row(self.id, median(self.ours), self.unit, floor=self.floor, peer=median(self.theirs))

    @property
    def best(self) -> Row:
        """Of the best rounds: where others are at work too, a look at what both could do."""
        pick = max if self.unit in MORE_IS_BETTER else min
        return Row(self.id, pick(self.ours), self.unit, floor=self.floor, peer=pick(self.theirs))


class Alternation:
    """Asks both sides the same. Who is first changes with every question."""

    def __init__(self, ours: Worker, theirs: Worker) -> None:
        self.ours, self.theirs = ours, theirs
        self._asked = 0

    def ask(self, verb: str, **arguments: Any) -> tuple[Any, Any]:
        """Our answer, theirs."""
        self._asked += 1
        sides = (self.ours, self.theirs)[:: 1 if self._asked % 2 else -1]
        answers = {id(side): side.ask(verb, **arguments) for side in sides}
        return answers[id(self.ours)], answers[id(self.theirs)]


def measure_match(turns: Alternation, sizes: Sizes) -> Iterator[Measurement]:
    """Look-ups of a long prompt in an index of four, and room for 256 tokens where there is none."""
    tokens = sizes.match_tokens
    turns.ask("open", shape=LEAST, tokens=tokens, room_tokens=4 * tokens)
    for seed in range(6):  # more than there is room for: ours is a little larger than asked for
        turns.ask("store", seed=seed)

    def measured(name: str, unit: str, verb: str, **arguments: Any) -> Measurement:
        answers = [turns.ask(verb, runs=5, **arguments) for _ in range(sizes.rounds)]
        scale = {"ms": 1e3, "us": 1e6}[unit]
        ours, theirs = ([scale * s for answer in side for s in answer] for side in zip(*answers, strict=True))
        return Measurement(name, unit, ours, theirs)

    yield measured("match/tensor", "ms", "match", seed=5, kind="tensor")
    yield measured("match/list", "ms", "match", seed=5, kind="list")
    yield measured("match/hold", "ms", "hold", seed=5)
    room = measured("evict/256_tokens", "us", "evict", tokens=256)
    yield room
    yield Measurement("evict", "us", [us / 16 for us in room.ours], room.theirs)
    turns.ask("close")


def measure_host(turns: Alternation, sizes: Sizes) -> Iterator[Measurement]:
    """A prompt out of an engine's pages into host memory and back, in a tier that is full."""
    turns.ask("open", shape=sizes.shape, tokens=sizes.tokens, room_tokens=sizes.tokens * 5 // 2)
    stored, retrieved = [], []
    for seed in range(WARM + sizes.rounds):
        stored.append(turns.ask("store", seed=seed))
        retrieved.append(_checked(turns.ask("retrieve", seed=seed), sizes.tokens, near=sizes.tokens))
    turns.ask("close")
    floor = copy_rate() / 1e9
    yield _rates("host/store", stored, "stored_s", "stored_s", sizes, floor)
    yield _rates("host/retrieve", retrieved, "seconds", "seconds", sizes, floor)


def measure_disk(turns: Alternation, sizes: Sizes, directory: Path) -> Iterator[Measurement]:
    """A prompt to the drive, and another one back that has left memory, by each of LMCache's paths."""
    for path, direct in PATHS.items():
        floor = drive_rate(directory) / 1e9
        places = [directory / f"{path}-{side}" for side in ("ours", "theirs")]
        for side, place in zip((turns.ours, turns.theirs), places, strict=True):
            side.ask(
                "open",
                shape=sizes.shape,
                tokens=sizes.tokens,
                room_tokens=sizes.tokens * 3 // 2,
                directory=str(place),
                direct=direct,
            )
        stored, retrieved = [], []
        for seed in range(WARM + sizes.rounds):
            stored.append(turns.ask("store", seed=seed))
            if seed >= WARM:
                retrieved.append(_checked(turns.ask("retrieve", seed=seed - WARM), sizes.tokens, near=0))
        turns.ask("close")
        for place in places:
            rmtree(place)
        yield _rates(f"disk/store/{path}", stored, "durable_s", "found_s", sizes)
        yield _rates(f"disk/store/{path}/synced", stored, "durable_s", "durable_s", sizes)
        yield _rates(f"disk/retrieve/{path}", retrieved, "seconds", "seconds", sizes, floor)


def measure_redis(turns: Alternation, sizes: Sizes, url: str, *, native: bool = False) -> Iterator[Measurement]:
    """A prompt to a server, until it can be found there, and another one back that has left memory. `native`: by
    LMCache's client in C++."""
    path = "/native" if native else ""
    tokens = sizes.shared_tokens
    turns.ask("open", shape=sizes.shape, tokens=tokens, room_tokens=tokens * 3 // 2, url=url, native=native)
    stored, retrieved = [], []
    for seed in range(WARM + sizes.rounds):
        stored.append(turns.ask("store", seed=seed))
        if seed >= WARM:
            retrieved.append(_checked(turns.ask("retrieve", seed=seed - WARM), tokens, near=0))
    size = tokens * token_bytes(sizes.shape) / 1e9
    pairs = [(size / a["durable_s"], size / b["found_s"]) for a, b in stored[WARM:]]
    yield Measurement(f"redis/store{path}", "GB/s", *zip(*pairs, strict=True))
    rates = [[size / answer["seconds"] for answer in side] for side in zip(*retrieved, strict=True)]
    yield Measurement(f"redis/retrieve{path}", "GB/s", *rates)


def measure_redis_lookup(turns: Alternation, sizes: Sizes, url: str, *, native: bool = False) -> Iterator[Measurement]:
    """How long a process that has just begun takes to know that a server has all of a long prompt."""
    tokens = sizes.match_tokens
    turns.ask("open", shape=LEAST, tokens=tokens, room_tokens=2 * tokens, url=url, native=native)
    turns.ask("store", seed=0)
    answers = [turns.ask("contains", seed=0, runs=2) for _ in range(sizes.rounds)]
    ours, theirs = ([1e3 * s for answer in side for s in answer] for side in zip(*answers, strict=True))
    yield Measurement(f"redis/contains{'/native' if native else ''}", "ms", ours, theirs)


def measure_memory(ours: Worker, theirs: Mapping[str, Worker], sizes: Sizes) -> Iterator[Measurement]:
    """Bytes a cached token beside its keys and values. Each side is a fresh process: theirs, one a structure."""
    value = ours.ask("structure", name="ours", records=sizes.records)
    for name, side in theirs.items():
        peer = side.ask("structure", name=name, records=sizes.records)
        yield Measurement(f"bytes_a_token/{name}", "B", [value], [peer])


def _checked(answers: tuple[Any, Any], tokens: int, near: int) -> tuple[Any, Any]:
    for who, answer in zip(("ours", "theirs"), answers, strict=True):
        found = {name: answer[name] for name in ("hits", "near", "wrong")}
        if found != {"hits": tokens, "near": near, "wrong": 0}:
            raise WrongResult(f"{who}: of {tokens} tokens {found}: expected all as hits, {near} near, none wrong")
    return answers


def _rates(
    name: str, answers: Sequence[tuple[Any, Any]], ours: str, theirs: str, sizes: Sizes, floor: float | None = None
) -> Measurement:
    """GB/s, without the rounds that warmed up. `ours` and `theirs` name the seconds in an answer."""
    counted = answers[-sizes.rounds :]
    size = sizes.prompt_bytes / 1e9
    return Measurement(
        name, "GB/s", [size / a[ours] for a, _ in counted], [size / b[theirs] for _, b in counted], floor
    )

"""The same faults done to both sides: who answers with bytes that were never stored, who only has less to give.

A wrong answer is a token that is said to be a hit and whose bytes are not those that were stored for it, or that was
stored under another salt. Everything else is right, or a miss, and costs a recomputation.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lmcache_comparison.worker_process import WorkerLostError, WorkerProcess
from lmcache_comparison.workload import SMALL, token_bytes
from tests.peer.redis_server import MISSING, RedisServer

TOKENS = 1024  # of a prompt
PATIENCE_S = 2.0
Start = Callable[[str, Sequence[str]], WorkerProcess]
"""A fresh process of the side so named, its command behind the given words."""


@dataclass(frozen=True)
class Answer:
    """Tokens that were asked for, said to be hits, and wrong; or what it did instead."""

    asked: int
    hits: int = 0
    wrong: int = 0
    failed: str = ""

    def __str__(self) -> str:
        if self.failed:
            return self.failed
        if self.wrong:
            return f"WRONG in {self.wrong:,} of {self.hits:,} hits"
        if self.hits == self.asked:
            return f"all {self.hits:,} right"
        return f"{self.hits:,} of {self.asked:,} right, the rest a miss" if self.hits else "a miss"


@dataclass(frozen=True)
class Fault:
    name: str
    wanted: str
    ours: Answer
    theirs: Answer
    note: str = ""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


Begin = Callable[..., WorkerProcess]
"""A fresh process of one side, its command behind the given words."""


def faults(start: Start, directory: Path) -> Iterator[Fault]:
    for what, wanted, happen, note in FAULTS:
        ours, theirs = (
            _answer(happen, lambda *words, name=side: start(name, words), directory / f"{happen.__name__}-{side}")
            for side in ("ours", "theirs")
        )
        yield Fault(what, wanted, ours, theirs, note)


def _answer(happen: Callable[[Begin, Path], Answer], begin: Begin, place: Path) -> Answer:
    try:
        return happen(begin, place)
    except RuntimeError as error:
        return Answer(0, failed=f"raises {error}")
    except WorkerLostError as error:
        return Answer(0, failed=error.what)


def _truncated(begin: Begin, place: Path) -> Answer:
    def cut(path: str) -> None:
        os.truncate(path, os.path.getsize(path) // 10)

    return _damaged(begin, place, cut)


def _flipped(begin: Begin, place: Path) -> Answer:
    def flip(path: str) -> None:
        with open(path, "r+b") as file:
            for at in range(1 << 19, os.path.getsize(path), 1 << 20):
                file.seek(at)
                [byte] = file.read(1)
                file.seek(at)
                file.write(bytes([byte ^ 1]))
            os.fsync(file.fileno())

    return _damaged(begin, place, flip)


def _damaged(begin: Begin, place: Path, damage: Callable[[str], None]) -> Answer:
    """The first of three prompts, which has left memory, after something happened to the files."""
    with closing(begin()) as side:
        _open(side, place)
        for seed in range(3):
            side.ask("store", seed=seed)
        for path in side.ask("files"):
            damage(path)
        return _retrieve(side, [0])


def _part_evicted(begin: Begin, place: Path) -> Answer:
    """Each third value of the first prompt is gone, as a full server evicts them: of whatever a side keeps there."""

    def evict(client: Any, keys: Sequence[bytes]) -> None:
        for key in keys[::3]:
            client.delete(key)

    return _in_a_server(begin, evict)


def _value_truncated(begin: Begin, place: Path) -> Answer:
    def cut(client: Any, keys: Sequence[bytes]) -> None:
        for key in keys:
            if client.type(key) == b"string":
                client.set(key, client.get(key)[: max(1, client.strlen(key) // 2)])

    return _in_a_server(begin, cut)


def _in_a_server(begin: Begin, damage: Callable[[Any, Sequence[bytes]], None]) -> Answer:
    """The first of three prompts, which has left memory, after something happened to the values in a server."""
    if MISSING:
        return Answer(0, failed=f"not tried: {MISSING}")
    server = RedisServer()
    try:
        with closing(begin()) as side:
            side.ask("open", shape=SMALL, tokens=TOKENS, room_tokens=TOKENS * 3 // 2, url=server.tcp, patience_s=5)
            for seed in range(3):
                side.ask("store", seed=seed)
            damage(server.client, sorted(server.client.keys()))
            return _retrieve(side, [0])
    finally:
        server.end()


def _restarted(begin: Begin, place: Path) -> Answer:
    with closing(begin()) as side:
        _open(side, place)
        side.ask("store", seed=0)
    with closing(begin()) as side:
        _open(side, place)
        return _retrieve(side, [0])


def _full(begin: Begin, place: Path) -> Answer:
    """Eight prompts on a file system of their own that has room for five."""
    if not _may_mount():
        return Answer(0, failed="not tried: no file system can be mounted here")
    place.mkdir()
    size = 5 * TOKENS * token_bytes(SMALL)
    mount = f'mount -t tmpfs -o size={size} none "{place}" && exec "$@"'
    with closing(begin("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh")) as side:
        _open(side, place)
        for seed in range(8):
            side.ask("store", seed=seed)
        return _retrieve(side, range(8))


def _salted(begin: Begin, place: Path) -> Answer:
    """A hit here is one tenant's prompt found by another, whatever its bytes."""
    with closing(begin()) as side:
        side.ask("open", shape=SMALL, tokens=TOKENS, room_tokens=2 * TOKENS)
        side.ask("store", seed=0)
        answer = side.ask("retrieve", seed=0, salt="another")
        return Answer(TOKENS, answer["hits"], answer["hits"])


def _open(side: WorkerProcess, place: Path) -> None:
    side.ask(
        "open",
        shape=SMALL,
        tokens=TOKENS,
        room_tokens=TOKENS * 3 // 2,
        directory=str(place),
        direct=False,
        patience_s=PATIENCE_S,
    )


def _retrieve(side: WorkerProcess, seeds: Sequence[int]) -> Answer:
    hits = wrong = 0
    for seed in seeds:
        answer = side.ask("retrieve", seed=seed)
        hits, wrong = hits + answer["hits"], wrong + answer["wrong"]
    return Answer(TOKENS * len(seeds), hits, wrong)


def _may_mount() -> bool:
    words = ["unshare", "--user", "--map-root-user", "--mount", "true"]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


FAULTS = (
    ("every file cut to a tenth", "no wrong hit", _truncated, ""),
    ("one bit flipped in every MiB of every file", "no wrong hit", _flipped, ""),
    ("each third value in Redis evicted", "no wrong hit", _part_evicted, ""),
    ("every value in Redis cut to a half", "no wrong hit", _value_truncated, ""),
    ("the process ends, another one takes its place", "all of it", _restarted, ""),
    ("the disk is full before all is stored", "no wrong hit", _full, ""),
    ("another tenant's cache_salt", "a miss", _salted, "LMCache's multiprocess mode has a salt, its engine none"),
)
"""What happens, what is wanted of the answer, how it is done, and what must be said beside it."""

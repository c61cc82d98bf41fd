"""SGLang's server while a tier is full, hangs or lies: the same tokens, never an error, and hits again afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.peer import redis_server
from tests.peer.sglang.sglang_server import (
    PAGE,
    PROMPTS,
    STORED,
    WATCHED,
    SGLangServer,
    damage,
    hicache,
    linker,
    ours,
    owner,
)

ROOM = 16 << 20
WHOLE = 3 * 40 * PAGE
SHORT = [[random.randrange(3, 250) for _ in range(20 * PAGE + 7)] for random in map(Random, range(10, 40))]
FEW = 3
"""Tokens of an answer to one of these: they are many, and each token is a step of all of the server's processes."""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of `ROOM` bytes."""
    place = tmp_path / "disk"
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={ROOM}", "tmpfs", place], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system of its own can be mounted here: {made.stderr.strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def computed(server: SGLangServer) -> list[list[int]]:
    """The answers of a server whose cache is empty yet: nothing of them was loaded."""
    told = [server.generate(prompt) for prompt in PROMPTS]
    assert not any(cached.get(where) for _, cached in told for where in ("device", "host", "storage"))
    return [tokens for tokens, _ in told]


def fill(place: Path) -> Path:
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return filler


def small(place: Path, **more: Any) -> dict[str, Any]:
    settings = ours(place, **more)
    return settings | {"nvme": settings["nvme"] | {"segment_bytes": 1 << 20}}


WAYS = pytest.mark.parametrize(("flags", "where"), [(hicache, "storage"), (linker, "host")], ids=["storage", "linker"])
"""The flags of each way in, and where SGLang says that a prefix came from."""


@WAYS
def test_a_full_disk_changes_no_answer(flags: Any, where: str, model: str, disk: Path, tmp_path: Path) -> None:
    with SGLangServer(model, tmp_path, *flags(**small(disk, lookup_wait_s=1)), *WATCHED) as first:
        filler = fill(disk)
        answers = computed(first)
        first.wait(lambda: all_there(first, PROMPTS, answers, where))  # from memory
        assert os.statvfs(disk).f_bavail == 0
        filler.unlink()
        before = journal(disk)
        turns = iter(SHORT)
        first.wait(lambda: first.generate(next(turns), FEW) and journal(disk) > before)
        last = next(turns)
        answer = first.generate(last)[0]
        first.wait(lambda: all_there(first, [last], [answer], where))
    with SGLangServer(model, tmp_path, *flags(**small(disk, lookup_wait_s=4))) as second:
        tokens, cached = second.generate(last)
        assert tokens == answer
        assert cached[where] == 20 * PAGE, (cached, second.tail())


def journal(place: Path) -> int:
    return sum(file.stat().st_size for file in (place / "nvme").rglob("journal*"))


def all_there(server: SGLangServer, prompts: Sequence[Sequence[int]], answers: list[list[int]], where: str) -> bool:
    """Whether the server has all of these prompts from there, once it has forgotten what it holds itself."""
    server.flush_cache()
    told = [server.generate(prompt) for prompt in prompts]
    assert [tokens for tokens, _ in told] == answers
    return all(
        cached.get(where, 0) == len(prompt) // PAGE * PAGE for prompt, (_, cached) in zip(prompts, told, strict=True)
    )


@WAYS
@pytest.mark.skipif(not redis_server.BINARY, reason=redis_server.MISSING)
def test_a_hung_redis_changes_no_answer(flags: Any, where: str, model: str, tmp_path: Path) -> None:
    """SGLang's threads go on and can be stopped, and hits come back by themselves."""
    there = redis_server.RedisServer()
    tiers = {"redis": {"enabled": True, "url": there.tcp}, "nvme": {"enabled": False}}
    settings = ours(tmp_path) | tiers | {"deadline_s": 1.0, "lookup_wait_s": 1.0}
    try:
        with SGLangServer(model, tmp_path, *flags(**settings)) as first:
            answers = computed(first)
            later = [(prompt, first.generate(prompt, FEW)[0]) for prompt in SHORT]
        with SGLangServer(model, tmp_path, *flags(**settings), *WATCHED) as second:
            there.pause()
            for _ in range(2):
                assert [second.generate(prompt)[0] for prompt in PROMPTS] == answers
                second.flush_cache()  # fails where one of SGLang's threads does not end within ten seconds
            there.go_on()
            turns = iter(later)

            def hit() -> bool:
                """A prompt that only Redis has: what missed once is in memory afterwards."""
                prompt, answer = next(turns)
                tokens, cached = second.generate(prompt, FEW)
                assert tokens == answer
                return bool(cached.get(where, 0) == 20 * PAGE)

            second.wait(hit)
    finally:
        there.end()


def test_a_hung_daemon_of_two_ranks_changes_no_answer(model: str, tmp_path: Path) -> None:
    flags = ("--tp-size", "2", *hicache(**ours(tmp_path, deadline_s=1.0)), *WATCHED)
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "XDG_RUNTIME_DIR": str(tmp_path)}
    with SGLangServer(model, tmp_path, *flags, env=env) as server:
        answers = computed(server)
        server.wait(lambda: server.metric(STORED) >= WHOLE)
        [where] = tmp_path.rglob("engine-*.socket")
        daemon = owner(where)
        os.kill(daemon, signal.SIGSTOP)
        try:
            for _ in range(2):
                server.flush_cache()
                assert [server.generate(prompt)[0] for prompt in PROMPTS] == answers
        finally:
            os.kill(daemon, signal.SIGCONT)
        server.wait(lambda: all_there(server, PROMPTS, answers, "storage"))


def test_a_linker_over_a_damaged_drive_changes_no_answer(model: str, tmp_path: Path) -> None:
    """To SGLang a load that fails is an error 503: there is none, though every third record is damaged."""
    with SGLangServer(model, tmp_path, *linker(**ours(tmp_path))) as first:
        answers = computed(first)
    damaged = damage(tmp_path / "nvme")
    assert damaged > 20
    with SGLangServer(model, tmp_path, *linker(**ours(tmp_path, lookup_wait_s=1))) as second:
        for prompt, answer in zip(PROMPTS, answers, strict=True):
            tokens, cached = second.generate(prompt)
            assert tokens == answer
            assert cached.get("host", 0) < 3 * PAGE, "of the first three records one is damaged"
        second.flush_cache()
        assert [second.generate(prompt)[0] for prompt in PROMPTS] == answers, "some of it stored anew"


def test_the_linker_works_on_two_ranks(model: str, tmp_path: Path) -> None:
    """Each loads its heads from the daemon that they share, after both have agreed on how much."""
    flags = ("--tp-size", "2", *linker(**ours(tmp_path, lookup_wait_s=1)), *WATCHED)
    env = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "XDG_RUNTIME_DIR": str(tmp_path)}
    with SGLangServer(model, tmp_path, *flags, env=env) as server:
        answers = computed(server)
        server.wait(lambda: all_there(server, PROMPTS, answers, "host"))

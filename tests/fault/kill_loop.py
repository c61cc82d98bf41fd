"""A process that stores and loads at full speed is killed at random times, again and again, on a real file system.

    python -m tests.fault.kill_loop DIRECTORY KILLS SEED

After each kill the store is opened, audited and read: everything that said DONE is there with every byte, nothing that
was removed is. The child tells what it knows through a pipe, a line a block, before it goes on.
"""

from __future__ import annotations

import os
import random
import signal
import sys
from pathlib import Path

from kvcache.settings.tiers import NvmeSettings
from kvcache.tier.nvme import NvmeTier
from kvcache.tier.tier import Op, Outcome
from tests.tier.blocks import buffer, chain, holds, record

SIZES = [4_000, 30_000, 120_000]
BLOCKS = [*chain(60), *chain(60, seed=1), *chain(30, of=1)]
SAYS = {("write", Outcome.DONE): "here", ("remove", Outcome.DONE): "gone", ("remove", Outcome.NOT_FOUND): "gone"}


def size_of(i: int) -> int:
    return SIZES[i % len(SIZES)]


def opened(path: Path) -> NvmeTier:
    return NvmeTier(str(path), NvmeSettings(capacity_bytes=8 << 20, segment_bytes=512 << 10, min_free_bytes=0))


def work(path: Path, chance: random.Random, pipe: int) -> None:
    """Until somebody kills it."""

    def say(word: str, i: int) -> None:
        os.write(pipe, f"{word} {i}\n".encode())

    say("opening", 0)
    tier = opened(path)
    tickets = []
    while True:
        op: Op = chance.choices(["write", "read", "remove"], [6, 4, 2])[0]  # type: ignore[assignment]
        first = chance.randrange(len(BLOCKS))
        some = range(first, min(len(BLOCKS), first + chance.choice([1, 4, 16])))
        addresses = [BLOCKS[i] for i in some]
        segments = [record(BLOCKS[i], size_of(i)) for i in some] if op == "write" else []
        segments = [buffer(size_of(i)) for i in some] if op == "read" else segments

        def settled(n: int, outcome: Outcome, op: Op = op, some: range = some) -> None:
            word = SAYS.get((op, outcome))
            if word is not None:
                say(word, some[n])

        if op == "remove":  # what is under way must not decide which of two words is the last one
            for ticket in tickets:
                ticket.wait()
            tickets.clear()
            for i in some:
                say("leaving", i)
        ticket = tier.submit(op, addresses, segments, on_outcome=settled)
        if op == "read":
            ticket.wait()
            for i, into, outcome in zip(some, segments, ticket.outcomes, strict=True):
                if outcome is Outcome.DONE and not holds(into, BLOCKS[i], size_of(i)):
                    say("wrong", i)
        elif op == "remove":
            ticket.wait()
        else:
            tickets.append(ticket)


def kill_once(path: Path, chance: random.Random, known: dict[int, str]) -> None:
    """Start a child, kill it after some words, and take down all that it said."""
    words_from, words_to = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(words_from)
        try:
            work(path, chance, words_to)
        finally:
            os._exit(1)
    os.close(words_to)
    said, wanted = b"", chance.choice([1, chance.randint(2, 2000)])
    while said.count(b"\n") < wanted:
        more = os.read(words_from, 1 << 16)
        if not more:
            raise SystemExit(f"the child ended by itself; it said {said[-200:]!r}")
        said += more
    os.kill(child, signal.SIGKILL)
    while more := os.read(words_from, 1 << 16):
        said += more
    os.waitpid(child, 0)
    os.close(words_from)
    for line in said.decode().splitlines():
        word, _, i = line.partition(" ")
        known[int(i)] = word if word != "opening" else known[int(i)]
    if "wrong" in known.values():
        raise SystemExit(f"a wrong byte: {known}")


def look(path: Path, known: dict[int, str]) -> None:
    tier = opened(path)
    into = [buffer(size_of(i)) for i in known]
    outcomes = tier.read([BLOCKS[i] for i in known], into)
    for i, outcome in zip(known, outcomes, strict=True):
        if outcome is Outcome.DONE:
            if not holds(into[i], BLOCKS[i], size_of(i)):
                raise SystemExit(f"block {i}: a wrong byte")
        elif outcome is not Outcome.NOT_FOUND:
            raise SystemExit(f"block {i}: {outcome}")
        if known[i] == "here" and outcome is not Outcome.DONE:
            raise SystemExit(f"block {i} said DONE and is not there")
        known[i] = "here" if outcome is Outcome.DONE else "gone"  # it may have been killed before it could say so
    faults = tier.check()
    if faults:
        raise SystemExit(f"faults: {faults}")
    tier.close()


def main() -> None:
    path, kills, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    chance = random.Random(seed)
    known = dict.fromkeys(range(len(BLOCKS)), "gone")
    most = 0
    for _ in range(kills):
        kill_once(path, random.Random(chance.random()), known)
        look(path, known)
        most = max(most, list(known.values()).count("here"))
    print(f"{kills} kills, at most {most} blocks there")


if __name__ == "__main__":
    main()

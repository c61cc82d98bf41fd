"""Sessions of agents: a session a line, whose `requests` are rows of [seconds since its start, input tokens, output
tokens, at, new, ...]: the chain that ends at the block `at` (-1: none), then `new` fresh blocks, numbered on.

Ids are a session's own. The trace names blocks of 64 tokens; here eight of them make one, named by the last, and what
is left over at the end is dropped. When sessions start is not told: they are shuffled and start at times drawn
uniformly over a day, by `seed`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.trace.trace import Trace

DAY_S = 86_400.0
BLOCK_TOKENS, PARTS = 512, 8
LONGEST_SHARED = 200_000
"""Where tools are shared, requests with more input tokens than this are left out."""


def read(name: str, lines: Iterable[str], *, shared_tools: bool, seed: int = 0) -> Trace:
    """`shared_tools`: blocks within a session's tool descriptions belong to all sessions that have as many tokens of
    them; an assumption, as the trace does not say."""
    sessions = [json.loads(line) for line in lines if line.strip()]
    draw = random.Random(seed)  # noqa: S311  a shuffle, no secret
    draw.shuffle(sessions)
    begins = [draw.uniform(0, DAY_S) for _ in sessions]
    chains: list[NDArray[np.int64]] = []
    times: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    tools: dict[int, int] = {}  # by tokens of tool descriptions, where the numbers of their blocks begin
    first = 0  # where the numbers of this session's blocks begin
    for session, begin in zip(sessions, begins, strict=True):
        rows = session["requests"]
        small = _chains(rows)
        tool_blocks = session["tool_tokens"] // BLOCK_TOKENS if shared_tools else 0
        if tool_blocks and session["tool_tokens"] not in tools:
            tools[session["tool_tokens"]] = first
            first += tool_blocks
        highest = -1
        for row, chain in zip(rows, small, strict=True):
            highest = max(highest, int(chain.max(initial=-1)))
            if shared_tools and row[1] > LONGEST_SHARED:
                continue
            named = chain[PARTS - 1 :: PARTS] + first
            common = min(tool_blocks, len(named))
            if common:
                named[:common] = tools[session["tool_tokens"]] + np.arange(common)
            chains.append(named)
            times.append(begin + row[0])
            inputs.append(row[1])
            outputs.append(row[2])
        first += highest + 1
    return Trace.of(name, BLOCK_TOKENS, chains, times, inputs, outputs)


def _chains(rows: Sequence[Sequence[Any]]) -> list[NDArray[np.int64]]:
    """Each request's blocks of 64 tokens."""
    chains: list[NDArray[np.int64]] = []
    begins: list[int] = []  # number of the first fresh block, by the request that brought it
    owners: list[int] = []
    fresh = 0
    for number, row in enumerate(rows):
        at, new = row[3], row[4]
        prefix = np.zeros(0, np.int64)
        if at >= 0:
            owner = owners[int(np.searchsorted(begins, at, "right")) - 1]
            chain = chains[owner]
            prefix = chain[: len(chain) - int(chain[-1] - at)]
        if new:
            begins.append(fresh)
            owners.append(number)
        chains.append(np.concatenate([prefix, np.arange(fresh, fresh + new, dtype=np.int64)]))
        fresh += new
    return chains

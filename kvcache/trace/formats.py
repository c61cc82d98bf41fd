"""Reading a trace by the name of its format; files may be compressed by gzip."""

from __future__ import annotations

import csv
import gzip
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import SIGNATURE_BYTES, digest_chain
from kvcache.errors import ConfigError

# A trace: requests in order of time, each a chain of blocks.

BlockIds = NDArray[np.int32]


@dataclass(frozen=True)
class Trace:
    """Blocks are numbered densely from 0. A block belongs to one chain: the block before it is always the same."""

    name: str
    block_tokens: int
    starts: NDArray[np.int64]
    """Where each request's blocks begin in `blocks`, and where the last one's end."""
    blocks: BlockIds
    times_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        name: str,
        block_tokens: int,
        chains: Sequence[NDArray[np.int64]],
        times_s: Sequence[float],
        input_tokens: Sequence[int],
        output_tokens: Sequence[int],
    ) -> Trace:
        """Puts the requests in order of time (equal times stay in order) and numbers their blocks anew."""
        order = np.argsort(np.asarray(times_s, np.float64), kind="stable")
        sorted_chains = [chains[i] for i in order]
        starts = np.zeros(len(chains) + 1, np.int64)
        np.cumsum([len(chain) for chain in sorted_chains], out=starts[1:])
        flat = np.concatenate([np.zeros(0, np.int64), *sorted_chains])
        if len(flat) and flat.min() >= 0 and flat.max() < 4 * len(flat) + (1 << 20):  # small numbers: no need to sort
            seen = np.zeros(int(flat.max()) + 1, bool)
            seen[flat] = True
            dense = (np.cumsum(seen) - 1)[flat]
        else:
            dense = np.unique(flat, return_inverse=True)[1].reshape(-1)
        return cls(
            name,
            block_tokens,
            starts,
            dense.astype(np.int32),
            np.asarray(times_s, np.float64)[order],
            np.asarray(input_tokens, np.int64)[order],
            np.asarray(output_tokens, np.int64)[order],
        )

    def __len__(self) -> int:
        return len(self.times_s)

    def __iter__(self) -> Iterator[BlockIds]:
        """Each request's chain."""
        starts = self.starts.tolist()
        for first, end in pairwise(starts):
            yield self.blocks[first:end]

    @property
    def accesses(self) -> int:
        return len(self.blocks)

    @property
    def unique(self) -> int:
        """How many different blocks there are: their numbers are all below it."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def part(self, first: int, end: int) -> Trace:
        """Requests `first` to `end` (excluded) as a trace of its own."""
        rows = slice(first, end)
        chains = [
            self.blocks[a:b].astype(np.int64) for a, b in zip(self.starts[rows], self.starts[1:][rows], strict=False)
        ]
        return Trace.of(
            self.name,
            self.block_tokens,
            chains,
            self.times_s[rows].tolist(),
            self.input_tokens[rows].tolist(),
            self.output_tokens[rows].tolist(),
        )

    def check(self) -> None:
        """ConfigError where two chains disagree about what comes before a block: then no prefix can be told."""
        before = np.full(self.blocks.shape, -1, np.int64)
        before[1:] = self.blocks[:-1]
        before[self.starts[:-1][self.starts[:-1] < len(before)]] = -1
        parent = np.full(self.unique, -2, np.int64)
        parent[self.blocks] = before
        wrong = np.flatnonzero(parent[self.blocks] != before)
        if len(wrong):
            request = int(np.searchsorted(self.starts, wrong[0], "right")) - 1
            raise ConfigError(
                f"trace {self.name!r}, request {request}: a block that came after another one before; expected the "
                f"names of blocks to be chained, so that each names its whole prefix"
            )


# Sessions of agents: a session a line, whose `requests` are rows of [seconds since its start, input tokens, output
# tokens, at, new, ...]: the chain that ends at the block `at` (-1: none), then `new` fresh blocks, numbered on. Ids
# are a session's own. The trace names blocks of 64 tokens; here eight of them make one, named by the last, and what
# is left over at the end is dropped. When sessions start is not told: they are shuffled and start at times drawn
# uniformly over a day, by `seed`.

DAY_S = 86_400.0
AGENTIC_BLOCK_TOKENS, SUBBLOCKS = 512, 8
MAX_SHARED_TOKENS = 200_000
"""Where tools are shared, requests with more input tokens than this are left out."""


def read_agentic(name: str, lines: Iterable[str], *, shared_tools: bool, seed: int = 0) -> Trace:
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
        tool_blocks = session["tool_tokens"] // AGENTIC_BLOCK_TOKENS if shared_tools else 0
        if tool_blocks and session["tool_tokens"] not in tools:
            tools[session["tool_tokens"]] = first
            first += tool_blocks
        highest = -1
        for row, chain in zip(rows, small, strict=True):
            highest = max(highest, int(chain.max(initial=-1)))
            if shared_tools and row[1] > MAX_SHARED_TOKENS:
                continue
            named = chain[SUBBLOCKS - 1 :: SUBBLOCKS] + first
            common = min(tool_blocks, len(named))
            if common:
                named[:common] = tools[session["tool_tokens"]] + np.arange(common)
            chains.append(named)
            times.append(begin + row[0])
            inputs.append(row[1])
            outputs.append(row[2])
        first += highest + 1
    return Trace.of(name, AGENTIC_BLOCK_TOKENS, chains, times, inputs, outputs)


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


# Traces as Mooncake publishes them: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`,
# the chained names of blocks of 512 tokens, the last of which may be partial.

MOONCAKE_BLOCK_TOKENS = 512


def read_mooncake(name: str, lines: Iterable[str], *, block_tokens: int = MOONCAKE_BLOCK_TOKENS) -> Trace:
    rows = [json.loads(line) for line in lines if line.strip()]
    return Trace.of(
        name,
        block_tokens,
        [np.asarray(row["hash_ids"], np.int64) for row in rows],
        [row["timestamp"] / 1e3 for row in rows],
        [row["input_length"] for row in rows],
        [row.get("output_length", 0) for row in rows],
    )


Lines = Iterable[str]
Tokenize = Callable[[str], Sequence[int]]

TEXT_BLOCK_TOKENS = 16


def byte_tokenizer(text: str) -> Sequence[int]:
    """A tokenizer for who has none: a token a byte."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)  # type: ignore[return-value]  # an array serves as a sequence


def read_text(
    name: str, lines: Lines, *, tokenize: Tokenize = byte_tokenizer, block_tokens: int = TEXT_BLOCK_TOKENS
) -> Trace:
    """Conversations: JSON lines with `input`, and perhaps `output` and `timestamp` (microseconds)."""
    rows = [json.loads(line) for line in lines if line.strip()]
    ids = [np.asarray(tokenize(row["input"]), np.uint32) for row in rows]
    names: dict[bytes, int] = {}
    chains = []
    for tokens in ids:
        packed = digest_chain(bytes(SIGNATURE_BYTES), tokens, block_tokens, None)
        signatures = (packed[i : i + SIGNATURE_BYTES] for i in range(0, len(packed), SIGNATURE_BYTES))
        chains.append(_numbers(names, signatures))
    return Trace.of(
        name,
        block_tokens,
        chains,
        [row.get("timestamp", i * 1e6) / 1e6 for i, row in enumerate(rows)],
        [len(tokens) for tokens in ids],
        [len(tokenize(row.get("output", ""))) for row in rows],
    )


def read_azure(name: str, lines: Lines, *, block_tokens: int = 512) -> Trace:
    """Arrivals and lengths, in columns TIMESTAMP, ContextTokens and GeneratedTokens: nothing is told of content, so no
    block comes twice."""
    rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    inputs = [int(row["ContextTokens"]) for row in rows]
    ends = np.cumsum([0, *(tokens // block_tokens for tokens in inputs)])
    chains = [np.arange(first, end) for first, end in pairwise(ends)]
    first = min(times, default=0.0)
    outputs = [int(row["GeneratedTokens"]) for row in rows]
    return Trace.of(name, block_tokens, chains, [time - first for time in times], inputs, outputs)


def read_vllm(name: str, lines: Lines) -> Trace:
    """KV events as vLLM publishes them, a batch a line: [ts, [event, ...], ...] or {"ts", "events"}. An event is a map
    with `type`, or, as older versions have it, a list that begins with it. Events tell what was stored and not
    who asked: a request is a run that was stored, with all that stands before it, so what was found whole leaves
    nothing here. Only what the GPU keeps, and of several groups of layers the first that is told of."""
    names: dict[Any, int] = {}
    chain_of: dict[Any, list[Any]] = {}
    chains, times, block_tokens, group = [], [], 16, None
    for line in lines:
        if not line.strip():
            continue
        batch = json.loads(line)
        time, events = (batch["ts"], batch["events"]) if isinstance(batch, dict) else batch[:2]
        for event_data in events:
            event = event_data if isinstance(event_data, dict) else _event_fields(event_data)
            if event.get("type") != "BlockStored" or event.get("medium", "GPU") not in ("GPU", None):
                continue
            if group is None:
                group = event.get("group_idx")
            if event.get("group_idx") != group:
                continue
            block_tokens = event["block_size"]
            chain = list(chain_of.get(event.get("parent_block_hash"), []))
            for block in event["block_hashes"]:
                chain = [*chain, block]
                chain_of[block] = chain
            chains.append(_numbers(names, chain))
            times.append(float(time))
    lengths = [len(chain) * block_tokens for chain in chains]
    return Trace.of(name, block_tokens, chains, times, lengths, [0] * len(chains))


def _event_fields(event: Sequence[Any]) -> Mapping[str, Any]:
    """Of an event as a list, what is told by place."""
    return dict(zip(("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"), event, strict=False))


def read_recorded(name: str, lines: Lines) -> Trace:
    """As a running cache writes it down (`trace.path`): Mooncake's lines with `block_tokens` in each. Whole blocks of
    each request that was admitted, of all namespaces: a block's name tells them apart."""
    rows = list(filter(str.strip, lines))
    sizes = {json.loads(row)["block_tokens"] for row in rows}
    if len(sizes) > 1:
        raise ConfigError(
            f"trace {name!r} has blocks of {sorted(sizes)} tokens; expected one size: split it by `namespace`"
        )
    return read_mooncake(name, rows, block_tokens=sizes.pop() if sizes else 16)


def _numbers(names: dict[Any, int], blocks: Iterable[Any]) -> NDArray[np.int64]:
    return np.array([names.setdefault(block, len(names)) for block in blocks], np.int64)


def read_agentic_local(name: str, lines: Lines, *, seed: int = 0) -> Trace:
    return read_agentic(name, lines, shared_tools=False, seed=seed)


def read_agentic_shared(name: str, lines: Lines, *, seed: int = 0) -> Trace:
    return read_agentic(name, lines, shared_tools=True, seed=seed)


FORMATS: Mapping[str, Callable[..., Trace]] = {
    "mooncake": read_mooncake,
    "agentic": read_agentic_local,
    "agentic-shared": read_agentic_shared,
    "azure": read_azure,
    "text": read_text,
    "vllm": read_vllm,
    "recorded": read_recorded,
}

_FORMAT_MARKERS = (  # what the first line of a format says, and no other's
    ("found_tokens", "recorded"),
    ("hash_ids", "mooncake"),
    ("tool_tokens", "agentic"),
    ("TIMESTAMP,", "azure"),
    ("BlockStored", "vllm"),
    ('"input"', "text"),
)


def read_trace(path: Path, format: str | None = None, **options: Any) -> Trace:
    """`options`: those of the format's reader. ConfigError for what is no trace."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            first = lines.readline()
            name = format or next((name for sign, name in _FORMAT_MARKERS if sign in first), "")
            if name not in FORMATS:
                raise ConfigError(f"{path}: {name or 'unknown'} is no format of traces; there is {', '.join(FORMATS)}")
            trace = FORMATS[name](path.name.split(".")[0], [first, *lines], **options)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no trace of the format {name}: {type(error).__name__} {error}") from error
    trace.check()
    return trace

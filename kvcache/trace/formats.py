"""Traces and the readers of their formats, selected by name; files may be compressed with gzip."""

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
    """A trace. Blocks are numbered densely from 0. A block belongs to one chain: the block before it is always the
    same."""

    name: str
    block_tokens: int
    starts: NDArray[np.int64]
    """For each request the index of its first block in `blocks`, and the end of the last request."""
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
        """Sort the requests by time (equal times keep their order) and renumber their blocks."""
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
        """Yield each request's chain."""
        starts = self.starts.tolist()
        for first, end in pairwise(starts):
            yield self.blocks[first:end]

    @property
    def accesses(self) -> int:
        return len(self.blocks)

    @property
    def unique(self) -> int:
        """Number of different blocks; every block number is below it."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    def part(self, first: int, end: int) -> Trace:
        """Return requests `first` to `end` (excluded) as a new trace."""
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
        """Raise ConfigError where two chains differ in the block before a block: prefixes are then undefined."""
        before = np.full(self.blocks.shape, -1, np.int64)
        before[1:] = self.blocks[:-1]
        before[self.starts[:-1][self.starts[:-1] < len(before)]] = -1
        parent = np.full(self.unique, -2, np.int64)
        parent[self.blocks] = before
        wrong = np.flatnonzero(parent[self.blocks] != before)
        if len(wrong):
            request = int(np.searchsorted(self.starts, wrong[0], "right")) - 1
            raise ConfigError(
                f"trace {self.name!r}, request {request}: a block has two different predecessors; expected "
                "chained block ids, each of which identifies its whole prefix"
            )


# Sessions of agents: one session a line. Its `requests` are rows of [seconds since its start, input tokens, output
# tokens, at, new, ...]: the chain that ends at block `at` (-1: none), then `new` new blocks, numbered on. Ids are
# unique within a session. The trace names blocks of 64 tokens. Eight of them form one block here, named by the last,
# and the remainder at the end is dropped. The trace has no start times of sessions: sessions are shuffled and start at
# times drawn uniformly over a day, by `seed`.
# uniformly over a day, by `seed`.

DAY_S = 86_400.0
AGENTIC_BLOCK_TOKENS, SUBBLOCKS = 512, 8
MAX_SHARED_TOKENS = 200_000
"""Where tools are shared, requests with more input tokens than this are omitted."""


def read_agentic(name: str, lines: Iterable[str], *, shared_tools: bool, seed: int = 0) -> Trace:
    """Read sessions of agents.

    Args:
        shared_tools: blocks of a session's tool descriptions belong to all sessions with as many tokens of them. This
            is an assumption: the trace does not contain it.
    """
    sessions = [json.loads(line) for line in lines if line.strip()]
    draw = random.Random(seed)  # noqa: S311  a shuffle, not a secret
    draw.shuffle(sessions)
    begins = [draw.uniform(0, DAY_S) for _ in sessions]
    chains: list[NDArray[np.int64]] = []
    times: list[float] = []
    inputs: list[int] = []
    outputs: list[int] = []
    tools: dict[int, int] = {}  # tokens of tool descriptions: number of their first block
    first = 0  # number of this session's first block
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
    """Return each request's blocks of 64 tokens."""
    chains: list[NDArray[np.int64]] = []
    begins: list[int] = []  # number of the first new block, by the request that introduced it
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


# Traces as Mooncake publishes them: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`.
# The latter are the chained names of blocks of 512 tokens, of which the last may be partial.

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
    """Tokenize without a tokenizer: one token a byte."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)  # type: ignore[return-value]  # an array serves as a sequence


def read_text(
    name: str, lines: Lines, *, tokenize: Tokenize = byte_tokenizer, block_tokens: int = TEXT_BLOCK_TOKENS
) -> Trace:
    """Read conversations: JSON lines with `input`, and optionally `output` and `timestamp` (microseconds)."""
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
    """Read arrivals and lengths, in columns TIMESTAMP, ContextTokens and GeneratedTokens. The trace has no content, so
    every block is unique."""
    rows = list(csv.DictReader(lines))
    times = [datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows]
    inputs = [int(row["ContextTokens"]) for row in rows]
    ends = np.cumsum([0, *(tokens // block_tokens for tokens in inputs)])
    chains = [np.arange(first, end) for first, end in pairwise(ends)]
    first = min(times, default=0.0)
    outputs = [int(row["GeneratedTokens"]) for row in rows]
    return Trace.of(name, block_tokens, chains, [time - first for time in times], inputs, outputs)


def read_vllm(name: str, lines: Lines) -> Trace:
    """Read KV events as vLLM publishes them, one batch a line: [ts, [event, ...], ...] or {"ts", "events"}.

    An event is a map with `type`, or, in older versions, a list that begins with it. Events record stores, not
    requests: a request here is a stored run with its prefix, so a request that was a full hit does not appear. Only
    events of the GPU are read, and of several groups of layers only the first group that appears.
    """
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
    """Return the positional fields of an event that is a list."""
    return dict(zip(("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"), event, strict=False))


def read_recorded(name: str, lines: Lines) -> Trace:
    """Read the trace that a running cache records (`trace.path`): Mooncake's lines with `block_tokens` in each.

    It has the whole blocks of each admitted request, of all namespaces; the block names differ between namespaces.
    """
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

_FORMAT_MARKERS = (  # text in the first line of this format only
    ("found_tokens", "recorded"),
    ("hash_ids", "mooncake"),
    ("tool_tokens", "agentic"),
    ("TIMESTAMP,", "azure"),
    ("BlockStored", "vllm"),
    ('"input"', "text"),
)


def read_trace(path: Path, format: str | None = None, **options: Any) -> Trace:
    """Read a trace; ConfigError for a file that is none. `options` are those of the format's reader."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            first = lines.readline()
            name = format or next((name for sign, name in _FORMAT_MARKERS if sign in first), "")
            if name not in FORMATS:
                raise ConfigError(
                    f"{path}: {name or 'unknown'} is not a trace format; expected one of {', '.join(FORMATS)}"
                )
            trace = FORMATS[name](path.name.split(".")[0], [first, *lines], **options)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is not a trace in format {name}: {type(error).__name__} {error}") from error
    trace.check()
    return trace

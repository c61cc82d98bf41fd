"""Reading a trace by the name of its format; files may be compressed by gzip."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvcache.block.chain import SIGNATURE_BYTES, digest_chain
from kvcache.errors import ConfigError
from kvcache.trace import agentic, mooncake
from kvcache.trace.trace import Trace

Lines = Iterable[str]
Tokenize = Callable[[str], Sequence[int]]

TEXT_BLOCK_TOKENS = 16


def by_bytes(text: str) -> Sequence[int]:
    """A tokenizer for who has none: a token a byte."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.uint32)  # type: ignore[return-value]  # an array serves as a sequence


def text(name: str, lines: Lines, *, tokenize: Tokenize = by_bytes, block_tokens: int = TEXT_BLOCK_TOKENS) -> Trace:
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


def azure(name: str, lines: Lines, *, block_tokens: int = 512) -> Trace:
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


def vllm(name: str, lines: Lines) -> Trace:
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
        for told in events:
            event = told if isinstance(told, dict) else _stored(told)
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


def _stored(event: Sequence[Any]) -> Mapping[str, Any]:
    """Of an event as a list, what is told by place."""
    return dict(zip(("type", "block_hashes", "parent_block_hash", "token_ids", "block_size"), event, strict=False))


def recorded(name: str, lines: Lines) -> Trace:
    """As a running cache writes it down (`trace.path`): Mooncake's lines with `block_tokens` in each. Whole blocks of
    each request that was admitted, of all namespaces: a block's name tells them apart."""
    rows = list(filter(str.strip, lines))
    sizes = {json.loads(row)["block_tokens"] for row in rows}
    if len(sizes) > 1:
        raise ConfigError(
            f"trace {name!r} has blocks of {sorted(sizes)} tokens; expected one size: split it by `namespace`"
        )
    return mooncake.read(name, rows, block_tokens=sizes.pop() if sizes else 16)


def _numbers(names: dict[Any, int], blocks: Iterable[Any]) -> NDArray[np.int64]:
    return np.array([names.setdefault(block, len(names)) for block in blocks], np.int64)


def agentic_local(name: str, lines: Lines, *, seed: int = 0) -> Trace:
    return agentic.read(name, lines, shared_tools=False, seed=seed)


def agentic_shared(name: str, lines: Lines, *, seed: int = 0) -> Trace:
    return agentic.read(name, lines, shared_tools=True, seed=seed)


FORMATS: Mapping[str, Callable[..., Trace]] = {
    "mooncake": mooncake.read,
    "agentic": agentic_local,
    "agentic-shared": agentic_shared,
    "azure": azure,
    "text": text,
    "vllm": vllm,
    "recorded": recorded,
}

_SIGNS = (  # what the first line of a format says, and no other's
    ("found_tokens", "recorded"),
    ("hash_ids", "mooncake"),
    ("tool_tokens", "agentic"),
    ("TIMESTAMP,", "azure"),
    ("BlockStored", "vllm"),
    ('"input"', "text"),
)


def read(path: Path, format: str | None = None, **options: Any) -> Trace:
    """`options`: those of the format's reader. ConfigError for what is no trace."""
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8") as lines:
            first = lines.readline()
            name = format or next((name for sign, name in _SIGNS if sign in first), "")
            if name not in FORMATS:
                raise ConfigError(f"{path}: {name or 'unknown'} is no format of traces; there is {', '.join(FORMATS)}")
            trace = FORMATS[name](path.name.split(".")[0], [first, *lines], **options)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, UnicodeDecodeError, gzip.BadGzipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no trace of the format {name}: {type(error).__name__} {error}") from error
    trace.check()
    return trace

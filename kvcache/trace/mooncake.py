"""Traces as Mooncake publishes them: JSON lines with `timestamp` (ms), `input_length`, `output_length` and `hash_ids`,
the chained names of blocks of 512 tokens, the last of which may be partial."""

from __future__ import annotations

import json
from collections.abc import Iterable

import numpy as np

from kvcache.trace.trace import Trace

BLOCK_TOKENS = 512


def read(name: str, lines: Iterable[str], *, block_tokens: int = BLOCK_TOKENS) -> Trace:
    rows = [json.loads(line) for line in lines if line.strip()]
    return Trace.of(
        name,
        block_tokens,
        [np.asarray(row["hash_ids"], np.int64) for row in rows],
        [row["timestamp"] / 1e3 for row in rows],
        [row["input_length"] for row in rows],
        [row.get("output_length", 0) for row in rows],
    )

"""Each format by a few lines of it, and by the whole traces where they are there."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from kvcache.errors import ConfigError
from kvcache.trace.formats import read_trace

DATA = Path(__file__).parents[3] / "shared" / "data"
SHARED = next(
    (place for place in (DATA, Path(__file__).parents[2].parent.parent / "shared" / "data") if place.exists()), DATA
)


def written(tmp_path: Path, *rows: object) -> Path:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def chains(path: Path, format: str | None = None, **options: object) -> list[list[int]]:
    return [chain.tolist() for chain in read_trace(path, format, **options)]


def test_mooncake_in_order_of_time(tmp_path: Path) -> None:
    late = {"timestamp": 2000, "input_length": 900, "output_length": 3, "hash_ids": [7, 9]}
    early = {"timestamp": 1000, "input_length": 600, "output_length": 4, "hash_ids": [7, 8]}
    trace = read_trace(written(tmp_path, late, early))
    assert [chain.tolist() for chain in trace] == [[0, 1], [0, 2]]
    assert (trace.times_s.tolist(), trace.input_tokens.tolist(), trace.block_tokens) == ([1.0, 2.0], [600, 900], 512)


def session(tool_tokens: int, *requests: tuple[float, int, int, int]) -> dict[str, object]:
    rows = [[t, tokens, 5, at, new, 1.0, 0.0, 0] for t, tokens, at, new in requests]
    return {"id": "x", "block_size": 64, "tool_tokens": tool_tokens, "system_tokens": 0, "requests": rows}


def test_agent_chains_branch_at_the_recorded_block(tmp_path: Path) -> None:
    grows = session(0, (0, 1100, -1, 17), (5, 1600, 16, 8), (9, 1200, 7, 10))
    # blocks of 64: 0..16, then 0..16 and 17..24, then 0..7 and 25..34; of 512 they are [7, 15], [7, 15, 23], [7, 32]
    assert chains(written(tmp_path, grows), "agentic") == [[0, 1], [0, 1, 2], [0, 3]]


def test_agents_share_their_tools_where_that_is_assumed(tmp_path: Path) -> None:
    one, two = session(1000, (0, 1600, -1, 24)), session(1000, (0, 1600, -1, 24))
    path = written(tmp_path, one, two, session(0, (0, 300_000, -1, 24)))
    apart, together = chains(path, "agentic"), chains(path, "agentic-shared")
    assert len(apart) == 3
    assert len(together) == 2, "the longest are left out"
    assert len({chain[0] for chain in apart}) == 3
    assert together[0][0] == together[1][0], "of 1000 tokens one block of 512 is whole"
    assert together[0][1:] != together[1][1:]


def test_text_traces_accept_any_tokenizer(tmp_path: Path) -> None:
    path = written(
        tmp_path, {"timestamp": 5e6, "input": "a" * 40, "output": "xy"}, {"timestamp": 6e6, "input": "a" * 33 + "b"}
    )
    assert chains(path) == [[0, 1], [0, 1]]
    assert chains(path, tokenize=lambda text: [ord(c) for c in text], block_tokens=8) == [[0, 1, 2, 3, 4], [0, 1, 2, 3]]


def test_azure_is_arrivals_only(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:15:46.6805900,1500,44",
        "2023-11-16 18:15:47.6805900,600,9",
    )
    trace = read_trace(path)
    assert [len(chain) for chain in trace] == [2, 1]
    assert trace.unique == trace.accesses == 3
    assert np.allclose(trace.times_s, [0, 1])


def test_vllm_events_are_read_with_their_parent_chain(tmp_path: Path) -> None:
    def stored(parent: int | None, *blocks: int) -> dict[str, object]:
        return {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": parent, "block_size": 16}

    path = written(
        tmp_path, [1.0, [stored(None, 11, 12)]], {"ts": 2.0, "events": [{"type": "BlockRemoved"}, stored(11, 13)]}
    )
    assert chains(path) == [[0, 1], [0, 2]]
    older = [1.0, [["BlockStored", [11, 12], None, [0] * 32, 16, None], ["AllBlocksCleared"]]], stored(11, 13)
    assert chains(written(tmp_path, older[0], [2.0, [older[1]]])) == [[0, 1], [0, 2]]


def test_vllm_events_are_filtered_by_medium_and_group(tmp_path: Path) -> None:
    def stored(*blocks: int, **more: object) -> dict[str, object]:
        return {"type": "BlockStored", "block_hashes": blocks, "parent_block_hash": None, "block_size": 16, **more}

    events = [stored(1, 2, medium="GPU", group_idx=1), stored(3, group_idx=2), stored(1, medium="CPU", group_idx=1)]
    assert chains(written(tmp_path, [1.0, events, 0])) == [[0, 1]]


def test_a_recorded_trace_is_read(tmp_path: Path) -> None:
    def row(time: int, *ids: int, block_tokens: int = 32) -> dict[str, object]:
        told = {"timestamp": time, "input_length": block_tokens * len(ids), "output_length": 0, "hash_ids": ids}
        return {**told, "block_tokens": block_tokens, "namespace": "ab", "found_tokens": 0}

    trace = read_trace(written(tmp_path, row(1500, 1 << 52, 7), row(2500, 1 << 52)))
    assert ([chain.tolist() for chain in trace], trace.block_tokens) == ([[1, 0], [1]], 32)
    assert (trace.times_s.tolist(), trace.input_tokens.tolist()) == ([1.5, 2.5], [64, 32])
    with pytest.raises(ConfigError, match="one size"):
        read_trace(written(tmp_path, row(1, 1), row(2, 2, block_tokens=16)))


@pytest.mark.parametrize(
    "line", ["nonsense", '{"hash_ids": 3}', '{"hash_ids": ["x"], "timestamp": 1, "input_length": 1}']
)
def test_an_invalid_trace_is_refused(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="trace"):
        read_trace(written(tmp_path, line))


def test_block_names_without_chains_are_refused(tmp_path: Path) -> None:
    rows = [{"timestamp": i, "input_length": 2, "hash_ids": ids} for i, ids in enumerate(([1, 2], [3, 2]))]
    with pytest.raises(ConfigError, match="chained"):
        read_trace(written(tmp_path, *rows))


@pytest.mark.skipif(not SHARED.exists(), reason="the traces are not here: they are not shipped")
@pytest.mark.parametrize(
    ("file", "format", "requests", "unique", "ideal"),
    [
        ("mooncake-conversation", None, 12_031, 182_790, 0.366),
        ("mooncake-synthetic", None, 3_993, 43_924, 0.640),
        ("agentic-sessions", "agentic-shared", 42_970, 271_463, 0.965),
        ("agentic-sessions", "agentic", 49_334, 431_071, 0.963),
    ],
)
def test_public_traces_have_their_published_totals(
    file: str, format: str | None, requests: int, unique: int, ideal: float
) -> None:
    trace = read_trace(SHARED / "traces" / f"{file}.jsonl.gz", format)
    assert (len(trace), trace.unique) == (requests, unique)
    seen, found = np.zeros(trace.unique, bool), 0
    for chain in trace:
        known = seen[chain]
        found += len(chain) if known.all() else int(known.argmin())
        seen[chain] = True
    assert found / trace.accesses == pytest.approx(ideal, abs=0.0006)


@pytest.mark.skipif(not SHARED.exists(), reason="the traces are not here: they are not shipped")
def test_arrivals_and_texts_can_be_read() -> None:
    assert len(read_trace(SHARED / "traces" / "azure-conv.csv.gz")) == 19_366
    assert len(read_trace(SHARED / "text" / "agent-sessions.jsonl.gz")) == 164


def test_a_compressed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(json.dumps({"timestamp": 0, "input_length": 1, "hash_ids": [4]}))
    assert chains(path) == [[0]]

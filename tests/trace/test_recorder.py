"""What a cache is asked is written down, by name, within bounds; and what is written can be played again."""

from __future__ import annotations

import json
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.block.layout import KVLayout
from kvcache.block.record import record_bytes
from kvcache.cache.cache import Cache
from kvcache.observe.recent_requests import RecentRequest
from kvcache.settings import Settings
from kvcache.trace import formats
from kvcache.trace.recorder import HASH_ID_BITS, TraceRecorder, start_recording
from kvcache.trace.replay import read_arrivals
from kvcache.trace.simulate import simulate
from tests.trace.test_simulate import traffic

LAYOUT = KVLayout.mha(layers=1, kv_heads=1, head_dim=4, block_tokens=4)
SIXTEEN = KVLayout.mha(layers=1, kv_heads=1, head_dim=8, dtype="fp32", block_tokens=16)
SECRET = 1_987_654_321  # longer than what a time may happen to have


def asked(number: int, blocks: int) -> RecentRequest:
    packed = b"".join(bytes([number, i]).rjust(32, b"\1") for i in range(blocks))
    return RecentRequest("r", b"n" * 32, [], 16, packed, number, 1000.0 + number, hit_blocks=1)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text().splitlines()]


def test_a_trace_holds_block_names_and_no_content(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "trace.jsonl"
    with closing(
        kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False, control__enabled=False, trace__path=str(path))
    ) as cache:
        bound = cache.namespace(LAYOUT, model="m", revision="r")
        for tokens, named in (([SECRET] * 10, {}), ([SECRET] * 14, {"agent": "planner", "session": "one"})):
            with bound.request(**named) as r:
                r.match(tokens)
                r.admit()
                signatures = list(r.signatures)
    first, second = lines(path)
    assert first["timestamp"] <= second["timestamp"]
    assert (first["input_length"], second["input_length"]) == (8, 12)
    assert second["hash_ids"] == [int.from_bytes(s[:8], "big") >> (64 - HASH_ID_BITS) for s in signatures]
    assert second["hash_ids"][:2] == first["hash_ids"]
    assert second["namespace"] == bound.id[:4].hex()
    assert second["block_tokens"] == 4
    assert (second["agent"], second["session"]) == ("planner", "one")
    assert first.keys() == second.keys() - {"agent", "session"}
    assert str(SECRET) not in path.read_text()
    arrivals, block_tokens = read_arrivals(path)
    assert (len(arrivals), block_tokens) == (2, 4)
    assert arrivals[1].names.tolist() == second["hash_ids"]


@pytest.mark.parametrize("policy", ["hazard", "lru"])
def test_a_replayed_trace_gives_the_recorded_hits(tmp_path: Path, policy: str) -> None:
    """The simulator says of the written trace what the cache reported, which had room for some of it."""
    path, room = tmp_path / "trace.jsonl", 64
    slot = record_bytes(SIXTEEN.block_bytes())
    settings = {
        "host": {"capacity_bytes": room * slot, "slab_bytes": room * slot},
        "nvme": {"enabled": False},
        "evict": {"policy": policy},
        "flow": {"deadline_s": 60},
        "trace": {"path": str(path)},
    }
    lived = traffic(5, 400)
    tensors: Any = np.zeros((1, 2, 512, 16, 1, 8), np.float32)
    pages = [kvcache.GroupPages.from_tensors(SIXTEEN, tensors, axes=("kv", "page", "token", "head", "dim"))]
    with Cache(Settings.model_validate(settings)) as cache:
        ended = start_recording(cache)
        assert ended is not None
        bound = cache.namespace(SIXTEEN, model="m", revision="1")
        for chain in lived:
            with bound.request() as r:
                hit = r.match(digests=[sha256(b"%d" % block).digest() for block in chain])
                r.admit()
                r.store(pages, [list(range(len(chain) - hit.blocks))], first_block=hit.blocks).wait()
        ended()
        asked, found = (cache.counters.get(name) for name in ("asked_tokens", "hit_tokens"))
    trace = formats.read_trace(path)
    assert (trace.name, trace.block_tokens, len(trace)) == ("trace", 16, 400)
    assert [row["found_tokens"] for row in lines(path)] == [16 * n for n in simulate(trace, policy, room).hits]
    assert simulate(trace, policy, room).hit_rate == found / asked
    assert 0 < found < asked


def test_without_a_path_nothing_is_written(tmp_path: Path) -> None:
    with closing(kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False, control__enabled=False)) as cache:
        assert isinstance(cache, Cache)
        assert start_recording(cache) is None


def test_files_are_bounded_and_the_last_requests_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "t"
    with closing(TraceRecorder(path, file_bytes=2000)) as recorder:
        for number in range(200):
            recorder.on_request(asked(number % 250, 4))
    kept = [row for name in (f"{path}.1", str(path)) if Path(name).exists() for row in lines(Path(name))]
    assert [row["timestamp"] for row in kept] == [1000 * (1000 + n) for n in range(200 - len(kept), 200)]
    assert 5 < len(kept) < 40
    assert recorder.dropped_rows == 0
    for name in (path, Path(f"{path}.1")):
        assert not name.exists() or name.stat().st_size < 2300


def test_a_failed_trace_file_ends_only_the_trace(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "t", file_bytes=2000)
    (tmp_path / "t").mkdir()
    recorder.on_request(asked(1, 4))
    recorder.close()
    recorder.on_request(asked(2, 4))
    assert recorder.dropped_rows == 1


def test_an_existing_trace_is_appended_to(tmp_path: Path) -> None:
    for number in range(2):
        with closing(TraceRecorder(tmp_path / "t", file_bytes=1 << 20)) as recorder:
            recorder.on_request(asked(number, 2))
    assert len(lines(tmp_path / "t")) == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no requests"),
        ("nonsense", "line 1: not JSON"),
        ('{"timestamp": 1}', "line 1"),
        ('{"timestamp": 1, "input_length": 4, "hash_ids": ["x"]}', "line 1"),
        ("[]", "line 1"),
        (
            "\n".join(f'{{"timestamp": 1, "input_length": 4, "hash_ids": [1], "block_tokens": {n}}}' for n in (4, 8)),
            "one size only",
        ),
    ],
)
def test_an_invalid_trace_is_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "t").write_text(text)
    with pytest.raises(kvcache.ConfigError, match=said):
        read_arrivals(tmp_path / "t")

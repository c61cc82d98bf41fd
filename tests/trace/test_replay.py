"""A trace against a real cache, on a clock that is turned: hits are those of the trace, bytes are those stored."""

from __future__ import annotations

import gzip
import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcache
from kvcache.cli import main as frame
from kvcache.trace.replay import Arrival, Replay, read_arrivals

BLOCK = 16


class Turned:
    """Sleeping takes no time but on it."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += max(0.0, seconds)


def arrival(time_s: float, *names: int, rest: int = 1) -> Arrival:
    return Arrival(time_s, np.array(names, np.int64), len(names) * BLOCK + rest)


def replay(cache: Any, clock: Turned, speed: float = 1.0) -> Replay:
    return Replay(
        cache,
        block_tokens=BLOCK,
        max_blocks=16,
        token_bytes=64,
        prefill_tokens_per_s=1000,
        speed=speed,
        clock=clock,
    )


@pytest.fixture
def cache() -> Any:
    with closing(
        kvcache.open(host__capacity_bytes="1MiB", nvme__enabled=False, control__enabled=False, plan__enabled=False)
    ) as made:
        yield made


def test_replay_gives_the_hits_of_the_trace(cache: Any) -> None:
    played = replay(cache, Turned()).run(
        [arrival(0, 1, 2, 3), arrival(10, 1, 2, 9), arrival(20, 7), arrival(30, 1, 2, 3)]
    )
    assert played.hit_tokens == {"host": (2 + 3) * BLOCK}
    assert played.loaded_tokens == 5 * BLOCK
    assert played.wrong_blocks == 0
    assert played.ttft_s == pytest.approx([0.049, 0.017, 0.017, 0.001])


def test_a_request_waits_while_the_engine_is_busy(cache: Any) -> None:
    played = replay(cache, Turned()).run([arrival(0, 1), arrival(0.005, 2)])
    assert played.ttft_s == pytest.approx([0.017, 0.017 - 0.005 + 0.017])


def test_double_speed_halves_the_time(cache: Any) -> None:
    clock = Turned()
    played = replay(cache, clock, speed=2.0).run([arrival(0, 1), arrival(10, 2)])
    assert clock.time == pytest.approx(5 + 0.0085)
    assert played.ttft_s == pytest.approx([0.0085, 0.0085])


def test_replay_detects_wrong_bytes(cache: Any) -> None:
    playing = replay(cache, Turned())
    playing.run([arrival(0, 1, 2)])
    original = playing._write
    playing._write = lambda names, first: (original(names, first), playing._kv.__setitem__((0, 0, first), 7))[0]
    playing.run([arrival(0, 1, 2, 3)])
    assert playing.run([arrival(0, 1, 2, 3)]).wrong_blocks == 1


def test_the_command_replays_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl.gz"
    rows = [{"timestamp": 10 * i, "input_length": 1030, "output_length": 1, "hash_ids": [0, 1, 2]} for i in range(5)]
    trace.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    (tmp_path / "k.toml").write_text('[host]\ncapacity_bytes="16MiB"\n[nvme]\nenabled=false\n[plan]\nenabled=false\n')
    monkeypatch.setattr(
        sys,
        "argv",
        f"kvcache replay {trace} --cache {tmp_path / 'k.toml'} --token-bytes 1KiB --prefill 1000000 --json".split(),
    )
    with pytest.raises(SystemExit) as left:
        frame.main()
    assert not left.value.code
    told = json.loads(capsys.readouterr().out)
    assert (told["requests"], told["tokens"], told["wrong_blocks"]) == (5, 5150, 0)
    assert told["hit_tokens"] == {"host": 4 * 1024}
    assert told["misses"] == {"cold": 1}
    assert 0 < told["ttft_s"]["p50"] <= told["ttft_s"]["p99"]


def test_a_trace_of_real_traffic_is_read() -> None:
    path = Path(__file__).parents[2] / ".." / "shared" / "data" / "traces" / "mooncake-conversation.jsonl.gz"
    if not path.exists():
        pytest.skip(f"{path.resolve()} is not on this machine")
    arrivals, block_tokens = read_arrivals(path, 100)
    assert (len(arrivals), block_tokens) == (100, 512)

"""Engines that share a server or a daemon: what one computed another finds, and no fault of either fails a request."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.peer.redis_proxy import RedisProxy
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.vllm.conftest import ROOT, Run, cache
from tests.peer.vllm.prompts import SMALL, ask, ids, preemption_prompts

A = ids(700, 1)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    if MISSING:
        pytest.skip(MISSING)
    server = RedisServer("--maxmemory", "512mb")
    yield server
    server.end()


def shared(server: RedisServer, **options: Any) -> dict[str, Any]:
    """No drive: what is found by another process came from the server."""
    options = cache(Path("unused"), **options)
    options["settings"]["nvme"] = {"enabled": False}
    options["settings"]["redis"] = {"enabled": True, "url": server.tcp}
    return options


def test_another_process_hits_in_redis(run: Run, uncached: Run, server: RedisServer) -> None:
    plain = uncached([ask(A)])
    first = run([ask(A), "flush"], connector=shared(server))
    second = run([ask(A)], connector=shared(server, lookup_s=5.0))
    assert second["rounds"][0]["cached"] == [672]
    assert plain["rounds"][0]["tokens"] == first["rounds"][0]["tokens"] == second["rounds"][0]["tokens"]


def test_a_redis_behind_a_slow_line_is_not_loaded_from(run: Run, uncached: Run, server: RedisServer) -> None:
    """The first load is late, and from then on a prompt is computed; by the plan's rows in vLLM's own metrics."""
    prompts = [ids(700, n) for n in range(1, 4)]
    run([ask(*prompts), "flush"], connector=shared(server))
    options = shared(server, lookup_s=10.0, load_s=3.0)
    line = RedisProxy(server.port)
    line.delay_s = 0.1  # for 64 KiB at most; a block is as much
    options["settings"] |= {"redis": {"enabled": True, "url": line.url}, "flow": {"lookup_timeout_s": 10.0}}
    del options["settings"]["plan"]
    new, end = [ask(ids(700, 90)), ask(ids(700, 91))], ask(A[:40])
    first, *later = [ask(prompt) for prompt in prompts]
    try:
        rounds = [*new, first, "arrived", *later, "sampled plan_regret_seconds", end, "counters"]
        result = run(rounds, connector=options)
    finally:
        line.end()
    plain = uncached([*new, first, *later, end])
    asked, told = [r for r in result["rounds"] if "cached" in r], result["rounds"][-1]
    assert [r["tokens"] for r in asked] == [r["tokens"] for r in plain["rounds"]]
    assert [r["cached"] for r in asked[3:5]] == [[0], [0]]
    assert told["misses"]["below_plan"] == 2
    assert 0 < told["plan_regret_seconds"] < told["planned_seconds"]
    assert 0 < result["metrics"]["kvcache_plan_regret_seconds_total"] <= told["plan_regret_seconds"]


def test_a_killed_redis_fails_no_request(run: Run, uncached: Run, server: RedisServer) -> None:
    plain = uncached([preemption_prompts(), preemption_prompts()], llm={**SMALL, "num_gpu_blocks_override": 400})
    small = shared(server, lookup_s=0.2)
    small["settings"]["host"]["capacity_bytes"] = "4MiB"  # so that most is on the server
    assert server._process is not None
    result = run(
        [preemption_prompts(), f"kill {server._process.pid}", preemption_prompts(), "leaks"], connector=small, llm=SMALL
    )
    assert [r["tokens"] for r in result["rounds"] if "tokens" in r] == [r["tokens"] for r in plain["rounds"]]
    assert set(result["rounds"][3].values()) == {0}


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    socket = tmp_path / "socket"
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "KVCACHE_DIR": str(tmp_path),
        "KVCACHE_HOST__CAPACITY_BYTES": "128MiB",
        "KVCACHE_NVME__CAPACITY_BYTES": "512MiB",
        "KVCACHE_NVME__MIN_FREE_BYTES": "0",
        "KVCACHE_PLAN__ENABLED": "false",
    }
    command = [sys.executable, "-m", "kvcache.cli.main", "daemon", "--socket", str(socket)]
    process = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield f"unix:{socket}", process
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    process.wait(60)


def test_two_engines_share_a_daemon(run: Run, daemon: tuple[str, subprocess.Popen[bytes]]) -> None:
    first = run([ask(A), "flush"], connector={"address": daemon[0]})
    second = run([ask(A)], connector={"address": daemon[0]})
    assert second["rounds"][0]["cached"] == [672]
    assert first["rounds"][0]["tokens"] == second["rounds"][0]["tokens"]


def test_a_killed_daemon_fails_no_request(run: Run, uncached: Run, daemon: tuple[str, subprocess.Popen[bytes]]) -> None:
    plain = uncached([preemption_prompts(), preemption_prompts()], llm={**SMALL, "num_gpu_blocks_override": 400})
    rounds = [preemption_prompts(), f"kill {daemon[1].pid}", preemption_prompts(), "leaks"]
    result = run(rounds, connector={"address": daemon[0]}, llm=SMALL)
    assert [r["tokens"] for r in result["rounds"] if "tokens" in r] == [r["tokens"] for r in plain["rounds"]]
    assert set(result["rounds"][3].values()) == {0}

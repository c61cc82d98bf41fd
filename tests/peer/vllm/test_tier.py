"""Our tiers under vLLM's own OffloadingConnector: what left its host memory, or its process, comes back from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peer import s3_server
from tests.peer.redis_server import MISSING, RedisServer
from tests.peer.vllm.conftest import Run
from tests.peer.vllm.prompts import SMALL, ask, ids, preemption_prompts

A, B = ids(700, 1), ids(700, 2)
CHUNK = 32 * 2 * 2 * 32 * 4 * 4  # bytes of one block of tiny-llama: tokens, K and V, heads, dim, layers, fp32
NVME = {"capacity_bytes": "256MiB", "min_free_bytes": 0}


def offloading(settings: dict[str, Any], *, chunks: int = 200, **tier: Any) -> dict[str, Any]:
    """vLLM keeps so many chunks itself."""
    below = {"type": "KVCacheTier", "module_path": "kvcache.connector.vllm.tier", "settings": settings, **tier}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "CpuOffloadingSpec",
            "spec_module_path": "cpu_offloading_spec",
            "cpu_bytes_to_use": chunks * CHUNK,
            "offload_prompt_only": False,
            "secondary_tiers": [below],
        },
    }


def on_drive(path: Path, **more: Any) -> dict[str, Any]:
    host = {"capacity_bytes": "32MiB"}
    return offloading({"host": host, "nvme": {"path": str(path), **NVME}, "control": {"enabled": False}}, **more)


def answers(result: dict[str, Any]) -> list[Any]:
    return [r["tokens"] for r in result["rounds"] if "tokens" in r]


def test_another_process_hits_on_the_drive(run: Run, uncached: Run, tmp_path: Path) -> None:
    plain = uncached([ask(A), ask(B), ask(A)])
    first = run([ask(A), ask(B), "idle", ask(A)], transfer=on_drive(tmp_path / "nvme"))
    second = run([ask(A), ask(B), ask(A)], transfer=on_drive(tmp_path / "nvme"))
    assert answers(first) == answers(second) == answers(plain)
    assert [r["cached"] for r in first["rounds"] if "cached" in r] == [[0], [0], [672]]
    assert [r["cached"] for r in second["rounds"]] == [[672]] * 3


def test_blocks_evicted_by_vllm_hit_in_lower_tiers(run: Run, uncached: Run, tmp_path: Path) -> None:
    """vLLM's own tier has room for one prompt and a half; an eighth of a conversation would be there."""
    others = [ask(ids(700, seed)) for seed in range(3, 7)]
    rounds = [ask(A), *others, "idle", ask(A)]
    plain = uncached([r for r in rounds if r != "idle"])
    result = run(rounds, transfer=on_drive(tmp_path / "nvme", chunks=32))
    assert answers(result) == answers(plain)
    assert result["rounds"][-1]["cached"] == [672]


def test_preemption_and_damage_change_no_answer(run: Run, uncached: Run, tmp_path: Path) -> None:
    plain = uncached([preemption_prompts(), preemption_prompts()], llm={**SMALL, "num_gpu_blocks_override": 400})
    first = run(
        [preemption_prompts(), preemption_prompts()], transfer=on_drive(tmp_path / "nvme", chunks=64), llm=SMALL
    )
    assert answers(first) == answers(plain)
    for segment in sorted((tmp_path / "nvme").rglob("*segment*")):  # every other page of what was kept is overwritten
        if segment.is_file():
            size = segment.stat().st_size
            with segment.open("r+b") as file:
                for at in range(1 << 12, size, 1 << 17):
                    file.seek(at)
                    file.write(b"\xff" * 64)
    second = run(
        [preemption_prompts(), preemption_prompts()], transfer=on_drive(tmp_path / "nvme", chunks=64), llm=SMALL
    )
    assert answers(second) == answers(plain)
    assert {reason for r in second["rounds"] for reason in r["finish"]} == {"length"}


@pytest.mark.parametrize("faults", ["7 none gone damaged full", "9 none raising"])
def test_preemption_and_a_faulty_cache_change_no_answer(run: Run, uncached: Run, tmp_path: Path, faults: str) -> None:
    plain = uncached([preemption_prompts(), preemption_prompts()], llm={**SMALL, "num_gpu_blocks_override": 400})
    result = run(
        [preemption_prompts(), preemption_prompts()],
        transfer=on_drive(tmp_path / "nvme", chunks=64),
        llm=SMALL,
        env={"FAULTS": faults},
        prepare=["faults"],
    )
    assert answers(result) == answers(plain)
    assert {reason for r in result["rounds"] for reason in r["finish"]} == {"length"}


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_another_process_hits_in_redis(run: Run) -> None:
    server = RedisServer("--maxmemory", "512mb")
    try:
        host, redis = {"capacity_bytes": "32MiB"}, {"enabled": True, "url": server.tcp}
        settings = {"host": host, "nvme": {"enabled": False}, "redis": redis, "control": {"enabled": False}}
        first = run([ask(A), "idle"], transfer=offloading(settings, lookup_s=5.0))
        second = run([ask(A)], transfer=offloading(settings, lookup_s=5.0))
    finally:
        server.end()
    assert second["rounds"][0]["cached"] == [672]
    assert answers(first) == answers(second)


@pytest.mark.parametrize("store", ["directory", "moto"])
def test_another_process_hits_in_an_object_store(run: Run, tmp_path: Path, store: str) -> None:
    if store != "directory" and s3_server.MISSING[store]:
        pytest.skip(s3_server.MISSING[store])
    server = None if store == "directory" else s3_server.S3Server(store)
    try:
        where = {"url": f"file://{tmp_path}/objects"} if server is None else server.settings
        settings = {
            "host": {"capacity_bytes": "32MiB"},
            "nvme": {"enabled": False},
            "object": {"enabled": True, **where},
            "flow": {"lookup_timeout_s": 5.0},
            "control": {"enabled": False},
        }
        first = run([ask(A), "idle"], transfer=offloading(settings, lookup_s=5.0))
        second = run([ask(A)], transfer=offloading(settings, lookup_s=5.0))
    finally:
        if server is not None:
            server.end()
    assert second["rounds"][0]["cached"] == [672]
    assert answers(first) == answers(second)


def test_process_local_hashes_are_not_stored(run: Run, tmp_path: Path) -> None:
    result = run(
        [ask(A), "idle", ask(A)], transfer=on_drive(tmp_path / "nvme"), llm={"prefix_caching_hash_algo": "xxhash"}
    )
    assert "block hashes differ between processes" in result["log"]
    assert answers(result)[0] == answers(result)[1]

"""What stands beside the cache in an engine: adapters, speculation, another connector, replicas."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.peer.vllm.conftest import HERE, PYTHON, WATCHDOG_S, Run, cache
from tests.peer.vllm.prompts import ask, ids

A, B = ids(700, 1), ids(700, 2)
WITH_ADAPTERS = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}


def tokens(result: dict[str, Any]) -> list[Any]:
    return [r["tokens"] for r in result["rounds"] if "tokens" in r]


def adapter(place: Path, seed: int) -> Path:
    assert PYTHON is not None
    subprocess.run(
        [PYTHON, HERE / "lora_adapter.py", place, str(seed)], check=True, capture_output=True, timeout=WATCHDOG_S
    )
    return place


def test_adapters_share_nothing_with_other_weights(run: Run, tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "one", 1), adapter(tmp_path / "two", 2)
    changed = adapter(tmp_path / "changed", 3)
    rounds = [
        ask(A, lora=["one", 1, str(one)]),
        ask(A, lora=["two", 2, str(two)]),
        ask(A),
        ask(A, lora=["one", 1, str(one)]),
        ask(A, lora=["two", 2, str(two)]),
        f"replace {changed} {one}",
        ask(A, lora=["one", 3, str(one)]),  # the same name and path; vLLM's own hash does not see it
        ask(A, lora=["one", 3, str(one)]),
    ]
    result = run(rounds, connector=cache(tmp_path / "nvme"), llm=WITH_ADAPTERS)
    assert [r["cached"][0] for r in result["rounds"] if "cached" in r] == [0, 0, 0, 672, 672, 0, 672]
    said = tokens(result)
    assert said[0] == said[3]
    assert said[1] == said[4]
    assert said[5] == said[6]
    assert len({str(answer) for answer in (said[0], said[1], said[2], said[5])}) == 4


@pytest.mark.parametrize("load", ["async", "sync"])
def test_ngram_speculation_gives_the_same_answers(run: Run, uncached: Run, tmp_path: Path, load: str) -> None:
    """n-gram: no draft model, so that there is nothing beside the blocks. An answer that repeats is guessed right."""
    repeated = ids(60, 5) * 8
    speculation = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
    rounds = [ask(repeated, A, tokens=40), "flush", ask(repeated, A, tokens=40)]
    plain = uncached([ask(repeated, A, tokens=40)] * 2)
    result = run(rounds, connector=cache(tmp_path / "nvme", load=load), llm=speculation)
    assert tokens(result) == tokens(plain)
    assert result["rounds"][2]["cached"] == [480 if load == "async" else 448, 672]


def test_draft_model_speculation_runs_uncached(run: Run, uncached: Run, models: Path, tmp_path: Path) -> None:
    draft = {"method": "draft_model", "model": str(models / "tiny-llama"), "num_speculative_tokens": 2}
    speculation = {"speculative_config": draft}
    plain = uncached([ask(A)] * 2, llm=speculation)
    rounds = [ask(A), "sampled declined", ask(A)]
    result = run(rounds, connector=cache(tmp_path / "nvme"), llm=speculation)
    assert tokens(result) == tokens(plain)
    assert [r["cached"] for r in result["rounds"] if "cached" in r] == [[0], [0]]
    assert result["metrics"]["kvcache_declined_total,off"] >= 1, "in vLLM's own metrics"
    assert "speculation by 'draft_model'" in result["log"]


def test_multi_connector_gives_the_same_answers(run: Run, uncached: Run, tmp_path: Path) -> None:
    """As a child of MultiConnector: what either has is found, and both keep what is computed."""

    def both(nvme: Path, files: Path) -> dict[str, Any]:
        ours = {
            "kv_connector": "KVCacheConnector",
            "kv_connector_module_path": "kvcache.connector.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": cache(nvme),
        }
        theirs = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": str(files)},
        }
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, theirs]},
        }

    plain = uncached([ask(A), ask(B), ask(A + B[:100])])
    rounds = [ask(A), "idle", ask(A)]
    first = run(rounds, transfer=both(tmp_path / "nvme", tmp_path / "files"))
    assert [r["cached"] for r in first["rounds"] if "cached" in r] == [[0], [672]]
    second = run([ask(A), ask(A + B[:100])], transfer=both(tmp_path / "nvme", tmp_path / "others"))
    assert [r["cached"] for r in second["rounds"]] == [[672], [672]]  # from ours: the other's folder is empty
    third = run([ask(A)], transfer=both(tmp_path / "empty", tmp_path / "files"))
    assert third["rounds"][0]["cached"][0] > 0  # from the other's: ours is empty
    answers = tokens(plain)
    assert tokens(first) == [answers[0], answers[0]]
    assert tokens(second) == [answers[0], answers[2]]
    assert tokens(third) == [answers[0]]

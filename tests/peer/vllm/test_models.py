"""Models of every family: the answers are those without a cache, and what was found is not computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peer.vllm.conftest import MODELS, ROOT, Run, cache
from tests.peer.vllm.prompts import ask, ids

A, B = ids(700, 1), ids(700, 2)
LONGER, FULL = A + ids(150, 3), A[:640]
ROUNDS = [ask(A, B), ask(A, B), ask(LONGER, FULL)]


def tokens(result: dict) -> list:
    return [r["tokens"] for r in result["rounds"] if "tokens" in r]


@pytest.mark.parametrize("load", ["async", "sync", "layers"])
@pytest.mark.parametrize("model", ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-gemma3"])
def test_a_second_process_hits_and_answers_the_same(
    run: Run, uncached: Run, tmp_path: Path, model: str, load: str
) -> None:
    plain = uncached(ROUNDS, model=model)
    first = run([*ROUNDS, "flush", "leaks"], model=model, connector=cache(tmp_path / "nvme", load=load))
    second = run([*ROUNDS, "flush"], model=model, connector=cache(tmp_path / "nvme", load=load))
    assert tokens(first) == tokens(second) == tokens(plain)
    # A block is 32 tokens. Full hits are whole where a request waits for its blocks and one group is loaded.
    whole = 640 if load == "async" and model != "tiny-gemma3" else 608
    assert [r["cached"] for r in first["rounds"][:3]] == [[0, 0], [672, 672], [672, whole]]
    assert [r["cached"] for r in second["rounds"][:3]] == [[672, 672], [672, 672], [832, whole]]
    asked = sum(len(p["ids"]) for prompts in ROUNDS for p in prompts)
    counted = {name: value for name, value in second["metrics"].items() if "prompt_tokens_by_source" in name}
    external = sum(sum(r["cached"]) for r in second["rounds"][:3])
    assert counted["vllm:prompt_tokens_by_source,source=external_kv_transfer"] == external
    assert counted["vllm:prompt_tokens_by_source,source=local_compute"] == asked - external
    assert first["rounds"][3] == second["rounds"][3] == {"flushed": True, "faults": []}
    assert set(first["rounds"][4].values()) == {0}


@pytest.mark.skipif(not (MODELS / "smollm2").exists(), reason="no SmolLM2 here: benchmarks/vllm_ttft.py makes it once")
@pytest.mark.parametrize("prefix_caching", [False, True])
def test_a_trained_model_answers_the_same(run: Run, uncached: Run, tmp_path: Path, prefix_caching: bool) -> None:
    """SmolLM2; where vLLM has a prefix cache of its own, that is asked first."""
    job = {"model": "smollm2", "llm": {"enable_prefix_caching": prefix_caching}}
    rounds = [ask(A, tokens=24), "flush", ask(A, LONGER, tokens=24)]
    plain = uncached(rounds[::2], **job)
    first = run(rounds, connector=cache(tmp_path / "nvme"), **job)
    second = run(rounds, connector=cache(tmp_path / "nvme"), **job)
    assert tokens(first) == tokens(second) == tokens(plain)
    assert [first["rounds"][0]["cached"], second["rounds"][0]["cached"]] == [[0], [672]]
    assert first["rounds"][2]["cached"] == [672, 672]


def test_the_connector_is_found_by_name_alone(run: Run, tmp_path: Path) -> None:
    """By the entry point that it declares, vLLM knows the connector without a module's path."""
    declared = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[project.entry-points.")[2]
    assert declared.startswith('"vllm.general_plugins"]')
    lines = declared.partition("[tool")[0].replace('"', "")
    installed = tmp_path / "site" / "kvcache_tiers-0.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: kvcache-tiers\nVersion: 0\n", encoding="utf-8")
    (installed / "entry_points.txt").write_text(f"[{lines}", encoding="utf-8")
    named = {"kv_connector": "KVCacheConnector", "kv_role": "kv_both"}
    transfer = {**named, "kv_connector_extra_config": cache(tmp_path / "nvme")}
    result = run([ask(A), "flush", ask(A)], transfer=transfer, path=[str(tmp_path / "site")])
    assert [r["cached"] for r in result["rounds"] if "cached" in r] == [[0], [672]]


def test_a_model_without_prefix_reuse_runs_uncached(run: Run, uncached: Run, tmp_path: Path) -> None:
    """vLLM's attention over latents on a processor without AMX computes a prompt from its first token only."""
    plain = uncached(ROUNDS, model="tiny-mla", llm={"block_size": 16})
    cached = run(ROUNDS, model="tiny-mla", llm={"block_size": 16}, connector=cache(tmp_path / "nvme"))
    assert tokens(cached) == tokens(plain)
    if any(sum(r["cached"]) for r in cached["rounds"]):
        return  # a processor whose kernel can
    assert "caching is off" in cached["log"]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash"])
def test_every_hash_algorithm_of_vllm_hits(run: Run, tmp_path: Path, algorithm: str) -> None:
    """No PYTHONHASHSEED: hashes that differ between processes are replaced by our own."""
    job = {"connector": cache(tmp_path / "nvme"), "llm": {"prefix_caching_hash_algo": algorithm}}
    env = {"PYTHONHASHSEED": ""}
    first, second = (run([ask(A), "flush"], env=env, fresh=True, **job) for _ in range(2))
    assert second["rounds"][0]["cached"] == [672]
    assert second["rounds"][0]["tokens"] == first["rounds"][0]["tokens"]


def test_salts_and_tenants_share_nothing(run: Run, tmp_path: Path) -> None:
    rounds = [
        ask(A, salt="one"),
        ask(A, salt="one"),
        ask(A, salt="two"),
        ask(A),
        ask(A, params={"kvcache.tenant": "other"}),
        ask(A, params={"kvcache.tenant": "other"}),
    ]
    result = run(rounds, connector=cache(tmp_path / "nvme"))
    assert [r["cached"][0] for r in result["rounds"]] == [0, 672, 0, 0, 0, 672]
    assert len({str(r["tokens"]) for r in result["rounds"]}) == 1


def test_request_options_are_applied(run: Run, tmp_path: Path) -> None:
    rounds = [
        ask(A, params={"kvcache.skip_store": True}),
        ask(A),
        ask(A, params={"kvcache.skip_load": True}),
        ask(A, params={"kvcache.max_load_tokens": 100}),
        ask(A, params={"kvcache.max_load_tokens": "many", "kvcache.unheard": 1, "else": 2}),
    ]
    result = run(rounds, connector=cache(tmp_path / "nvme"))
    assert [r["cached"][0] for r in result["rounds"]] == [0, 0, 0, 96, 672]
    assert "kvcache.max_load_tokens = 'many', kvcache.unheard = 1" in result["log"]


def test_a_reset_hides_blocks_from_this_engine(run: Run, tmp_path: Path) -> None:
    rounds = [ask(A), ask(A), "reset", ask(A), ask(A), "pause", ask(A), ask(A)]
    result = run(rounds, connector=cache(tmp_path / "nvme"))
    asked = [r for r in result["rounds"] if "cached" in r]
    assert result["rounds"][2] == {"reset": True}
    assert [r["cached"][0] for r in asked] == [0, 672, 0, 672, 0, 672]
    again = run([ask(A)], connector=cache(tmp_path / "nvme"))
    assert again["rounds"][0]["cached"] == [672]  # the weights are the same: what was stored before is good


def test_observe_mode_counts_possible_hits(run: Run, uncached: Run, tmp_path: Path) -> None:
    plain = uncached(ROUNDS)
    result = run([*ROUNDS, "counters"], connector=cache(tmp_path / "nvme", mode="observe"))
    assert tokens(result) == tokens(plain)
    assert all(sum(r["cached"]) == 0 for r in result["rounds"][:3])
    assert result["rounds"][3]["hit_tokens"] == {"host": 4 * 672 - 32}
    assert result["rounds"][3]["asked_tokens"] == 4 * 672 + 832 + 640
    assert result["rounds"][3]["misses"] == {"cold": 3}  # A, B, and what LONGER has beyond A
    assert 0 < result["rounds"][3]["saved_seconds"] < sum(r["took_s"] for r in result["rounds"][:3])
    assert not (tmp_path / "nvme").exists()


def test_the_load_plan_receives_step_times(run: Run, tmp_path: Path) -> None:
    """Then a hit is held against computing it, whichever is sooner here; and vLLM hears from which tier it came."""
    options = cache(tmp_path / "nvme")
    del options["settings"]["plan"]
    result = run([ask(A, B), ask(A, B), "paces", ask(A[:40]), "counters"], connector=options)
    assert result["rounds"][0]["tokens"] == result["rounds"][1]["tokens"]
    assert 0 < result["rounds"][2]["seconds"] < 60
    cached = sum(result["rounds"][1]["cached"])
    told = result["rounds"][4]
    assert (told.get("planned_seconds", 0) > 0) == bool(cached)
    assert told.get("plan_regret_seconds", 0) <= told.get("planned_seconds", 0)
    cached += result["rounds"][3]["cached"][0]
    by_source = {name: n for name, n in result["metrics"].items() if "cached_by_source" in name}
    assert by_source.get("vllm:prompt_tokens_cached_by_source,source=host", 0) == cached

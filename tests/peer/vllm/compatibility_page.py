"""What runs, what is refused and what is untried: the rows of docs/compatibility.md, each by its tests.

    python tests/peer/vllm/compatibility_page.py > docs/compatibility.md

`results.json` beside this has what the tests said the last time that they were run with VLLM_RECORD naming it, by
version of vLLM and test. A row is run, or refused, where every test of it passed; a test that never ran says nothing.
"""

from __future__ import annotations

import json
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results.json"

Row = tuple[str, str, str]  # what, state where its tests pass, patterns of their ids, a blank between them

ROWS: tuple[tuple[str, tuple[Row, ...]], ...] = (
    (
        "Version",
        (("another version: answers, hits of a second process, every hash algorithm", "run", "test_versions.py::*"),),
    ),
    (
        "Model, float32",
        (
            (
                "Llama",
                "run",
                "test_models.py::test_a_second_process_*[[]tiny-llama-* test_versions.py::test_a_second_process_*",
            ),
            ("Qwen 2", "run", "test_models.py::test_a_second_process_*[[]tiny-qwen2-*"),
            ("Qwen 3", "run", "test_models.py::test_a_second_process_*[[]tiny-qwen3-*"),
            ("Gemma 3: windows, several groups", "run", "test_models.py::test_a_second_process_*[[]tiny-gemma3-*"),
            ("SmolLM2", "run", "test_models.py::test_a_trained_model_*"),
            (
                "DeepSeek V2 (latents) on a processor without AMX",
                "goes by uncached",
                "test_models.py::test_a_model_without_prefix_*",
            ),
        ),
    ),
    (
        "Way of loading",
        (
            (
                "asynchronous",
                "run",
                "test_models.py::test_a_second_process_*-async[]] test_versions.py::test_a_second_process_*-async[]]",
            ),
            (
                "synchronous",
                "run",
                "test_models.py::test_a_second_process_*-sync[]] test_versions.py::test_a_second_process_*-sync[]]",
            ),
            ("layer by layer", "run", "test_models.py::test_a_second_process_*-layers[]]"),
            ("under preemption, with vLLM's prefix cache on and off, faults and aborts", "run", "test_stress.py::*"),
        ),
    ),
    (
        "Parallelism",
        (
            ("one process", "run", "test_models.py::test_a_second_process_* test_versions.py::test_a_second_process_*"),
            (
                "`vllm serve`, a daemon of its own, bypass, agents and sessions, OpenAI's client",
                "run",
                "test_serve.py::test_the_documented_command_serves_hits",
            ),
            (
                "`vllm serve`: a restart, a damaged drive",
                "run",
                "test_serve.py::test_a_restart_*",
            ),
            ("tensor parallel, 2 ranks", "run", "test_serve.py::test_two_tensor_ranks_hit"),
            ("data parallel, 2 replicas", "run", "test_serve.py::test_two_replicas*"),
            ("pipeline parallel, 2 stages", "run", "test_serve.py::test_two_pipeline_stages_hit"),
            ("decode context parallel", "refused", "test_unsupported_configs.py::test_decode_context_*"),
            ("prefill context parallel", "refused", "unit/test_unsupported_configs.py"),
        ),
    ),
    (
        "Where blocks are",
        (
            (
                "another process over the same drive",
                "run",
                "test_models.py::test_a_second_process_* test_versions.py::*",
            ),
            ("Redis between engines", "run", "test_shared_tiers.py::test_another_process_hits_in_redis"),
            ("Redis behind a slow line", "run", "test_shared_tiers.py::test_a_redis_behind_*"),
            ("Redis killed", "run", "test_shared_tiers.py::test_a_killed_redis_*"),
            ("a daemon that engines share", "run", "test_shared_tiers.py::test_two_engines_*"),
            ("the daemon killed", "run", "test_shared_tiers.py::test_a_killed_daemon_*"),
            ("under vLLM's own offloading, drive", "run", "test_tier.py::test_another_process_hits_on_the_drive"),
            ("under vLLM's own offloading, Redis", "run", "test_tier.py::test_another_process_hits_in_redis"),
            ("under vLLM's own offloading, object store", "run", "test_tier.py::test_another_process_hits_in_an_*"),
        ),
    ),
    (
        "Feature",
        (
            ("by its name alone, installed", "run", "test_models.py::test_the_connector_is_found_*"),
            (
                "load or recompute",
                "run",
                "test_models.py::test_the_load_plan_* test_shared_tiers.py::test_a_redis_behind_*",
            ),
            ("salts, tenants", "run", "test_models.py::test_salts_*"),
            ("LoRA adapters", "run", "test_features.py::test_adapters_*"),
            (
                "new weights: another adapter, a reset, a pause",
                "run",
                "test_models.py::test_a_reset_* test_features.py::test_ada*",
            ),
            ("speculation by n-gram", "run", "test_features.py::test_ngram_speculation_*"),
            ("speculation by a draft model", "goes by uncached", "test_features.py::test_draft_model_*"),
            ("speculation by EAGLE, MTP", "goes by uncached", "unit/test_unsupported_configs.py"),
            ("beside another connector (MultiConnector)", "run", "test_features.py::test_multi_connector_*"),
            ("KV events by vLLM's publisher", "run", "test_events.py::*"),
            ("observe mode", "run", "test_models.py::test_observe_mode_*"),
            ("media, embeddings, fp8 blocks", "run", ""),
            ("a GPU, the V2 model runner", "run", ""),
        ),
    ),
)

UNIT = ("unit/",)
"""What stands in tests/connector/vllm runs without vLLM, and with every change."""


def state(outcomes: dict[str, str], row: Row) -> str:
    _, wanted, pattern = row
    if pattern.startswith(UNIT):
        return f"{wanted} (unit tests)"
    found = [outcome for test, outcome in outcomes.items() if any(fnmatch(test, one) for one in pattern.split())]
    told = [outcome for outcome in found if outcome != "skipped"]
    if "failed" in told:
        return "**failed**"
    return wanted if told else "untested"


def by(pattern: str) -> str:
    if pattern.startswith(UNIT):
        return f"`tests/connector/vllm/{pattern.removeprefix('unit/')}`"
    files = dict.fromkeys(one.partition("::")[0] for one in pattern.split())
    return ", ".join(f"`tests/peer/vllm/{file}`" for file in files)


def page(results: dict[str, Any]) -> str:
    versions = sorted(results)
    lines = [
        "# Compatibility",
        "",
        "Written by `python tests/peer/vllm/compatibility_page.py` from the results of `scripts/test-peers vllm`.",
        "Untested: no test of a real engine has run. On a processor (x86, AVX-512).",
        "",
        "## vLLM",
    ]
    for title, rows in ROWS:
        lines += ["", f"| {title} | {' | '.join(versions)} | by |", "| --- |" + " --- |" * (len(versions) + 1)]
        for row in rows:
            cells = [state(results[version]["tests"], row) for version in versions]
            lines.append(f"| {row[0]} | {' | '.join(cells)} | {by(row[2])} |")
    last = {version: results[version]["date"] for version in versions}
    told = ", ".join(f"{version} on {date}" for version, date in last.items())
    lines += [
        "",
        f"Last run: {told}.",
        "",
        "## Others",
        "",
        "[SGLang](sglang.md) and [transformers](transformers.md) say theirs.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(json.loads(RESULTS.read_text())), end="")

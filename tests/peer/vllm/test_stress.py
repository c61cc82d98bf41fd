"""Preemption, chunks, aborts and caches that let down: every answer is the one without a cache, and nothing is left."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peer.vllm.conftest import Run, cache
from tests.peer.vllm.prompts import SMALL, preemption_prompts

ROUNDS = [preemption_prompts(), preemption_prompts()]
ABORTS = ["aborts 1", "aborts 2"]
NOTHING = {"requests": 0, "pages": 0, "tracked": 0, "pending": 0, "loading": 0, "known": 0, "declined": 0}


def answers(result: dict) -> list:
    return [r["tokens"] for r in result["rounds"] if "tokens" in r]


@pytest.mark.parametrize(
    "faults", ["", "7 none none gone damaged hung", "8 none full asking damaged", "9 none raising"]
)
@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("load", ["async", "sync", "layers"])
def test_preemption_and_faults_change_no_answer(
    run: Run, uncached: Run, tmp_path: Path, load: str, prefix_caching: bool, faults: str
) -> None:
    plain = uncached([*ROUNDS, *ABORTS], llm={**SMALL, "num_gpu_blocks_override": 400})
    job = {"env": {"FAULTS": faults}, "prepare": ["faults"]} if faults else {}
    result = run(
        [*ROUNDS, "leaks", *ABORTS, "leaks"],
        connector=cache(tmp_path / "nvme", load=load, load_s=0.2),
        llm={**SMALL, "enable_prefix_caching": prefix_caching},
        **job,
    )
    assert answers(result) == answers(plain)
    assert all(set(r["finish"]) == {"length"} for r in result["rounds"] if "finish" in r)
    assert [r for r in result["rounds"] if "requests" in r] == [NOTHING, NOTHING]
    assert result["metrics"]["vllm:num_preemptions"] > 0
    assert sum(result["rounds"][1]["cached"]) > 0


def test_a_tiny_host_tier_changes_no_answer(run: Run, uncached: Run, tmp_path: Path) -> None:
    plain = uncached(ROUNDS, llm={**SMALL, "num_gpu_blocks_override": 400})
    options = cache(tmp_path / "nvme")
    options["settings"]["host"]["capacity_bytes"] = "4MiB"
    result = run([*ROUNDS, "flush", "leaks"], connector=options, llm=SMALL)
    assert answers(result) == answers(plain)
    assert result["rounds"][2] == {"flushed": True, "faults": []}
    assert result["rounds"][3] == NOTHING

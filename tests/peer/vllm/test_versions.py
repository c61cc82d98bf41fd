"""Other versions of vLLM, where there are environments of them: VLLM_VENVS, their paths joined by colons."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.peer.vllm.conftest import ForkServer, Run, cache, runner, version_of
from tests.peer.vllm.prompts import ask, ids

OTHERS = [Path(p).expanduser() for p in os.environ.get("VLLM_VENVS", "").split(os.pathsep) if p]
A, B = ids(700, 1), ids(700, 2)
LONGER, FULL = A + ids(150, 3), A[:640]
ROUNDS = [ask(A, B), ask(A, B), ask(LONGER, FULL)]

pytestmark = pytest.mark.skipif(not OTHERS, reason="no other versions here: name their environments in VLLM_VENVS")


@pytest.fixture(scope="module", params=OTHERS or [Path()], ids=lambda path: path.name)
def other(request: pytest.FixtureRequest) -> Iterator[tuple[ForkServer, str]]:
    python = request.param / "bin/python"
    fork_server = ForkServer(python)
    yield fork_server, version_of(python)
    fork_server.close()


@pytest.fixture
def run_other(
    other: tuple[ForkServer, str], models: Path, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Run:
    record_property("version", other[1])
    return runner(tmp_path, models, other[0])


@pytest.mark.parametrize("load", ["async", "sync"])
def test_a_second_process_hits_and_answers_the_same(run_other: Run, tmp_path: Path, load: str) -> None:
    plain = run_other(ROUNDS)
    first = run_other([*ROUNDS, "flush", "leaks"], connector=cache(tmp_path / "nvme", load=load))
    second = run_other(ROUNDS, connector=cache(tmp_path / "nvme", load=load))
    answers = [[r["tokens"] for r in result["rounds"][:3]] for result in (plain, first, second)]
    assert answers[0] == answers[1] == answers[2]
    assert [r["cached"][0] for r in first["rounds"][:3]] == [0, 672, 672]
    assert [r["cached"][0] for r in second["rounds"]] == [672, 672, 832]
    assert second["rounds"][2]["cached"][1] in {608, 640}  # the whole of a prompt of whole blocks, or all but one
    assert first["rounds"][3] == {"flushed": True, "faults": []}
    assert set(first["rounds"][4].values()) == {0}


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor", "xxhash"])
def test_every_hash_algorithm_hits_in_another_process(run_other: Run, tmp_path: Path, algorithm: str) -> None:
    """No PYTHONHASHSEED: where vLLM's hashes differ between processes, the log says so and our own are taken."""
    job = {"connector": cache(tmp_path / "nvme"), "llm": {"prefix_caching_hash_algo": algorithm}}
    first, second = (run_other([ask(A), "origin", "flush"], env={"PYTHONHASHSEED": ""}, **job) for _ in range(2))
    assert second["rounds"][0]["cached"] == [672]
    assert second["rounds"][0]["tokens"] == first["rounds"][0]["tokens"]
    assert first["rounds"][1]["origin"] == second["rounds"][1]["origin"]


def test_portable_vllm_hashes_are_used_as_names(run_other: Run, other: tuple[ForkServer, str], tmp_path: Path) -> None:
    result = run_other([ask(A), "origin"], connector=cache(tmp_path / "nvme"))
    _, minor, *_ = other[1].split(".")
    assert result["rounds"][1]["origin"] == ("vllm" if int(minor) >= 30 else "chain")

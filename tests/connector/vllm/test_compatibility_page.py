"""docs/compatibility.md is what the tests of real engines said, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.peer.vllm.compatibility_page import RESULTS, ROWS, page, state

ROOT = Path(__file__).parents[3]


def test_the_page_equals_the_generated_one() -> None:
    written = page(json.loads(RESULTS.read_text()))
    current = (ROOT / "docs" / "compatibility.md").read_text()
    assert written == current, "out of date: python tests/peer/vllm/compatibility_page.py > docs/compatibility.md"


def test_every_row_names_existing_tests() -> None:
    for _, rows in ROWS:
        for _, _, pattern in rows:
            if pattern.startswith("unit/"):
                assert (ROOT / "tests" / "connector" / "vllm" / pattern.removeprefix("unit/")).exists()
                continue
            for one in pattern.split():
                file, _, test = one.partition("::")
                text = (ROOT / "tests" / "peer" / "vllm" / file).read_text()
                assert f"def {test.split('*')[0].split('[')[0]}" in text or test == "*", one


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ({}, "untested"),
        ({"test_serve.py::test_two_tensor_ranks_hit": "skipped"}, "untested"),
        ({"test_serve.py::test_two_tensor_ranks_hit": "passed"}, "run"),
        ({"test_serve.py::test_two_tensor_ranks_hit": "failed"}, "**failed**"),
        ({"test_serve.py::test_two_replicas_share_one_cache": "passed"}, "untested"),
    ],
)
def test_a_row_shows_the_outcome_of_its_tests(outcomes: dict[str, str], expected: str) -> None:
    assert state(outcomes, ("two ranks", "run", "test_serve.py::test_two_tensor_ranks_hit")) == expected


def test_patterns_distinguish_parameters() -> None:
    outcomes = {"test_models.py::test_a_second_process_x[tiny-llama-sync]": "passed"}
    rows = {row[0]: state(outcomes, row) for _, rows in ROWS for row in rows}
    assert rows["Llama"] == rows["synchronous"] == "run"
    assert rows["Qwen 2"] == rows["asynchronous"] == "untested"

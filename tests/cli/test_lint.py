"""`kvcache lint` over a log with a timestamp and an id in its prompts, by a real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_explain import model  # noqa: F401  a fixture

RULES = " ".join(f"Rule {i}: answer with care and mention clause {i}." for i in range(40))


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def test_lint_names_the_timestamp_and_its_cost(kv: Any, model: Path, tmp_path: Path) -> None:  # noqa: F811
    log = tmp_path / "log.jsonl"
    lines = [
        {"messages": [{"role": "system", "content": f"The time is 2026-11-29 12:{i:02d}:{7 * i % 60:02d}. {RULES}"}]}
        for i in range(20)
    ]
    log.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = kv("lint", str(log), "--model", str(model))
    assert code == 0
    assert "a timestamp" in out
    figures = json.loads(kv("lint", str(log), "-m", str(model), "--json")[1])
    assert figures["requests"] == 20
    assert figures["hit_rate"] < 0.1
    assert 0.9 < figures["moved_hit_rate"] < figures["repeated_share"] + 0.1
    assert figures["texts"][0]["what"] == "a timestamp"
    assert figures["texts"][0]["before"].endswith("The time is ")


@pytest.mark.parametrize(
    "line",
    [
        {"prompt": "hello hello"},
        {"input": [1, 2, 3]},
        {"token_ids": [1, 2, 3]},
        {"body": {"messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]}},
        {"input": [{"role": "user", "content": "hello"}]},
    ],
)
def test_each_shape_of_a_request_is_read(kv: Any, model: Path, tmp_path: Path, line: Any) -> None:  # noqa: F811
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(line) + "\n\n" + json.dumps(line))
    figures = json.loads(kv("lint", str(log), "-m", str(model), "--block-tokens", "1", "--json")[1])
    assert figures["requests"] == 2
    assert figures["hit_rate"] == 0.5


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"question": "?"}', '{"token_ids": ["x"]}', '{"messages": 3}'])
def test_an_invalid_line_is_named(kv: Any, model: Path, tmp_path: Path, line: str) -> None:  # noqa: F811
    log = tmp_path / "log.jsonl"
    log.write_text('{"prompt": "hello"}\n' + line)
    code, _, said = kv("lint", str(log), "-m", str(model))
    assert code == 2
    assert "line 2" in said


def test_an_empty_log_is_reported(kv: Any, model: Path, tmp_path: Path) -> None:  # noqa: F811
    (tmp_path / "log.jsonl").write_text("")
    code, _, said = kv("lint", str(tmp_path / "log.jsonl"), "-m", str(model))
    assert (code, "no requests" in said) == (2, True)

"""Files of prompts: what they may hold, what is said of what they may not, and names that all nodes agree on."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcache.errors import ConfigError
from kvcache.fleet.warm import Prompt, read_prompts


def test_a_file_holds_one_prompt_per_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '# hot ones\n\n"You are"\n{"text": "Überall"}\n[1, 2, 3]\n{"token_ids": [7]}\n'
        '{"messages": [{"role": "system", "content": "Be brief."}]}\n'
    )
    prompts = read_prompts(file)
    assert [prompt.kind for prompt in prompts] == ["text", "text", "token_ids", "token_ids", "messages"]
    assert [prompt.content for prompt in prompts[:4]] == ["You are", "Überall", [1, 2, 3], [7]]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "7",
        "null",
        "{}",
        '""',
        "[]",
        '["a"]',
        "[true]",
        "[-1]",
        '{"text": 7}',
        '{"prompt": "a"}',
        '{"text": "a", "also": 1}',
        '{"messages": ["a"]}',
        '{"messages": []}',
    ],
)
def test_an_invalid_prompt_is_refused_with_its_line(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'"good"\n{line}\n')
    with pytest.raises(ConfigError, match="line 2"):
        read_prompts(file)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_prompts(tmp_path / "none")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_prompts(tmp_path / "bytes")


def test_a_digest_depends_only_on_prompt_and_model() -> None:
    """Of another release on another machine it must be the same: pinned."""
    prompts = [
        Prompt("text", "a"),
        Prompt("text", "ä"),
        Prompt("token_ids", [1]),
        Prompt("messages", [{"b": 1, "a": 2}]),
    ]
    digests = [prompt.digest(model) for prompt in prompts for model in ("m", "n")]
    assert len(set(digests)) == 8
    assert Prompt("messages", [{"a": 2, "b": 1}]).digest("m") == prompts[3].digest("m")
    assert Prompt("text", "a").digest("m") == "34ffd504cffe116032bd6a6dcfafae04"
    assert Prompt("text", "\ud800").digest("m")  # half a character, as JSON may have it

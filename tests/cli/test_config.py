"""`kvcache config`: what holds, and the page that is written from it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from kvcache.cli import main as frame
from kvcache.settings import TABLE
from scripts.generate.configuration_page import configuration_page

ROOT = Path(__file__).parents[2]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["kvcache", *arguments])
    with pytest.raises(SystemExit) as left:
        frame.main()
    return int(left.value.code or 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "kvcache.toml"
    file.write_text(
        f'[host]\ncapacity_bytes = "1.5GiB"\n[nvme]\npath = "{tmp_path}/nvme"\ncapacity_bytes = 1073741824\n'
    )
    return file


def test_show_as_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path) -> None:
    monkeypatch.setenv("KVCACHE_FLOW__THREADS", "3")
    assert run(monkeypatch, "config", "show", str(file), "-o", "json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert set(shown) == set(TABLE)
    assert shown["host.capacity_bytes"] == {"value": 3 << 29, "origin": str(file)}
    assert shown["flow.threads"] == {"value": 3, "origin": "KVCACHE_FLOW__THREADS"}
    assert shown["evict.policy"] == {"value": "hazard", "origin": "default"}


def test_show_as_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], file: Path) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    assert run(monkeypatch, "config", "show", str(file)) == 0
    text = capsys.readouterr().out
    for name in TABLE:
        assert name in text
    assert "1.5 GiB" in text
    assert str(file) in text


def test_an_invalid_file_is_reported_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "wrong.toml").write_text("chunk_size = 256\n")
    assert run(monkeypatch, "config", "show", str(tmp_path / "wrong.toml")) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "LMCache's word; here it is block_tokens" in text


def test_the_page_equals_the_settings() -> None:
    written = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert written == configuration_page(), (
        "write it anew: python -m scripts.generate.configuration_page > docs/configuration.md"
    )
    for name, row in TABLE.items():
        assert row.field.description, name
        assert f"`{name}`" in written

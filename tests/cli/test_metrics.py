"""`kvcache metrics`: the table, and the page that is written from it."""

from __future__ import annotations

import json
import sys

import pytest

from kvcache.cli import main as frame
from kvcache.observe.metrics import METRICS


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(sys, "argv", ["kvcache", "metrics", *arguments])
    with pytest.raises(SystemExit) as left:
        frame.main()
    assert not left.value.code
    return capsys.readouterr().out


def test_ls_names_every_metric(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(monkeypatch, capsys, "ls", "--json"))
    assert [row["name"] for row in rows] == list(METRICS)
    table = run(monkeypatch, capsys, "ls")
    assert all(metric.help in table for metric in METRICS.values())
